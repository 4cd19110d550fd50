"""CIFAR-10 in its published binary layout.

Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009. The archive `cifar-10-binary.tar.gz` holds
`cifar-10-batches-bin/data_batch_1.bin` .. `data_batch_5.bin` and `test_batch.bin`, each a row of records:

    1 byte label 0..9, then 1024 bytes red, 1024 green, 1024 blue, row by row      3,073 bytes in all

Nothing is unpacked to disk. A set with only some of the training batches is accepted.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from dure.errors import DataError
from dure.job.data.dataset import Data, Loaded
from dure_jobs.data.archive import files
from dure_jobs.data.download import Published, fetch
from dure_jobs.data.location import find

HOMES = ("https://www.cs.toronto.edu/~kriz",)
ARCHIVE = "cifar-10-binary.tar.gz"
NBYTES = 170_052_171
SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
FOLDER = "cifar-10-batches-bin"
TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST = "test_batch.bin"
RECORD = 1 + 3 * 32 * 32
MOST_RECORDS = 10_000
MEAN = (0.4914, 0.4822, 0.4465)
DEVIATION = (0.2470, 0.2435, 0.2616)
"""Mean and standard deviation per channel of the published training set's pixels, scaled to 0..1."""


def load_cifar10(root: Path, homes: tuple[str, ...] = HOMES) -> Loaded:
    """Load images as float32 (count, 3, 32, 32), standardised per channel, and labels as int64.

    The folder `cifar-10-batches-bin` or the archive is searched in `root/cifar10` and `root`. If neither is found, the
    archive is downloaded to `root/cifar10`. Raises `DataError` for a damaged or unsafe file, or a failed download.
    """
    path = _locate(root, homes)
    batches = _from_folder(path) if path.is_dir() else _from_archive(path)
    found = [name for name in TRAIN if name in batches]
    for needed, present in ((TRAIN[0], bool(found)), (TEST, TEST in batches)):
        if not present:
            held = ", ".join(sorted(batches)) or "no batch"
            raise DataError(f"{path} has no {needed}; it holds {held}. {_again(path)}")
    train = _data(torch.cat([batches[name] for name in found]))
    test = _data(batches[TEST])
    counts = f"{len(found)} of 5 training batches ({len(train):,} images) and {len(test):,} test images"
    return Loaded(train, test, f"CIFAR-10: {counts}, from {path}")


def _locate(root: Path, homes: tuple[str, ...]) -> Path:
    found = find((root / "cifar10", root), (FOLDER, ARCHIVE))
    if found is not None:
        return found
    try:
        return fetch(Published(ARCHIVE, NBYTES, SHA256, homes), root / "cifar10")
    except DataError as error:
        raise DataError(
            f"CIFAR-10 is not under {root} and {error}. Without a network, put {ARCHIVE}, or the folder {FOLDER} "
            f"out of it, into {root / 'cifar10'}, or name the folder above cifar10/ with --data or DURE_DATA."
        ) from error


def _from_folder(folder: Path) -> dict[str, Tensor]:
    batches = {}
    for name in (*TRAIN, TEST):
        path = folder / name
        if path.exists():
            _check_length(path.stat().st_size, str(path), folder)
            batches[name] = _records(path.read_bytes(), str(path), folder)
    return batches


def _from_archive(path: Path) -> dict[str, Tensor]:
    wanted = {f"{FOLDER}/{name}": name for name in (*TRAIN, TEST)}
    found = files(path, wanted.__contains__, most=RECORD * MOST_RECORDS, again=_again(path))
    return {wanted[member]: _records(body, f"{member} in {path}", path) for member, body in found}


def _check_length(nbytes: int, where: str, path: Path) -> None:
    records, rest = divmod(nbytes, RECORD)
    if rest or not 0 < records <= MOST_RECORDS:
        raise DataError(
            f"{where} has {nbytes:,} bytes, where 1 to {MOST_RECORDS:,} records of {RECORD:,} bytes are right. "
            f"{_again(path)}"
        )


def _records(body: bytes, where: str, path: Path) -> Tensor:
    """Records of one batch: uint8, (count, 3073)."""
    _check_length(len(body), where, path)
    records = torch.frombuffer(bytearray(body), dtype=torch.uint8).view(-1, RECORD)
    label = int(records[:, 0].max())
    if label > 9:
        raise DataError(f"{where} holds the label {label}, where 0 to 9 are right. {_again(path)}")
    return records


def _data(records: Tensor) -> Data:
    images = records[:, 1:].reshape(-1, 3, 32, 32).float().div_(255)
    images.sub_(torch.tensor(MEAN).view(3, 1, 1)).div_(torch.tensor(DEVIATION).view(3, 1, 1))
    return Data(images, records[:, 0].long())


def _again(path: Path) -> str:
    return f"Replace {path} with the published {ARCHIVE}, or delete it to have that downloaded."
