"""Ties of a rank to the others over collectives: all start from rank 0's model, and end after the same step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from dure.codec.fp32 import Float32
from dure.core.node import EndOfWork
from dure.core.state import State
from dure.job.replica import as_bytes, copy_bytes
from dure.runtime.process.group import AloneGroup, Engine
from dure.sync import lifecycle
from dure.sync.base import traits_of
from dure.sync.worker import Worker
from dure.sync.worker_state import Sessions, Storage
from dure.topology.collective.compressed import CompressedGroup
from dure.topology.collective.message_group import SentGroup, algorithm_of
from dure.topology.collective.topology import Agreement, GroupSession, Intention
from dure.user_loop.source import EndedSource, Exchange, Failed

if TYPE_CHECKING:
    from dure.core.node import Group
    from dure.job.replica import Replica
    from dure.run.strategy import Strategy
    from dure.runtime.launch.rendezvous import Rendezvous
    from dure.runtime.process.node import ProcessNode
    from dure.sync.worker_state import WorkerState
    from dure.topology.collective.choice import Collective
    from dure.user_loop.source import LoopSource


def meet_on_wires(node: ProcessNode, rendezvous: Rendezvous) -> None:
    """Let the nodes of all ranks call each other."""
    interface = rendezvous.place.interface
    places = rendezvous.exchange("place", [interface, node.wire.listen(interface)])
    node.directory.update({f"worker {rank}": (host, port) for rank, (host, port) in enumerate(places)})


async def begin_as_first(group: Group, worker: WorkerState, replica: Replica) -> None:
    """Give the replicas of all ranks of a group the parameters, buffers and constants of its first."""
    first = group.ranks[0]
    await group.broadcast(replica.params, first)
    if worker.buffers is not None:
        await group.broadcast(worker.buffers, first)
        replica.load_buffers(worker.buffers)
    for constant in replica.constants.values():
        if constant.numel():
            copy_bytes(constant, await group.broadcast(as_bytes(constant).to(replica.device), first))


class SentCollectives:
    """The group of all ranks in `rendezvous`, by a collective written from sends; used in place of an `Engine`."""

    def __init__(self, node: ProcessNode, rendezvous: Rendezvous, topology: Collective) -> None:
        size = rendezvous.place.world_size
        self.alone = size == 1
        self.group: Group = AloneGroup(node)
        if not self.alone:
            self.group = SentGroup(node, range(size), algorithm_of(topology), node.meter)
        self.line = self.group

    def close(self, *, failed: bool = False) -> None:
        """Do nothing: the connections are the node's."""


def copied(worker: WorkerState, group: Group) -> WorkerState:
    """A copy of a worker at a step boundary, whose method ends at its first request for a gradient."""
    copy = replace(
        worker,
        params=worker.params.clone(),
        source=EndedSource(worker.node, worker.batch_size),
        sessions=Sessions(),
        storage=Storage(),
    )
    copy.sessions.group = GroupSession(copy, group)
    lifecycle.restore(copy, lifecycle.state(worker))
    return copy


class LoopCollectives:
    """Ties over collectives.

    Means are those of this rank's line, of the `lines` of all ranks. All ranks agree on a step.

    In the step that was agreed on last, `overflowed`: the gradient of a rank holds NaN or infinity, and `skipped`: a
    rank leaves the step out. `undone_at`
    names the calls that undo a change of the model in place: the end, if a center is delivered and not the replica.
    """

    def __init__(
        self,
        node: ProcessNode,
        rendezvous: Rendezvous,
        replica: Replica,
        strategy: Strategy,
        missing: Callable[[], Sequence[int]],
        lines: Sequence[Sequence[int]] = (),
    ) -> None:
        topology: Any = strategy.topology
        self._sync = strategy.sync
        self._missing = missing
        self._node = node
        self._replica = replica
        by_engine = topology.algorithm == "engine"
        self._engine = (
            Engine(node, rendezvous, replica.device, lines)
            if by_engine
            else SentCollectives(node, rendezvous, topology)
        )
        self._group: Group = self._engine.line
        codec = None if isinstance(strategy.codec, Float32) or self._engine.alone else strategy.codec
        if codec is not None and replica.numel:
            self._group = CompressedGroup(node, self._group, codec, replica.layers, node.meter)
        if codec is not None or not by_engine:
            meet_on_wires(node, rendezvous)
        self._delivers = traits_of(strategy.sync).delivers
        self.undone_at = () if self._delivers in ("replica", "mean") else ("close",)
        self._agreement = Agreement(self._engine.group)
        self._source: LoopSource | None = None
        self.overflowed = self.skipped = False

    async def begin(self, worker: WorkerState, source: LoopSource, failed: Failed) -> None:
        """Have every replica start as the first of its line."""
        group, replica = self._group, self._replica
        worker.sessions.group = GroupSession(worker, group)
        self._source = source
        if self._engine.alone:
            return
        await begin_as_first(group, worker, replica)
        if not replica.is_part:
            source.exchange = self._exchange(worker, failed, source.name)

    def _exchange(self, worker: WorkerState, failed: Failed, name: str) -> Exchange:
        return Exchange(self._node, self._group, self._replica, worker.share, failed, name, self._missing)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent in collectives of PyTorch, by the count of a ring."""
        return sum(getattr(group, "bytes_sent", 0) for group in {self._engine.group, self._engine.line})

    def processes(self) -> Mapping[str, int]:
        """An empty table: there are no servers."""
        return {}

    def rates(self) -> list[float] | None:
        """None: each rank's optimizer steps by itself, at its own rates."""
        return None

    def intend(self, mine: Intention) -> bool:
        """Agree with the other ranks on the next step; returns whether all go on. Ends the exchange of a gradient."""
        if self._engine.alone:
            return mine != "end"
        assert self._source is not None
        if self._source.exchanges:
            assert self._source.exchange is not None
            return self._source.exchange.complete(mine)
        return self._node.loop.run_until(self._node.spawn(self._agree(mine), f"{self._node.name} agreeing"))

    async def _agree(self, mine: Intention) -> bool:
        counts = self._agreement.read(await self._agreement.start(mine))
        self.overflowed, self.skipped = counts.overflow > 0, counts.skip > 0
        return counts.going_on

    async def delivered(self, worker: WorkerState) -> WorkerState:
        """A worker with the parameters and the buffers that the method would deliver if it ended now."""
        if self._delivers != "mean":
            return replace(worker, params=worker.delivering(self._delivers).clone())
        if not self._engine.alone:
            await self._agree("evaluate")
        copy, coded = copied(worker, self._group), lifecycle.state_of_codec(worker).cloned()
        with suppress(EndOfWork):
            await self._sync.work(Worker(copy))
        copy.params = await self.finish(copy)
        # The number of the round goes on: a message of the next one may be here already.
        lifecycle.restore_codec(worker, State(coded.tensors, lifecycle.state_of_codec(worker).plain))
        return copy

    async def finish(self, worker: WorkerState) -> torch.Tensor:
        """Merge the buffers, and return the parameters that the method delivers after the common last step."""
        if worker.buffers is not None:
            worker.buffers = worker.merge_buffers(await self._engine.group.all_gather(worker.buffers))
        return worker.delivering(self._delivers)

    async def share_buffers(self, worker: WorkerState) -> None:
        """Give all ranks the buffers of rank 0."""
        if not self._engine.alone:
            worker.buffers = await self._group.broadcast(self._replica.buffers_flat(), 0)
            self._replica.load_buffers(worker.buffers)

    def close(self, *, failed: bool = False) -> None:
        if self._source is not None and self._source.exchange is not None:
            self._source.exchange.close()
        self._engine.close(failed=failed)
