"""MNIST in its published IDX layout.

LeCun, Cortes & Burges, "The MNIST database of handwritten digits", 1998. An IDX file, all numbers big-endian:

    images   int32 magic 2051, int32 count, int32 rows = 28, int32 columns = 28, then count x 28 x 28 bytes
    labels   int32 magic 2049, int32 count, then count bytes 0..9
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from dure.errors import DataError
from dure.job.data.dataset import Data, Loaded
from dure_jobs.data.download import Published, fetch
from dure_jobs.data.location import find

HOMES = ("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist")
SUMS = {
    "train-images-idx3-ubyte": (9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
    "train-labels-idx1-ubyte": (28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
    "t10k-images-idx3-ubyte": (1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
    "t10k-labels-idx1-ubyte": (4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
}
MOST_SAMPLES = 1_000_000
MEAN, DEVIATION = 0.1307, 0.3081
"""Mean and standard deviation of the published training set's pixels, scaled to 0..1."""


def load_mnist(root: Path, homes: tuple[str, ...] = HOMES) -> Loaded:
    """Load images as float32 (count, 1, 28, 28), standardised, and labels as int64.

    The four files are searched in `root/mnist`, `root/MNIST/raw` and `root`, plain or with `.gz`. Missing files are
    downloaded to `root/mnist`. Raises `DataError` for a damaged file, or a failed download.
    """
    paths = {name: _locate(root, name, homes) for name in SUMS}
    train = _pair(paths["train-images-idx3-ubyte"], paths["train-labels-idx1-ubyte"])
    test = _pair(paths["t10k-images-idx3-ubyte"], paths["t10k-labels-idx1-ubyte"])
    folder = paths["train-images-idx3-ubyte"].parent
    return Loaded(train, test, f"MNIST: {len(train):,} training and {len(test):,} test images, from {folder}")


def _locate(root: Path, name: str, homes: tuple[str, ...]) -> Path:
    folders = (root / "mnist", root / "MNIST" / "raw", root)
    found = find(folders, (name, f"{name}.gz"))
    if found is not None:
        return found
    nbytes, sha256 = SUMS[name]
    try:
        return fetch(Published(f"{name}.gz", nbytes, sha256, homes), root / "mnist")
    except DataError as error:
        files = ", ".join(f"{each}.gz" for each in SUMS)
        raise DataError(
            f"MNIST is not under {root} and {error}. Without a network, put {files} (packed or not) "
            f"into {root / 'mnist'}, or name the folder above mnist/ with --data or DURE_DATA."
        ) from error


def _pair(images: Path, labels: Path) -> Data:
    pixels = read_images(images)
    digits = read_labels(labels)
    if len(pixels) != len(digits):
        raise DataError(
            f"{images} holds {len(pixels):,} images but {labels} {len(digits):,} labels: the sets differ. "
            "Replace both with the published pair."
        )
    return Data(((pixels.float() / 255) - MEAN).div_(DEVIATION).unsqueeze_(1), digits.long())


def read_images(path: Path) -> Tensor:
    """Read an IDX file of images: uint8, (count, 28, 28)."""
    count, pixels = _read(path, magic=2051, shape=(28, 28), what="images")
    return pixels.view(count, 28, 28)


def read_labels(path: Path) -> Tensor:
    """Read an IDX file of labels: uint8, (count,), each 0..9."""
    _, labels = _read(path, magic=2049, shape=(), what="labels")
    if int(labels.max()) > 9:
        raise DataError(f"{path} holds the label {int(labels.max())}, where 0 to 9 are right. {_again(path)}")
    return labels


def _read(path: Path, *, magic: int, shape: tuple[int, ...], what: str) -> tuple[int, Tensor]:
    """Read header and body of an IDX file, plain or gzipped: (count, flat uint8)."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            count = _header(file, path, magic, shape, what)
            expected = count * math.prod(shape)
            body = file.read(expected + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}. {_again(path)}") from error
    if len(body) != expected:
        given = f"{len(body):,} bytes follow" if len(body) < expected else "more follow"
        raise DataError(f"{path} announces {count:,} {what}, {expected:,} bytes; {given} its header. {_again(path)}")
    return count, torch.frombuffer(bytearray(body), dtype=torch.uint8)


def _header(file: BinaryIO | gzip.GzipFile, path: Path, magic: int, shape: tuple[int, ...], what: str) -> int:
    numbers = 2 + len(shape)
    header = file.read(4 * numbers)
    if len(header) < 4 * numbers:
        raise DataError(f"{path} ends inside its header: {len(header)} bytes of {4 * numbers}. {_again(path)}")
    given, count, *sizes = struct.unpack(f">{numbers}i", header)
    if given != magic:
        raise DataError(f"{path} starts with the magic number {given}, where IDX {what} have {magic}. {_again(path)}")
    if tuple(sizes) != shape:
        raise DataError(
            f"{path} holds {sizes[0]} x {sizes[1]} pixels per image, where MNIST has 28 x 28. {_again(path)}"
        )
    if not 0 < count <= MOST_SAMPLES:
        raise DataError(f"{path} announces {count:,} {what}, where 1 to {MOST_SAMPLES:,} can be right. {_again(path)}")
    return int(count)


def _again(path: Path) -> str:
    return f"Replace it with the published {path.name}, or delete it to have it downloaded."
