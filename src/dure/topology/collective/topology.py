"""Collectives in one run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dure.topology.base import RunPlan, Topology
from dure.topology.collective.compressed import CompressedGroup
from dure.topology.collective.message_group import SentGroup

if TYPE_CHECKING:
    from dure.core.meter import Meter
    from dure.core.node import Group, Node
    from dure.topology.collective.choice import Collective


class CollectiveTopology(Topology):
    """All workers in one group, of the engine's collectives or of those written from sends."""

    needs_everybody = True

    def __init__(self, choice: Collective, plan: RunPlan) -> None:
        super().__init__(choice, plan)
        self.uses_engine = choice.algorithm == "engine"

    def group(self, node: Node, meter: Meter) -> Group:
        plan, ranks = self.plan, range(self.plan.workers)
        group: Group = (
            node.group(ranks) if self.uses_engine else SentGroup(node, ranks, self.choice, meter, plan.machines)
        )
        if plan.codec is None:
            return group
        return CompressedGroup(node, group, plan.codec, plan.replica.layers, meter)
