"""A hybrid of collectives and servers in one run, and what a method calls of it: `worker.rows`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dure.core.deployment import SERVER, NodeId
from dure.core.node import Address
from dure.core.vectors import all_finite
from dure.errors import Quarantined, UsageError
from dure.job.optimizer import RangesOptimizer
from dure.topology.base import RunPlan, Topology, TopologyWorker
from dure.topology.hybrid.placement import MEASURED, ClusterShape, Placement, decide, measure
from dure.topology.hybrid.rows import RowClient, RowShard, check_rule, of_table

if TYPE_CHECKING:
    import torch

    from dure.core.meter import Meter
    from dure.core.node import Group, Node
    from dure.job.gradient import Gradient, GradientWork
    from dure.job.gradient_engine import GradientEngine
    from dure.topology.hybrid.choice import Hybrid
    from dure.topology.replica import WorkerReplica


class RowSession:
    """Mean gradients of which servers get their part. `client` makes the calls to servers, `group` the collectives."""

    def __init__(self, worker: WorkerReplica, client: RowClient, group: Group) -> None:
        self.client = client
        self._worker = worker
        self._group = group

    async def mean_gradient(self, work: GradientWork) -> Gradient:
        """The mean gradient of what servers do not hold; they get their part, and make their step by it."""
        worker, client = self._worker, self.client
        node, version, started = worker.node, worker.clock, worker.node.now()
        assert work.inputs is not None
        await client.read(work.inputs, worker.params, version)
        read = node.now()
        worker.meter.add("communicate", started, read, "read")
        gradient: Gradient
        if client.plan.ring:
            gradient = await self._group.mean_gradient(work, worker.share)
        else:
            gradient = (await node.compute(work)).scaled(worker.share)
            worker.meter.add("compute", read, node.now())
        worker.check_loss(gradient)
        self._check_parts(gradient)
        started = node.now()
        assert gradient.for_servers is not None
        await client.push(gradient.for_servers, version, worker.lr)
        worker.meter.add("communicate", started, node.now(), "push")
        gradient.checked = True
        return gradient

    def _check_parts(self, gradient: Gradient) -> None:
        """Refuse a gradient that is not finite: a sum over all ranks cannot be skipped by one of them."""
        held = gradient.for_servers
        parts = () if held is None else (held.whole, *(rows for _, rows in held.rows))
        if not all(all_finite(part.reshape(-1)) for part in (gradient.values, *parts)):
            worker = self._worker
            raise Quarantined(
                f"the gradient of worker {worker.rank} in step {worker.clock} holds NaN or infinity, and hybrid skips "
                f"no step. Try a learning rate below {worker.optimizer.spec.lr:g}, and look at the data of this step."
            )


class HybridTopology(Topology):
    """Dense gradients in a group of all workers; servers hold what a step reads few rows of (`rows`)."""

    needs_everybody = True
    uses_engine = True
    no_loop = "a loop does not say which rows its next batch reads"

    def __init__(self, choice: Hybrid, plan: RunPlan) -> None:
        super().__init__(choice, plan)
        self.colocated = choice.colocated

    @property
    def servers(self) -> int:  # type: ignore[override]
        return self.rows.shards

    def check(self) -> None:
        _ = self.rows

    @cached_property
    def rows(self) -> Placement:
        """What goes through servers: the same in every process, as batches are drawn from the seed.

        Raises `StrategyError` where an optimizer or a name does not suit, `UsageError` for a run without data.
        """
        plan, choice = self.plan, self.choice
        if plan.timing_only:
            raise UsageError("a timing-only run has no data, so nobody knows which rows it reads: leave that out.")
        samplers, data = plan.draw_samplers(), plan.job.train
        batches = [[data.batch(sampler.next())[0] for sampler in samplers] for _ in range(MEASURED)]
        itemsize = plan.replica.params.element_size()
        shape = ClusterShape(plan.workers, choice.shards or plan.workers, choice.colocated, itemsize)
        rows = decide(choice, measure(plan.replica.layers, plan.job.rows, batches), shape)
        for table in rows.tables:
            check_rule(of_table(plan.job.optimizer, plan.model.rates.segments, table)[0])
        return rows

    @property
    def apart(self) -> Sequence[int]:
        return (*self.rows.parts["tables"], *self.rows.parts["whole"])

    def group(self, node: Node, meter: Meter) -> Group:
        return node.group(range(self.plan.workers))

    def shard(self, node: Node, number: int, *, log: bool = False) -> RowShard:
        plan, part = self.plan, self.rows.part(number)
        values = part.taken_from(plan.model.params)
        return RowShard(node, part, values, plan.job.optimizer, plan.workers, plan.model.rates.segments)

    def connect(self, worker: TopologyWorker, group: Group | None) -> None:
        if not self.servers:
            return
        assert group is not None
        plan = self.plan
        servers = [Address(str(NodeId(SERVER, number)), "shard") for number in range(self.servers)]
        client = RowClient(worker.node, worker.rank, self.rows, plan.job.rows, servers)
        worker.sessions.rows = RowSession(worker, client, group)  # type: ignore[arg-type]
        replica, segments = plan.replica, plan.model.rates.segments
        worker.optimizer = RangesOptimizer(
            plan.job.optimizer, self.rows.ring, replica.dtype, segments=segments, device=replica.device
        )

    def result(self, shards: Sequence[Any], models: Sequence[torch.Tensor]) -> torch.Tensor:
        values = super().result(shards, models)
        if shards:
            values = values.clone()
        for shard in shards:
            shard.part.put_into(values, shard.values)
        return values

    def configure(self, engine: GradientEngine) -> None:
        if self.servers:
            engine.split_off(self.rows.parts["tables"], self.rows.parts["whole"])

    def notes(self) -> Mapping[str, Any]:
        return {"hybrid": self.rows.described()}
