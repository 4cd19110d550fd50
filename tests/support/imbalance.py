"""A measure of how evenly servers share a model."""

from __future__ import annotations

from collections.abc import Sequence

from dure.core.vectors import Ranges, size


def imbalance(shards: Sequence[Ranges]) -> float:
    """The size of the fullest shard over the mean size: 1 is ideal, the number of shards is the worst."""
    sizes = [size(ranges) for ranges in shards]
    return max(sizes) * len(sizes) / sum(sizes) if sum(sizes) else 1.0
