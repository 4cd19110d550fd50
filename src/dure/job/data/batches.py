"""Batches in portions that any worker can evaluate: a portion's samples depend only on its number."""

from __future__ import annotations

import numpy as np
import torch

from dure.errors import UsageError


class Batches:
    """Batches of `size` out of `samples` samples, each in portions of at most `portion`.

    With `size=0` each batch has all samples, in order. Smaller batches are slices of a shuffled order, which is drawn
    from `seed` anew for each pass over the data. The samples left over at the end of a pass are not used in that pass.

    >>> batches = Batches(10, portion=4, seed=0)
    >>> batches.count, [batches.indices(0, portion).tolist() for portion in range(batches.count)]
    (3, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]])
    """

    def __init__(self, samples: int, *, portion: int, size: int = 0, seed: int = 0) -> None:
        if min(samples, portion) < 1 or size < 0:
            raise UsageError(f"a batch needs samples and portions, got {samples=}, {portion=}, {size=}.")
        self.samples = samples
        self.portion = portion
        self.size = min(size, samples) or samples
        self.seed = seed
        self._pass = -1
        self._order = torch.arange(samples)

    @property
    def change(self) -> bool:
        """Whether one batch differs from the next."""
        return self.size < self.samples

    @property
    def count(self) -> int:
        """Number of portions of a batch."""
        return -(-self.size // self.portion)

    def indices(self, batch: int, portion: int) -> torch.Tensor:
        """Indices of the samples of one portion of one batch."""
        if self.change:
            turn, place = divmod(batch, self.samples // self.size)
            self._shuffle(turn)
        else:
            place = 0
        low = place * self.size + portion * self.portion
        return self._order[low : min(low + self.portion, (place + 1) * self.size)]

    def _shuffle(self, turn: int) -> None:
        if self._pass != turn:
            self._pass = turn
            self._order = torch.from_numpy(np.random.default_rng([self.seed, turn, 11]).permutation(self.samples))
