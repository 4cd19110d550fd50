"""Gorila's rule for outliers: the gradient of a loss far above the mean loss is dropped.

Nair et al., "Massively Parallel Methods for Deep Reinforcement Learning", 2015, section 5.
"""

from __future__ import annotations

import math
from typing import Any

WARM_UP = 100
"""Losses before the first that may be dropped."""

DECAY = 0.99
"""Weight of the past in the running mean and variance."""

IN_A_ROW = 10
"""Drops in a row after which a loss counts: larger losses have become the rule."""


class OutlierFilter:
    """Admits a loss up to `k` standard deviations above the running mean of those that were admitted.

    During the first `warm_up` losses mean and variance are those of all so far (population); afterwards they decay
    exponentially, or stay those of all if `decay` is 1.
    """

    def __init__(self, k: float, *, warm_up: int = WARM_UP, decay: float = DECAY) -> None:
        self.k, self.warm_up, self.decay = k, warm_up, decay
        self.count = 0
        self.mean = 0.0
        self.variance = 0.0
        self.dropped = 0
        self._in_a_row = 0

    def admits(self, loss: float) -> bool:
        """Whether the gradient of `loss` counts; the loss then enters the mean."""
        limit = self.mean + self.k * math.sqrt(self.variance)
        if self.count >= self.warm_up and loss > limit and self._in_a_row < IN_A_ROW:
            self._in_a_row += 1
            self.dropped += 1
            return False
        self._in_a_row = 0
        self.count += 1
        weight = 1 / self.count if self.count <= self.warm_up or self.decay == 1 else 1 - self.decay
        difference = loss - self.mean
        self.mean += weight * difference
        self.variance = (1 - weight) * (self.variance + weight * difference**2)
        return True

    def state(self) -> dict[str, Any]:
        return {"seen": [self.count, self.mean, self.variance, self.dropped, self._in_a_row]}

    def restore(self, state: dict[str, Any]) -> None:
        self.count, self.mean, self.variance, self.dropped, self._in_a_row = state["seen"]
