"""Sums of weights over a tree, for draws in proportion to the weights.

Schaul et al., "Prioritized Experience Replay", ICLR 2016, appendix B.2.1, with 16 children of each node in place of 2:
NumPy then descends a tree of a million leaves in few passes over whole batches of draws.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

FAN_OUT = 16
TOP = 4096  # nodes of the highest level at most: one prefix sum and binary searches take the place of higher levels


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
        self._groups = [level.reshape(-1, FAN_OUT) for level in self._levels]

    @property
    def total(self) -> float:
        """The sum of all weights, as `find` sees it."""
        return float(np.cumsum(self._levels[-1])[-1])

    def weights(self, slots: NDArray[np.int64] | slice) -> NDArray[np.float64]:
        """The weights of `slots`."""
        return self._levels[0][slots]

    def set(self, slots: NDArray[np.int64], weights: NDArray[np.float64]) -> None:
        """Set the weights of `slots`. Of several weights of one slot the last one stays."""
        self._levels[0][slots] = weights
        nodes = slots
        # A sum is made from its summands anew: differences added to it would leave rounding errors in it for ever.
        for groups, sums in zip(self._groups, self._levels[1:], strict=False):
            nodes = nodes // FAN_OUT
            sums[nodes] = groups[nodes].sum(axis=1)

    def fill(self, slots: slice, weights: NDArray[np.float64] | float) -> None:
        """Set the weights of a range of slots."""
        self._levels[0][slots] = weights
        first, end = slots.start, slots.stop
        for groups, sums in zip(self._groups, self._levels[1:], strict=False):
            first, end = first // FAN_OUT, -(-end // FAN_OUT)
            sums[first:end] = groups[first:end].sum(axis=1)

    def find(self, points: NDArray[np.float64]) -> NDArray[np.int64]:
        """For each point of [0, total], the first slot at which the sum of the weights so far is above the point.

        A point that is not below the total (by rounding) gets the last slot with a weight. The total must be positive.
        """
        before = _prefix_sums(self._levels[-1])
        points = np.minimum(points, _below(before[-1]))
        nodes: NDArray[np.int64] = np.searchsorted(before[1:], points, side="right")
        points = points - before[nodes]
        for groups in reversed(self._groups[:-1]):
            before = _prefix_sums(groups[nodes])
            # The sums of a node's children may be rounded below the node's own: a point must stay below them, which
            # also keeps it from a child of weight 0.
            points = np.minimum(points, _below(before[:, -1]))
            child = (before[:, 1:] <= points[:, None]).sum(axis=1)
            points = points - before[np.arange(len(nodes)), child]
            nodes = nodes * FAN_OUT + child
        return nodes


def _rounded_up(count: int) -> int:
    return -(-count // FAN_OUT) * FAN_OUT


def _prefix_sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sums of the values before each value of the last axis, and of all."""
    sums = np.zeros((*values.shape[:-1], values.shape[-1] + 1))
    np.cumsum(values, axis=-1, out=sums[..., 1:])
    return sums


def _below(values: Any) -> Any:
    return np.nextafter(values, 0)
