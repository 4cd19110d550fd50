"""Location of a data set under the root of all (`dure.job.data.loaders`).

ROOT/mnist/train-images-idx3-ubyte.gz      and three more (or plain files without .gz)
ROOT/cifar10/cifar-10-binary.tar.gz        or the unpacked folder cifar-10-batches-bin/
ROOT/imdb/aclImdb_v1.tar.gz                or the unpacked folder aclImdb/
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def find(folders: Iterable[Path], names: Iterable[str]) -> Path | None:
    """Find the first of `folders` that contains one of `names`; return the path of the first such name, or None."""
    wanted = tuple(names)
    return next((folder / name for folder in folders for name in wanted if (folder / name).exists()), None)
