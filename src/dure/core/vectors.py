"""Flat vectors: ranges of them by start and stop, and a check for NaN and infinity."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from dure.core.node import Ghost

if TYPE_CHECKING:
    import torch


Range = tuple[int, int]
Ranges = list[Range]


class FlatSlice(Protocol):
    """A slice of a flat vector, such as `job.replica.Layer`."""

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...


class ShapedSlice(FlatSlice, Protocol):
    """A slice of a flat vector that holds a tensor of `shape`."""

    @property
    def shape(self) -> tuple[int, ...]: ...


def equal_ranges(numel: int, parts: int) -> Ranges:
    """Divide `numel` elements into `parts` contiguous ranges whose sizes differ by at most one, the larger first.

    >>> equal_ranges(10, 3)
    [(0, 4), (4, 7), (7, 10)]
    """
    size, larger = divmod(numel, parts)
    bounds = [part * size + min(part, larger) for part in range(parts + 1)]
    return list(pairwise(bounds))


def size(ranges: Ranges) -> int:
    """The number of elements in `ranges`."""
    return sum(stop - start for start, stop in ranges)


def pieces(flat: torch.Tensor, ranges: Ranges) -> list[torch.Tensor]:
    """Views of `ranges` of a flat tensor, or the tensor itself for one range that covers it."""
    if len(ranges) == 1 and ranges[0] == (0, flat.numel()):
        return [flat]
    return [flat[start:stop] for start, stop in ranges]


def gather(flat: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    """Copy `ranges` of a flat tensor into one vector, one after another, as a shard holds them."""
    import torch

    return torch.cat([flat[:0], *pieces(flat, ranges)])


def all_finite(values: torch.Tensor) -> bool:
    """Whether no element of a flat vector, dense or sparse and coalesced, is NaN or infinity.

    A finite sum of squares proves it in one pass. Only where it is not finite, each element is checked.

    >>> import torch
    >>> all_finite(torch.ones(3)), all_finite(torch.tensor([1.0, torch.nan])), all_finite(torch.full((3,), 1e38))
    (True, False, True)
    """
    if isinstance(values, Ghost):
        return True
    values = values.values() if values.is_sparse else values
    return math.isfinite(values.dot(values).item()) or bool(values.isfinite().all())
