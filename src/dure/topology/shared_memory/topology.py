"""A model in shared memory, in one run, and what a method calls of it: `worker.memory`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from dure.core.deployment import SERVER, NodeId
from dure.core.node import Address, Ghost
from dure.topology.base import Topology, TopologyWorker
from dure.topology.shared_memory.segment import Access, Layout, Segment, SharedShard, on_device

if TYPE_CHECKING:
    import torch

    from dure.core.node import Node, Service
    from dure.core.vectors import Ranges
    from dure.job.optimizer import FlatOptimizer
    from dure.topology.replica import WorkerReplica
    from dure.topology.shared_memory.choice import SharedMemory


class MemorySession:
    """Reads and writes of one worker, with the seconds that they take on its meter. `access` makes them."""

    def __init__(self, worker: WorkerReplica, access: Access) -> None:
        self.access = access
        self._worker = worker

    async def read(self, *, alone: bool = False) -> None:
        """Go on from the shared parameters: where they lie, changing, in a real run; as they are now in virtual time.

        `alone`: a copy without a half-written update, made while no other worker reads or writes alone.
        """
        worker = self._worker
        started = worker.node.now()
        room = worker.room()
        values, version = await self.access.read(room, alone=alone)
        # The memory for the next copy: `room` where nothing was copied, else the parameters of before. The segment
        # itself is never that memory.
        if values is not room:
            free: torch.Tensor | None = room
        else:
            free = None if worker.params is self.access.segment.values else worker.params
        worker.work_at(values, version, free)
        worker.meter.add("communicate", started, worker.node.now(), "read")

    async def add(self, update: torch.Tensor, *, alone: bool = False) -> None:
        """One step of the shared parameters against `update`, by the local optimizer's rule and state."""
        worker = self._worker
        started = worker.node.now()
        spec = worker.optimizer.spec
        lr = spec.lr if worker.lr is None else worker.lr
        gradients, versions = worker.give(), worker.versions
        assert versions is not None
        if worker.is_skipped(update):
            return
        more: dict[str, Any] = {"seen": versions[0], "alone": alone, "gradients": gradients}
        if isinstance(lr, (int, float)) and spec.name == "sgd" and not (spec.momentum or spec.weight_decay):
            await self.access.add(update, -lr, **more)
        else:
            await self.access.add(self._increment(update, lr), 1.0, **more)
        worker.meter.add("communicate", started, worker.node.now(), "add")

    def _increment(self, update: torch.Tensor, lr: float | Sequence[float]) -> torch.Tensor:
        """The change that the local optimizer makes to the parameters."""
        if isinstance(update, Ghost):
            return update
        worker = self._worker
        return cast("FlatOptimizer", worker.optimizer).increment(worker.params, update.to_dense(), lr)

    async def contribute(self, total: torch.Tensor, weight: float, *, incarnation: int) -> None:
        """Give a weighted sum to the mean over all workers that the end of this phase makes."""
        worker = self._worker
        started = worker.node.now()
        await self.access.contribute(total, weight, incarnation=incarnation)
        worker.meter.add("communicate", started, worker.node.now(), "contribute")

    def vector(self, name: str) -> torch.Tensor:
        """A vector beside the model that no worker writes while a phase lasts; a replica on a device gets a copy."""
        vector = self.access.vector(name)
        return vector.to(self._worker.params.device) if on_device(self._worker.params) else vector

    def claim(self, counter: int, amount: int, *, limit: int) -> int | None:
        """Advance a counter that starts at 0 in each phase; its value before, None once that is at `limit`."""
        return self.access.claim(counter, amount, limit=limit)


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

    @property
    def worker_vectors(self) -> float:
        return 1.0  # room for a copy of the model

    @property
    def server_vectors(self) -> float:
        vectors = self.plan.method.vectors
        return 1.0 + len(vectors) + bool(vectors)  # and the sum of the workers' contributions

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
