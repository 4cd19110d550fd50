"""Shards of a flat vector: the part of it that each of several ranks holds, and the group of these ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from dure.core.node import Group
from dure.core.vectors import Range, Ranges, equal_ranges, size

if TYPE_CHECKING:
    import torch

    from dure.core.node import Operation

SLICES_AT_ONCE, UNITS_AT_ONCE = 2, 1
"""Slices of the gradient of a whole model, and units of one whose parameters are sharded, that are scattered at once.

Each takes memory for its gradient, and for the parts that come from the other ranks."""


@dataclass(frozen=True)
class Shards:
    """The parts of a flat vector that `ranks` hold, of each of its `units` an equal one.

    A unit is what one message gathers or scatters: ranges of the vector, one after another. The units cover the vector.
    With `frees_gradients` a rank keeps no more of a gradient than its part.

    >>> Shards([[(0, 4)], [(4, 7)]], ranks=2).of(1)
    [(2, 4), (6, 7)]
    """

    units: Sequence[Ranges]
    ranks: int
    frees_gradients: bool = False

    def cuts(self, unit: int) -> Ranges:
        """The part of each rank in a unit, as ranges of the unit."""
        return self._cuts[unit]

    @cached_property
    def alone(self) -> list[list[Ranges]]:
        """The ranges of each unit that each rank holds, in a vector of that unit alone."""
        return [[[cut] for cut in cuts] for cuts in self._cuts]

    @cached_property
    def _cuts(self) -> list[Ranges]:
        return [equal_ranges(size(unit), self.ranks) for unit in self.units]

    def of(self, rank: int) -> Ranges:
        """The ranges of the vector that `rank` holds, in the order of its shard."""
        found = [each for unit in range(len(self.units)) for each in self.of_unit(unit, rank)]
        return [(start, stop) for start, stop in found if start < stop]

    def of_unit(self, unit: int, rank: int) -> Ranges:
        """The ranges of the vector that `rank` holds of a unit."""
        return part_of(self.units[unit], *self.cuts(unit)[rank])

    @cached_property
    def held(self) -> list[Ranges]:
        """The ranges of the vector that each rank holds."""
        return [self.of(rank) for rank in range(self.ranks)]

    @cached_property
    def numels(self) -> list[int]:
        """The elements of each rank's shard. That of the first is the largest."""
        return [size(ranges) for ranges in self.held]

    def join(self, shards: Iterable[torch.Tensor], whole: torch.Tensor) -> torch.Tensor:
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


class ShardedMemory(NamedTuple):
    """Elements that a worker with a shard keeps, by kind of memory; `optimizer`: of each vector of its state."""

    weights: int
    gradient: int
    optimizer: int
    messages: int


class ShardedGroup(Group, Protocol):
    """A group that has collectives of shards, as that of the engine. They go one after another, beside computations."""

    def mean_part(self, work: Any, share: float, shards: Shards) -> Operation[Any]:
        """As `mean_gradient`, whose slices are the units of `shards`; each member gets its part of them."""
        ...

    def gather(self, whole: torch.Tensor, held: Sequence[Sequence[Range]]) -> Operation[torch.Tensor]:
        """Gather `whole` in place: the member at each place has its `held[place]`, ranges of it; the first most."""
        ...
