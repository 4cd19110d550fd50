"""Data that needs no download: handwritten digits, and texts as characters; and the folder of all other data sets.

The digits are images of 8x8 pixels: Alpaydin & Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine
Learning Repository, 1998 (its test part). `digits.npz` holds them as uint8, `digits.txt` their source and licences.

The text of a language model is a file, or Python's own manual (`pydoc_data.topics`), which every Python brings along:
about 700,000 characters, which differ a little between versions of Python.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from pydoc_data.topics import topics
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import torch

from dure.errors import DataError, UsageError
from dure.job.data.dataset import Data, Loaded
from dure.job.data.stream import Stream


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


# ---- digits

FILE = "digits.npz"

TRAIN_SAMPLES = 1437


def load_digits() -> Loaded:
    """Load 1,437 training and 360 test images as rows of 64 float32, and labels as int64; the split is fixed.

    Each pixel is standardised with the mean and deviation of the training part; a constant pixel becomes 0.
    """
    images, labels = published()
    order = np.random.default_rng(0).permutation(len(images))
    part = images[order[:TRAIN_SAMPLES]]
    deviation = part.std(axis=0)
    scaled = (images - part.mean(axis=0)) / np.where(deviation > 0, deviation, np.inf)
    inputs = torch.from_numpy(scaled[order].astype(np.float32))
    targets = torch.from_numpy(labels[order])
    train = Data(inputs[:TRAIN_SAMPLES], targets[:TRAIN_SAMPLES])
    test = Data(inputs[TRAIN_SAMPLES:], targets[TRAIN_SAMPLES:])
    return Loaded(train, test, f"digits: {len(train):,} training and {len(test):,} test images, part of dure")


def published() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """The 1,797 images as rows of 64 pixels from 0 to 16, and their labels: `sklearn.datasets.load_digits`.

    Raises `DataError` if the file is missing or damaged.
    """
    file = resources.files("dure.job.data") / FILE
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as arrays:
            return arrays["images"].astype(np.float64), arrays["labels"].astype(np.int64)
    except (OSError, EOFError, KeyError, ValueError, BadZipFile) as error:
        raise DataError(f"{file}, a part of dure, is missing or damaged ({error}). Install dure again.") from error


# ---- characters

TEST_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Characters:
    """Windows of a text; tokens number the characters that occur in it, in the order of their code points."""

    train: Stream
    test: Stream
    vocabulary: int
    source: str


def load_characters(path: Path | None, block: int) -> Characters:
    """Read the UTF-8 text `path`, or the default text; the last tenth is for tests. A window has `block` characters.

    Raises `DataError` for a file that cannot be read, `UsageError` for a text that is too short for two windows.
    """
    text = _manual() if path is None else _read(path)
    origin = f"the manual of Python {platform.python_version()}" if path is None else str(path)
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    letters, tokens = np.unique(codes, return_inverse=True)
    test = int(TEST_SHARE * len(tokens))
    if test <= block:
        raise UsageError(
            f"{origin} has {len(tokens):,} characters, a tenth of which is for tests: no window of context={block} and "
            "the character after it fit. Use a smaller context or a longer text."
        )
    train = Stream(tokens[:-test], block)
    counts = f"{len(train.tokens):,} training and {test:,} test characters of {len(letters)} kinds"
    return Characters(train, Stream(tokens[-test:], block), len(letters), f"characters: {counts}, from {origin}")


def _manual() -> str:
    return "\n".join(topics[name] for name in sorted(topics))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the text {path} cannot be read: {error}. Name a text file in UTF-8.") from error
