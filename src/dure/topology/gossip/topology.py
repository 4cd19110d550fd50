"""Gossip in one run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dure.topology.base import RunPlan, Topology, TopologyWorker
from dure.topology.gossip.graph import build
from dure.topology.gossip.peer import Peer

if TYPE_CHECKING:
    from dure.core.node import Group
    from dure.topology.gossip.choice import Gossip


class GossipTopology(Topology):
    """Every worker serves its neighbors in a graph."""

    no_loop = "its neighbors average with a model at any time, also while backward() uses it"

    def __init__(self, choice: Gossip, plan: RunPlan) -> None:
        super().__init__(choice, plan)
        self.graph = build(choice, plan.workers)

    def connect(self, worker: TopologyWorker, group: Group | None) -> None:
        plan, node = self.plan, worker.node
        peer = Peer(node, worker, self.graph, seed=plan.seed, incarnation=node.incarnation, absent=plan.absent)
        worker.sessions.peer = peer
        node.serve("peer", peer)
