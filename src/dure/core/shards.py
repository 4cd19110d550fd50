"""Shards of a flat vector: the part of it that each of several ranks holds, and the group of these ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from dure.core.node import Group
from dure.core.vectors import Range, Ranges, equal_ranges, size

if TYPE_CHECKING:
    import torch

    from dure.core.node import Operation


@dataclass(frozen=True)
class Shards:
    """The parts of a flat vector that `ranks` hold, of each of its `units` an equal one.

    A unit is what one message gathers or scatters: ranges of the vector, one after another. The units cover the vector.

    >>> Shards([[(0, 4)], [(4, 7)]], ranks=2).of(1)
    [(2, 4), (6, 7)]
    """

    units: Sequence[Ranges]
    ranks: int

    def cuts(self, unit: int) -> Ranges:
        """The part of each rank in a unit, as ranges of the unit."""
        return equal_ranges(size(self.units[unit]), self.ranks)

    def of(self, rank: int) -> Ranges:
        """The ranges of the vector that `rank` holds, in the order of its shard."""
        found = [each for unit in range(len(self.units)) for each in self.of_unit(unit, rank)]
        return [(start, stop) for start, stop in found if start < stop]

    def of_unit(self, unit: int, rank: int) -> Ranges:
        """The ranges of the vector that `rank` holds of a unit."""
        return part_of(self.units[unit], *self.cuts(unit)[rank])

    @cached_property
    def numels(self) -> list[int]:
        """The elements of each rank's shard."""
        return [size(self.of(rank)) for rank in range(self.ranks)]

    def join(self, shards: Sequence[torch.Tensor], whole: torch.Tensor) -> torch.Tensor:
        """Copy the shards of all ranks to their ranges of `whole`, and return it."""
        for rank, shard in enumerate(shards):
            at = 0
            for start, stop in self.of(rank):
                whole[start:stop] = shard[at : at + stop - start]
                at += stop - start
        return whole


def part_of(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Elements `start` to `stop` of what `ranges` hold one after another, as ranges of the whole vector.

    >>> part_of([(0, 4), (10, 14)], 2, 6)
    [(2, 4), (10, 12)]
    """
    found, at = [], 0
    for first, last in ranges:
        low, high = max(start - at, 0), min(stop - at, last - first)
        if low < high:
            found.append((first + low, first + high))
        at += last - first
    return found


class ShardedGroup(Group, Protocol):
    """A group that has collectives of shards, as that of the engine. They go one after another, beside computations."""

    def mean_part(self, work: Any, share: float, shards: Shards) -> Operation[Any]:
        """As `mean_gradient`, whose slices are the units of `shards`; each member gets its part of them."""
        ...

    def gather(self, whole: torch.Tensor, held: Sequence[Sequence[Range]]) -> Operation[torch.Tensor]:
        """Gather `whole` in place: the member at each place has its `held[place]`, ranges of `whole`."""
        ...
