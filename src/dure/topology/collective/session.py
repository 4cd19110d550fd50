"""A method's use of a group of workers: `worker.group`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dure.topology.collective.agreement import Agreement
from dure.topology.collective.compressed import CompressedGroup

if TYPE_CHECKING:
    from dure.core.node import Group, Operation
    from dure.job.gradient import Gradient
    from dure.topology.replica import Stats, WorkerReplica


class GroupSession:
    """Means over all workers, weighted by their batch sizes, with the seconds that they take on the worker's meter.

    `members` makes the collectives.
    """

    def __init__(self, worker: WorkerReplica, members: Group) -> None:
        self.members = members
        self._worker = worker

    @property
    def encodes(self) -> bool:
        """Whether a codec encodes what travels over this group."""
        return isinstance(self.members, CompressedGroup)

    def mean_gradient(self, work: Any, share: float) -> Operation[Gradient]:
        """Start the gradient of `work`, times `share`, summed over the group."""
        return self.members.mean_gradient(work, share)

    def mean(
        self, values: torch.Tensor, share: float | None = None, *, since: torch.Tensor | None = None
    ) -> Operation[torch.Tensor]:
        """Start on the mean of `values` over the group, weighted by batch size or `share`; `values` stay as they are.

        They may be read, and changed, while those of others are on their way. Where a codec `encodes`, the change
        `since` a tensor that is the same at every worker is encoded; without `since` nothing is.
        """
        share = self._worker.share if share is None else share
        if since is not None and isinstance(self.members, CompressedGroup):
            return self.members.mean_change(values, since, share)
        return self.members.all_reduce(values * share)

    async def mean_params(self) -> None:
        """Replace the worker's parameters by their mean over the group; merge the replicas' buffers."""
        worker = self._worker
        started = worker.node.now()
        worker.params.copy_(await self.mean(worker.params))
        await self.mean_buffers()
        worker.meter.add("communicate", started, worker.node.now(), "all_reduce")

    async def mean_buffers(self) -> None:
        """Merge the replicas' buffers, if the model has any."""
        worker = self._worker
        if worker.buffers is not None:
            worker.buffers = worker.merge_buffers(await self.members.all_gather(worker.buffers))

    async def gather_stats(self, stats: Stats) -> None:
        """Give `stats` to all members; `Worker.stats` then has those of each, in rank order."""
        worker = self._worker
        started = worker.node.now()
        own = torch.tensor(list(stats.values()), dtype=torch.float64, device="cpu")
        rows = await self.members.all_gather(own)
        worker.stats = [dict(zip(stats, row.tolist(), strict=True)) for row in rows]
        worker.meter.add("wait", started, worker.node.now())

    async def all_go_on(self, late: bool) -> bool:
        """Whether all members go on: none of them is `late`."""
        agreement = Agreement(self.members)
        return agreement.read(await agreement.start("end" if late else "step")).going_on

    async def ranks_at_fault(self, sound: bool) -> list[int]:
        """The ranks whose part of a gradient is not `sound`."""
        mine = torch.tensor([float(not sound)], dtype=torch.float64, device="cpu")
        parts = await self.members.all_gather(mine)
        return [rank for rank, each in zip(self.members.ranks, parts, strict=True) if each.item()]
