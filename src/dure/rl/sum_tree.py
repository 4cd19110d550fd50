"""Sums of weights over a tree, for draws in proportion to the weights.

Schaul et al., "Prioritized Experience Replay", ICLR 2016, appendix B.2.1, with 16 children of each node in place of 2:
NumPy then descends a tree of a million leaves in few passes over whole batches of draws.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FAN_OUT = 16

TOP = 4096
"""Nodes of the highest level at most. One prefix sum over it and binary searches are faster than higher levels."""

BELOW = 1 - 2.0**-52
"""A positive number times this is the next smaller one, or the one before it."""

SUM_BEFORE = np.triu(np.ones((FAN_OUT, FAN_OUT + 1)), 1)
"""Row times this: the sums of the row's values before each one, and of all. `cumsum` is slow for many short rows."""


class SumTree:
    """Weights of the slots 0 .. size - 1, all 0 at first, in float64.

    >>> tree = SumTree(4)
    >>> tree.set(np.array([0, 2, 3]), np.array([1.0, 3.0, 4.0]))
    >>> tree.total, tree.find(np.array([0.0, 1.0, 3.9, 4.0, 8.0])).tolist()
    (8.0, [0, 2, 2, 3, 3])
    """

    def __init__(self, size: int) -> None:
        self._levels = [np.zeros(_rounded_up(size))]
        while self._levels[-1].size > TOP:
            self._levels.append(np.zeros(_rounded_up(self._levels[-1].size // FAN_OUT)))
        self._groups = [level.reshape(-1, FAN_OUT) for level in self._levels[:-1]]
        self._top: NDArray[np.float64] | None = None  # sums of the highest level's nodes before each, and of all

    @property
    def total(self) -> float:
        """The sum of all weights, as `find` sees it."""
        return float(self._prefix_sums()[-1])

    def weights(self, slots: NDArray[np.int64]) -> NDArray[np.float64]:
        """The weights of `slots`."""
        return self._levels[0].take(slots)

    # A sum is made from its summands anew: differences added to it would leave rounding errors in it for ever.

    def set(self, slots: NDArray[np.int64], weights: NDArray[np.float64]) -> None:
        """Set the weights of `slots`. Of several weights of one slot the last one stays."""
        self._levels[0][slots] = weights
        nodes = slots
        for groups, sums in zip(self._groups, self._levels[1:], strict=True):
            nodes = nodes // FAN_OUT
            sums[nodes] = _row_sums(groups.take(nodes, axis=0))
        self._top = None

    def fill(self, slots: slice, weights: NDArray[np.float64] | float) -> None:
        """Set the weights of a range of slots."""
        self._levels[0][slots] = weights
        first, end = slots.start, slots.stop
        for groups, sums in zip(self._groups, self._levels[1:], strict=True):
            first, end = first // FAN_OUT, -(-end // FAN_OUT)
            sums[first:end] = _row_sums(groups[first:end])
        self._top = None

    def find(self, points: NDArray[np.float64]) -> NDArray[np.int64]:
        """For each point of [0, total], the first slot at which the sum of the weights so far is above the point.

        A point that is not below the total (by rounding) gets the last slot with a weight. The total must be positive.
        """
        sums = self._prefix_sums()
        points = np.minimum(points, sums[-1] * BELOW)
        nodes = sums.searchsorted(points, side="right") - 1
        points = points - sums[nodes]
        first = np.arange(len(points)) * (FAN_OUT + 1)
        for groups in reversed(self._groups):
            sums = groups.take(nodes, axis=0) @ SUM_BEFORE
            # The sum of a node's children may be rounded below the node's own. A point must stay below it, which also
            # keeps it from a child of weight 0.
            points = np.minimum(points, sums[:, -1] * BELOW)
            child = (sums > points[:, None]).argmax(axis=1) - 1
            points -= sums.take(first + child)
            nodes = nodes * FAN_OUT + child
        return nodes

    def _prefix_sums(self) -> NDArray[np.float64]:
        if self._top is None:
            self._top = np.concatenate([[0.0], self._levels[-1].cumsum()])
        return self._top


def _rounded_up(count: int) -> int:
    return -(-count // FAN_OUT) * FAN_OUT


def _row_sums(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    sums: NDArray[np.float64] = np.einsum("ij->i", rows)  # `sum` takes more than twice the time on short rows
    return sums
