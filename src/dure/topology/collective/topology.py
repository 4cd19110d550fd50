"""Collectives in one run: the group of all workers, a method's use of it, and the agreement before a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from dure.errors import StrategyError, UsageError
from dure.topology.base import RunPlan, Topology
from dure.topology.collective.algorithms import hosts_of
from dure.topology.collective.compressed import CompressedGroup
from dure.topology.collective.message_group import SentGroup, algorithm_of, machines_of

if TYPE_CHECKING:
    from dure.core.meter import Meter
    from dure.core.node import Group, Node, Operation
    from dure.job.gradient import Gradient
    from dure.topology.collective.choice import Collective
    from dure.topology.replica import Stats, WorkerReplica


Intention = Literal["step", "end", "evaluate", "skip", "overflow"]
_COUNTED: tuple[Intention, ...] = ("step", "end", "evaluate", "overflow")


class Counts(NamedTuple):
    """The number of ranks with each intention, and of those that left out the exchanged step before."""

    step: int
    end: int
    evaluate: int
    overflow: int
    left_out: int
    ranks: int

    @property
    def skip(self) -> int:
        return self.ranks - self.step - self.end - self.evaluate - self.overflow

    @property
    def going_on(self) -> bool:
        """Whether all ranks step or skip, or all only evaluate.

        Raises `UsageError` if some only evaluate, or some left out an exchanged step that others took.
        """
        if 0 < self.left_out < self.ranks:
            raise UsageError(
                f"{self.left_out} of {self.ranks} ranks left out a step whose gradient had been exchanged, and the "
                "others took it: the replicas differ. Over collectives backward() exchanges the gradient: call "
                "replica.skip() before it, or let all ranks leave out the same steps, by a test of the mean that "
                "gradients hold after it."
            )
        if 0 < self.evaluate < self.ranks:
            raise UsageError(
                f"{self.evaluate} of {self.ranks} ranks entered replica.evaluation() and the others did not. Over "
                "collectives the mean of all replicas is shown: let every rank enter it after the same step, and print "
                "on one of them."
            )
        return not self.end

    @property
    def all_skip(self) -> bool:
        """Whether every rank skips the step, so that no optimizer may step."""
        return not (self.step or self.end or self.evaluate or self.overflow)


class Agreement:
    """Before each step, ranks that need each other exchange their intentions.

    One tiny all_reduce of five counts: the ranks that take a step, that have no more work, that evaluate the model that
    the method would deliver, whose scaled gradient overflowed, and that left out the step before although its gradients
    had been exchanged. The other ranks skip the step. A rank that has no more work ends the training for all ranks, at
    the same step. A rank that evaluates while others take a step would wait for ever, so that is an error at once, at
    every rank. A step that some ranks left out and others took makes replicas differ: an error at every rank, before
    the next step.

    The ranks are those of `group`. The counts are on the CPU, where they are read.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    def start(self, mine: Intention, *, left_out: bool = False) -> Operation[torch.Tensor]:
        """Say what this rank is about to do, and whether it left out the exchanged step before; `read` the result."""
        said = torch.zeros(len(_COUNTED) + 1, dtype=torch.int32, device="cpu")
        if mine in _COUNTED:
            said[_COUNTED.index(mine)] = 1
        said[-1] = left_out
        return self._group.all_reduce(said)

    def read(self, said: torch.Tensor) -> Counts:
        """The counts of all ranks."""
        return Counts._make([*said.tolist(), len(self._group.ranks)])


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
        mean, buffers = await self.mean(worker.params), await self.merged_buffers()
        worker.params.copy_(mean)
        worker.buffers = buffers
        worker.meter.add("communicate", started, worker.node.now(), "all_reduce")

    async def merged_buffers(self) -> torch.Tensor | None:
        """Return the buffers of all replicas as one; None if the model has none."""
        worker = self._worker
        if worker.buffers is None:
            return None
        return worker.merge_buffers(await self.members.all_gather(worker.buffers))

    async def gather_stats(self, stats: Stats) -> None:
        """Send `stats` to all members; `WorkerState.stats` then has those of each, in rank order."""
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


class CollectiveTopology(Topology):
    """All workers in one group, of the engine's collectives or of those written from sends."""

    needs_everybody = True

    def __init__(self, choice: Collective, plan: RunPlan) -> None:
        super().__init__(choice, plan)
        self.uses_engine = choice.algorithm in plan.reduced_by_engine and choice.per_host is None

    def check(self) -> None:
        choice = self.choice
        sizes = [len(host) for host in hosts_of(machines_of(choice, self.plan.machines))]
        if choice.algorithm == "torus" and len(set(sizes)) > 1:
            raise StrategyError(
                f"torus needs the same number of workers on each host, and the hosts have "
                f"{', '.join(map(str, sizes))}. Use collective:algorithm=hierarchical, which allows different numbers."
            )

    @property
    def worker_vectors(self) -> float:
        return 0.0

    def group(self, node: Node, meter: Meter) -> Group:
        plan, ranks = self.plan, range(self.plan.workers)
        algorithm = algorithm_of(self.choice, plan.machines)
        group: Group = node.group(ranks) if self.uses_engine else SentGroup(node, ranks, algorithm, meter)
        if plan.codec is None:
            return group
        return CompressedGroup(node, group, plan.codec, plan.replica.layers, meter)
