"""Ranges of a flat vector: its parts by start and stop."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


Range = tuple[int, int]
Ranges = list[Range]


class FlatSlice(Protocol):
    """A slice of the flat parameters, as `replica.Layer` is one."""

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...


class ShapedSlice(FlatSlice, Protocol):
    """A slice that is a tensor of some shape."""

    @property
    def shape(self) -> tuple[int, ...]: ...


def equal_ranges(numel: int, parts: int) -> Ranges:
    """`parts` contiguous ranges that cover `numel` elements; sizes differ by at most one, the larger ones first.

    >>> equal_ranges(10, 3)
    [(0, 4), (4, 7), (7, 10)]
    """
    size, larger = divmod(numel, parts)
    bounds = [part * size + min(part, larger) for part in range(parts + 1)]
    return list(pairwise(bounds))


def size(ranges: Ranges) -> int:
    """Elements in `ranges`."""
    return sum(stop - start for start, stop in ranges)


def pieces(flat: torch.Tensor, ranges: Ranges) -> list[torch.Tensor]:
    """Views of `ranges` of a flat tensor; itself where that is all of it."""
    if len(ranges) == 1 and ranges[0] == (0, flat.numel()):
        return [flat]
    return [flat[start:stop] for start, stop in ranges]


def gather(flat: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    """A copy of `ranges` of a flat tensor, one after another: what a shard holds."""
    import torch

    return torch.cat([flat[:0], *pieces(flat, ranges)])
