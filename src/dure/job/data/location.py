"""Location of data sets on this machine.

Each data set has its own folder under a root:

    ROOT/mnist/train-images-idx3-ubyte.gz      and three more (or plain files without .gz)
    ROOT/cifar10/cifar-10-binary.tar.gz        or the unpacked folder cifar-10-batches-bin/
    ROOT/imdb/aclImdb_v1.tar.gz                or the unpacked folder aclImdb/
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from dure.errors import DataError


def data_root(given: Path | str | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of all data sets: `given` (the flag `--data`), else `DURE_DATA`, else the user's cache.

    The cache is `$XDG_CACHE_HOME/dure/data`, or `~/.cache/dure/data`; the first download creates it. Raises `DataError`
    if `--data` or `DURE_DATA` names a folder that does not exist.
    """
    named = given if given is not None else environ.get("DURE_DATA") or None
    if named is not None:
        root = Path(named).expanduser()
        if not root.is_dir():
            origin = "--data" if given is not None else "DURE_DATA"
            raise DataError(f"{origin} names {root}, which is not a folder. Name the folder that holds the data sets.")
        return root
    cache = environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "dure" / "data"


def find(folders: Iterable[Path], names: Iterable[str]) -> Path | None:
    """Find the first of `folders` that contains one of `names`; return the path of the first such name, or None."""
    wanted = tuple(names)
    return next((folder / name for folder in folders for name in wanted if (folder / name).exists()), None)
