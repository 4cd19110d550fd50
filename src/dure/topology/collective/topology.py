"""Collectives in one run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dure.errors import StrategyError
from dure.topology.base import RunPlan, Topology
from dure.topology.collective.compressed import CompressedGroup
from dure.topology.collective.hierarchical import hosts_of
from dure.topology.collective.message_group import SentGroup, machines_of

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

    def check(self) -> None:
        choice = self.choice
        sizes = [len(host) for host in hosts_of(machines_of(choice, self.plan.machines))]
        if choice.algorithm == "torus" and len(set(sizes)) > 1:
            raise StrategyError(
                f"torus needs as many workers on each host, and the hosts have {', '.join(map(str, sizes))}. Use "
                "collective:algorithm=hierarchical, which takes any."
            )

    def group(self, node: Node, meter: Meter) -> Group:
        plan, ranks = self.plan, range(self.plan.workers)
        group: Group = (
            node.group(ranks) if self.uses_engine else SentGroup(node, ranks, self.choice, meter, plan.machines)
        )
        if plan.codec is None:
            return group
        return CompressedGroup(node, group, plan.codec, plan.replica.layers, meter)
