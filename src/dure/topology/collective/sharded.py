"""The session of a worker that holds a shard: parts of mean gradients, and gathers of parameters.

Ranks `near` each other share one copy of what is sharded. If there are several such groups, the ranks with the same
part are `across` (HSDP): their parts are summed after those of each group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from dure.core.node import Ghost
from dure.core.vectors import all_finite, pieces, size
from dure.job.optimizer import clip_factor
from dure.topology.collective.topology import GroupSession

if TYPE_CHECKING:
    from dure.core.node import Group, Operation
    from dure.core.shards import ShardedGroup, Shards
    from dure.job.gradient import Gradient
    from dure.topology.replica import WorkerReplica


@dataclass(frozen=True, slots=True)
class ShardGroups:
    """The groups of a worker: all workers, those `near` it that share a copy, and those `across` with the same part."""

    all: Group
    near: ShardedGroup
    across: Group | None
    shards: Shards
    place: int


class ShardedSession(GroupSession):
    """Means over all workers of which each gets its part, by `shards`; `clip` limits the norm of the whole mean.

    `whole`: parameters are whole at each step boundary; else a worker has those of its shard alone.
    """

    def __init__(self, worker: WorkerReplica, groups: ShardGroups, *, whole: bool, clip: float | None = None) -> None:
        super().__init__(worker, groups.all)
        self.groups = groups
        self.whole = whole
        self.shards = groups.shards
        self._clip = clip
        self._gather: Operation[torch.Tensor] | None = None
        self._across: Operation[torch.Tensor] | None = None

    @property
    def own(self) -> list[tuple[int, int]]:
        """The ranges of the flat vector that this worker holds."""
        return self.shards.held[self.groups.place]

    # ---- gradients

    def mean_gradient(self, work: Any, share: float) -> Operation[Gradient]:
        """As `GroupSession.mean_gradient`; the values are this worker's part, and the same decision at all workers."""
        return self._worker.node.spawn(self._mean_part(work, share), "its part of the mean gradient")

    async def _mean_part(self, work: Any, share: float) -> Gradient:
        gradient = await self.groups.near.mean_part(work, share, self.shards)
        started, node = self._worker.node.now(), self._worker.node
        part = await self._summed_across(gradient.values)
        self._worker.meter.add("communicate", started, node.now(), "all_reduce")
        return await self.agreed(gradient.with_values(part))

    async def part_of_mean(self, values: torch.Tensor, share: float) -> torch.Tensor:
        """This worker's part of the mean of `values`, of which each member has a `share`. `values` are changed."""
        started, node = self._worker.node.now(), self._worker.node
        values *= share
        parts = []
        for unit in self.shards.units:
            (whole,) = pieces(values, unit)
            parts.append(await self.groups.near.reduce_scatter(whole))
        part = await self._summed_across(_joined(parts))
        self._worker.meter.add("communicate", started, node.now(), "reduce_scatter")
        return part

    async def _summed_across(self, part: torch.Tensor) -> torch.Tensor:
        return part if self.groups.across is None else await self.groups.across.all_reduce(part)

    async def agreed(self, gradient: Gradient) -> Gradient:
        """Limit the norm of a gradient of which each worker has a part, and let all refuse one that is not finite."""
        squares = await self.sum_near(squares_of(gradient.values, exact=self._clip is not None))
        if isinstance(gradient.values, Ghost):
            return gradient
        gradient.checked = math.isfinite(squares)
        if not gradient.checked:
            if gradient.local is not None:
                gradient.faulty = await self.ranks_at_fault(all_finite(gradient.local))
            gradient.values.fill_(math.nan)  # a part that is finite belongs to a gradient that is refused
        elif self._clip is not None:
            gradient.values *= clip_factor(math.sqrt(squares), self._clip)
        return gradient

    async def sum_near(self, number: float) -> float:
        """The sum of a number over the workers that share a copy."""
        started, node, params = self._worker.node.now(), self._worker.node, self._worker.params
        given = torch.tensor([number], dtype=torch.float64, device="cpu")
        if isinstance(params, Ghost):
            given = params.new_empty(1, torch.float64)
        total = await self.groups.near.all_reduce(given)
        self._worker.meter.add("communicate", started, node.now(), "all_reduce")
        return 0.0 if isinstance(params, Ghost) else float(total)

    # ---- parameters

    def begin_gather(self, params: torch.Tensor) -> None:
        """Begin to gather the parameters, in place, of which each worker has stepped its part."""
        if self.whole:
            self._gather = self.groups.near.gather(params, self.shards.held)

    async def gathered(self) -> None:
        """Wait until the parameters are whole."""
        if self._gather is not None:
            started, node = self._worker.node.now(), self._worker.node
            await self._gather
            self._gather = None
            self._worker.meter.add("communicate", started, node.now(), "all_gather")

    # ---- units of parameters that are not whole

    @cached_property
    def _places(self) -> list[int]:
        numels = [len(range(*self.shards.cuts(unit)[self.groups.place])) for unit in range(len(self.shards.units))]
        return [0, *accumulate(numels)]

    def place_of(self, unit: int) -> int:
        """The start of a unit's part in the shard."""
        return self._places[unit]

    def gather_unit(self, unit: int, memory: torch.Tensor) -> Operation[torch.Tensor]:
        """Begin to gather the parameters of a unit into `memory`, of as many elements."""
        cuts, params = self.shards.cuts(unit), self._worker.params
        if not isinstance(params, Ghost):
            start, stop = cuts[self.groups.place]
            memory[start:stop] = params[self._places[unit] : self._places[unit + 1]]
        return self.groups.near.gather(memory, self.shards.alone[unit])

    def is_as_gathered(self, unit: int, memory: torch.Tensor) -> bool:
        """Whether this worker's part of a unit in `memory` has the bits that it was gathered with."""
        start, stop = self.shards.cuts(unit)[self.groups.place]
        part = self._worker.params[self._places[unit] : self._places[unit + 1]]
        return torch.equal(memory[start:stop].view(torch.uint8), part.view(torch.uint8))

    def scatter_unit(self, unit: int, gradient: torch.Tensor) -> Operation[torch.Tensor]:
        """Begin to sum the `gradient` of a unit over all members; the result is this worker's part."""
        scatter = self.groups.near.reduce_scatter(gradient)
        if self.groups.across is None:
            return scatter
        summed = self._summed_behind(self._across, scatter)
        self._across = self._worker.node.spawn(summed, "its part of a unit's gradient")
        return self._across

    async def _summed_behind(
        self, earlier: Operation[torch.Tensor] | None, scatter: Operation[torch.Tensor]
    ) -> torch.Tensor:
        """Sum a part across, after the `earlier` one: all members begin their collectives in one order."""
        part = await scatter
        if earlier is not None:
            await earlier
        return await self._summed_across(part)


def squares_of(part: torch.Tensor, *, exact: bool) -> float:
    """The sum of squares of a part of a gradient; NaN if an element is not finite.

    Unless it is to be `exact`, it says no more than whether all elements are finite.
    """
    if isinstance(part, Ghost):
        return 0.0
    if exact:
        norm = float(torch.linalg.vector_norm(part, dtype=torch.float32 if part.itemsize < 4 else None))
        if norm == math.inf:  # squares of finite values may overflow; the sum in float64 takes fifty times as long
            norm = float(torch.linalg.vector_norm(part, dtype=torch.float64))
        return norm * norm
    return 0.0 if all_finite(part) else math.nan


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    if isinstance(parts[0], Ghost):
        return parts[0].new_empty(size([(0, part.numel()) for part in parts]))
    return torch.cat(list(parts))
