"""A hybrid of collectives and servers in one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dure.core.deployment import SERVER, NodeId
from dure.core.node import Address
from dure.errors import UsageError
from dure.job.optimizer import RangesOptimizer
from dure.topology.base import RunPlan, Topology, TopologyWorker
from dure.topology.hybrid.placement import MEASURED, ClusterShape, Placement, decide, measure
from dure.topology.hybrid.rows import RowClient, RowShard, check_rule, of_table
from dure.topology.hybrid.session import RowSession

if TYPE_CHECKING:
    import torch

    from dure.core.meter import Meter
    from dure.core.node import Group, Node
    from dure.job.gradients import GradientEngine
    from dure.topology.hybrid.choice import Hybrid


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
