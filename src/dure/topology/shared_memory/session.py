"""A method's use of a model in shared memory: `worker.memory`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from dure.core.node import Ghost
from dure.topology.shared_memory.segment import on_device

if TYPE_CHECKING:
    import torch

    from dure.job.optimizer import FlatOptimizer
    from dure.topology.replica import WorkerReplica
    from dure.topology.shared_memory.segment import Access


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
        """What the local optimizer adds to the parameters."""
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
