"""8x8 images of handwritten digits, part of this package: real data that needs no download.

Alpaydin & Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998 (its test part).
`digits.npz` holds them as uint8, `digits.txt` their source and licences.
"""

from __future__ import annotations

from importlib import resources
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import torch

from dure.errors import DataError
from dure.job.data.dataset import Data, Loaded

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
