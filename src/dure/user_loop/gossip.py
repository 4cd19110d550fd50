"""Ties of a rank to its neighbors in gossip: an averaging begins and is answered inside the calls of the loop.

    rank i      step ── asks a neighbor ── step ── step: its answer is here, and is added
    rank j           step: the question is here, and is answered ── step

Between two calls the model stays as it is, so that backward() may use it: the averaged model is the worker's, and is
copied into the module at the end of a step. A rank waits for the others at the start, at the end, and to evaluate: no
averaging is under way then, so the models of all ranks have the mean that the end would deliver.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import networkx as nx
import torch

from dure.runtime.process.group import AloneGroup
from dure.topology.collective.choice import Collective
from dure.topology.collective.message_group import SentGroup, algorithm_of
from dure.topology.gossip.graph import build
from dure.topology.gossip.topology import Peer
from dure.user_loop.peers import begin_as_first, meet_on_wires

if TYPE_CHECKING:
    from dure.core.node import Group
    from dure.job.replica import Replica
    from dure.runtime.launch.rendezvous import Rendezvous
    from dure.runtime.process.node import ProcessNode
    from dure.sync.worker_state import WorkerState
    from dure.topology.collective.topology import Intention
    from dure.topology.gossip.choice import Gossip
    from dure.user_loop.source import Failed, LoopSource


class LoopGossip:
    """Ties over gossip. Raises `StrategyError` for a graph that does not fit the ranks.

    `overflowed` and `skipped` are never set: each rank skips its own steps. `bytes_sent` is 0: all bytes go over the
    wire.
    `undone_at`: each step replaces the module's model.
    """

    overflowed = skipped = False
    bytes_sent = 0
    undone_at = ("step", "skip", "evaluation", "close")

    def __init__(self, node: ProcessNode, rendezvous: Rendezvous, replica: Replica, topology: Gossip) -> None:
        size = rendezvous.place.world_size
        self._node = node
        self._replica = replica
        self._topology = topology
        self._graph = nx.empty_graph(1) if size == 1 else build(topology, size)
        self._group: Group = AloneGroup(node)
        if size > 1:
            self._group = SentGroup(node, range(size), algorithm_of(Collective(algorithm="ring")), node.meter)
            meet_on_wires(node, rendezvous)

    async def begin(self, worker: WorkerState, source: LoopSource, failed: Failed) -> None:
        """Have every replica start as rank 0's, and serve the neighbors."""
        source.shares_memory = False
        worker.params = worker.params.clone()
        await begin_as_first(self._group, worker, self._replica)
        worker.params.copy_(self._replica.params)
        peer = Peer(self._node, worker, self._graph, seed=self._topology.seed)
        worker.sessions.peer = peer
        self._node.serve("peer", peer)
        await self._group.barrier()  # from then on all serve

    def processes(self) -> Mapping[str, int]:
        """An empty table: there are no servers."""
        return {}

    def rates(self) -> None:
        """Nothing travels with averagings: each rank's optimizer steps by itself."""

    def intend(self, mine: Intention) -> bool:
        """Whether this rank goes on. It asks no other rank: each may end after any step."""
        return mine != "end"

    async def delivered(self, worker: WorkerState) -> WorkerState:
        """A worker with the mean of the models and the buffers of all ranks, once each evaluates or has ended."""
        await worker.peer.settled()
        return (await self._meet(worker, evaluating=True))[0]

    async def share_buffers(self, worker: WorkerState) -> None:
        """Do nothing: in gossip no two ranks meet at a step."""

    async def finish(self, worker: WorkerState) -> torch.Tensor:
        """Wait until all ranks have finished; returns the mean of their models, and merges their buffers."""
        await worker.peer.leave()
        delivered, going_on = worker, True
        while going_on:  # ranks that evaluate
            delivered, going_on = await self._meet(worker, evaluating=False)
        worker.buffers = delivered.buffers
        return delivered.params

    async def _meet(self, worker: WorkerState, *, evaluating: bool) -> tuple[WorkerState, bool]:
        """A worker with the mean of the models and the buffers of all ranks; whether a rank goes on after it.

        The models are read once all ranks are here: until then a neighbor may average with this one.
        """
        going_on = await self._group.all_reduce(torch.tensor([float(evaluating)], device="cpu"))
        params = await self._group.all_reduce(worker.params * worker.share)
        buffers = worker.buffers
        if buffers is not None:
            buffers = worker.merge_buffers(await self._group.all_gather(buffers))
        return replace(worker, params=params, buffers=buffers), going_on.item() > 0

    def close(self, *, failed: bool = False) -> None:
        """Do nothing: the connections are the node's."""
