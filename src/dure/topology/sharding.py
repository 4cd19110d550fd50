"""How flat parameters are cut into shards.

    memory    0 ........ n/S ........ 2n/S ........ n      equal parts; a layer may span two
    layer     |layer 3|layer 0|   |layer 1|layer 2|        whole layers, the largest first to the emptiest shard

A server's time grows with the elements it holds, so what counts is the fullest shard (`imbalance`). Li et al.,
"Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014, and many after them place whole
layers; one layer that holds three quarters of a model then makes all other servers idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, Protocol

from dure.errors import StrategyError

if TYPE_CHECKING:
    import torch

Range = tuple[int, int]
Ranges = list[Range]


class Span(Protocol):
    """A named slice of the flat parameters, as `replica.Layer` is one."""

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...


def equal_ranges(numel: int, parts: int) -> Ranges:
    """`parts` contiguous ranges that cover `numel` elements; sizes differ by at most one, the larger ones first.

    >>> equal_ranges(10, 3)
    [(0, 4), (4, 7), (7, 10)]
    """
    size, larger = divmod(numel, parts)
    bounds = [part * size + min(part, larger) for part in range(parts + 1)]
    return list(pairwise(bounds))


def split(layers: Sequence[Span], numel: int, shards: int, by: Literal["memory", "layer"] = "memory") -> list[Ranges]:
    """The ranges that each of `shards` servers holds, in ascending order; none where there is too little to share.

    Raises:
        StrategyError: there are no shards, or no such way of splitting.
    """
    if shards < 1:
        raise StrategyError(f"shards counts servers and must be >= 1, got {shards}. Use 1 for a single server.")
    if by == "memory":
        return [[cut] if cut[0] < cut[1] else [] for cut in equal_ranges(numel, shards)]
    if by == "layer":
        return _whole_layers(layers, shards)
    raise StrategyError(f'parameters are split by "memory" or "layer", got {by!r}.')


def _whole_layers(layers: Sequence[Span], shards: int) -> list[Ranges]:
    """Greedy: the largest layer first, to the shard that holds least; the first of equals, both times."""
    held: list[Ranges] = [[] for _ in range(shards)]
    sizes = [0] * shards
    for layer in sorted(layers, key=lambda layer: layer.start - layer.stop):
        emptiest = sizes.index(min(sizes))
        held[emptiest].append((layer.start, layer.stop))
        sizes[emptiest] += layer.stop - layer.start
    return [_joined(sorted(ranges)) for ranges in held]


def _joined(ranges: Ranges) -> Ranges:
    """Neighboring ranges as one."""
    joined: Ranges = []
    for start, stop in ranges:
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def size(ranges: Ranges) -> int:
    """Elements in `ranges`."""
    return sum(stop - start for start, stop in ranges)


def imbalance(shards: Sequence[Ranges]) -> float:
    """The fullest shard over the mean one: 1 is ideal, the number of shards the worst."""
    sizes = [size(ranges) for ranges in shards]
    return max(sizes) * len(sizes) / sum(sizes) if sum(sizes) else 1.0


def pieces(flat: torch.Tensor, ranges: Ranges) -> list[torch.Tensor]:
    """Views of `ranges` of a flat tensor; itself where that is all of it."""
    if len(ranges) == 1 and ranges[0] == (0, flat.numel()):
        return [flat]
    return [flat[start:stop] for start, stop in ranges]


def gather(flat: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    """A copy of `ranges` of a flat tensor, one after another: what a shard holds."""
    import torch

    return torch.cat([flat[:0], *pieces(flat, ranges)])
