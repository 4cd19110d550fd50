"""Location of data sets on this machine: each has its own folder under a root."""

from __future__ import annotations

import os
from collections.abc import Mapping
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
