"""Modes and methods of figure 1 of IT-signSGD, for the figure and for the sweep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

WORKERS = 15
FEW, MANY = 4, 64
"""Batch sizes."""

MODES: Mapping[int, int] = {1: 0, 2: 9, 3: 12, 4: 14}
"""Workers with batches of `FEW`, by mode."""


class Contender(NamedTuple):
    """A codec that aggregates gradients, and a learning rate that suits it by data set: signs need small rates."""

    codec: str
    lr: Mapping[str, float]


_OF_SIGNS = {"mnist": 1e-3, "cifar10": 3e-3}

METHODS: Mapping[str, Contender] = {
    "SGD": Contender("fp32", {"mnist": 0.5, "cifar10": 0.1}),
    "signSGD-MV": Contender("sign:zeros=random", _OF_SIGNS),
    "IT-signSGD (paper)": Contender("it-sign:granularity=coordinate,zeros=random", _OF_SIGNS),
    "IT-signSGD": Contender("it-sign", _OF_SIGNS),
}


def batch_sizes(mode: int, many: int = MANY) -> tuple[int, ...]:
    """The batch size of each worker."""
    few = MODES[mode]
    return (FEW,) * few + (many,) * (WORKERS - few)
