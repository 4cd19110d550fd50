"""8x8 images of handwritten digits, bundled with scikit-learn: real data that needs no download.

Alpaydin & Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998 (its test part).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from dure.job.data.dataset import Data, Loaded

TRAIN_SAMPLES = 1437


def load_digits() -> Loaded:
    """Load 1,437 training and 360 test images as rows of 64 float32, and labels as int64; the split is fixed.

    Each pixel is standardised with the mean and deviation of the training part; a constant pixel becomes 0.
    """
    images, labels = _bundled()
    order = np.random.default_rng(0).permutation(len(images))
    part = images[order[:TRAIN_SAMPLES]]
    deviation = part.std(axis=0)
    scaled = (images - part.mean(axis=0)) / np.where(deviation > 0, deviation, np.inf)
    inputs = torch.from_numpy(scaled[order].astype(np.float32))
    targets = torch.from_numpy(labels[order].astype(np.int64))
    train = Data(inputs[:TRAIN_SAMPLES], targets[:TRAIN_SAMPLES])
    test = Data(inputs[TRAIN_SAMPLES:], targets[TRAIN_SAMPLES:])
    return Loaded(train, test, f"digits: {len(train):,} training and {len(test):,} test images, from scikit-learn")


def _bundled() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Images and labels of `sklearn.datasets.load_digits`, read from its file.

    Importing scikit-learn would take most of a second.
    """
    package = find_spec("sklearn")
    for place in (package.submodule_search_locations or ()) if package is not None else ():
        path = Path(place) / "datasets" / "data" / "digits.csv.gz"
        if path.exists():
            table = np.loadtxt(path, delimiter=",")
            return table[:, :-1], table[:, -1]
    from sklearn.datasets import load_digits as bundled

    images, labels = bundled(return_X_y=True)
    return images, labels
