"""A model in shared memory, in one run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dure.core.deployment import SERVER, NodeId
from dure.core.node import Address
from dure.topology.base import Topology, TopologyWorker
from dure.topology.shared_memory.segment import Access, Layout, Segment, SharedShard, on_device
from dure.topology.shared_memory.session import MemorySession

if TYPE_CHECKING:
    import torch

    from dure.core.node import Node, Service
    from dure.core.ranges import Ranges
    from dure.topology.shared_memory.choice import SharedMemory

OWNER = Address(str(NodeId(SERVER, 0)), "shard")
"""The owner of the memory, which stands in the place of a server."""


class SharedMemoryTopology(Topology):
    """All workers on one machine; the first server owns the memory that the model lies in, and hosts the clock."""

    clocked = True
    one_machine = True
    in_place = True
    servers = 1
    no_loop = "its workers share memory, which ranks of several machines do not have"
    choice: SharedMemory

    @property
    def ranges(self) -> list[Ranges]:
        return [[(0, self.plan.replica.numel)]]

    @cached_property
    def _layout(self) -> Layout:
        plan = self.plan
        return Layout(plan.replica.numel, plan.replica.dtype, plan.workers, tuple(plan.method.vectors))

    def shard(self, node: Node, number: int, *, log: bool = False) -> SharedShard:
        """The owner of the memory: between processes the system's, else this process's own."""
        plan = self.plan
        if plan.virtual:
            segment = Segment(self._layout, device=plan.replica.device, timing_only=plan.timing_only)
            return SharedShard(node, segment, plan.model.params)
        memory = plan.memory(self._layout.nbytes)
        return SharedShard(node, Segment(self._layout, memory.bytes, memory), plan.model.params, path=memory.path)

    def counted(self, shard: Any) -> dict[str, int]:
        return super().counted(shard) | {"written": shard.segment.written}

    def attach(self, worker: TopologyWorker, shards: Sequence[Service]) -> None:
        (owner,) = shards
        assert isinstance(owner, SharedShard)
        self._give(worker, owner.segment)

    async def map(self, worker: TopologyWorker) -> Sequence[torch.Tensor]:
        where = await worker.node.call(OWNER, "where")
        memory = self.plan.mapped_memory(where.fields["path"])
        segment = Segment(self._layout, memory.bytes, memory)
        self._give(worker, segment)
        return () if on_device(worker.params) else (segment.values, *segment.vectors.values())

    def _give(self, worker: TopologyWorker, segment: Segment) -> None:
        locks = self.choice.locks if self.choice.mode == "atomic" else 0
        access = Access(worker.node, worker.rank, segment, owner=OWNER, locks=locks)
        worker.sessions.memory = MemorySession(worker, access)  # type: ignore[arg-type]
