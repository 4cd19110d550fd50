"""The model that a worker shows to its run, and the number of gradients in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from dure.job.initial_model import InitialModel
    from dure.sync.base import Traits
    from dure.sync.worker import Worker


@dataclass(frozen=True)
class Delivery:
    """How a run reads models and counts from workers of a method with `traits` that meet every `period` steps."""

    traits: Traits
    period: int
    batch_sizes: tuple[int, ...]
    model: InitialModel

    def is_common(self, worker: Worker, done: int) -> bool:
        """Whether a worker of a synchronous method has, after `done` steps, the model that all others have then.

        Where models differ between two meetings, their mean is the method's model.
        """
        if self.traits.delivers != "mean":
            return True
        if worker.boundary.alone or self.traits.streams:
            return False
        return done % self.period == 0 if worker.last_sync is None else done == worker.last_sync

    def shown(self, worker: Worker) -> torch.Tensor:
        """The model of a worker of a synchronous method at a step boundary, as the run would deliver it there."""
        common = self.is_common(worker, worker.clock)
        traits = self.traits
        return worker.delivering((traits.agreed or traits.delivers) if common else traits.delivers)

    def gradients_in(self, worker: Worker) -> int:
        """The number of a worker's own gradients in the model that it delivers without a server."""
        # A model kept apart from the worker's parameters is told of gradients now and then only.
        apart = self.traits.delivers in worker.kept
        return (worker.given if apart else worker.clock - worker.joined_at) - worker.refusals.total

    def gradients_in_common(self, worker: Worker) -> int:
        """The number of gradients in the model that all workers have over collectives, where this worker is now."""
        return len(self.batch_sizes) * self.gradients_in(worker)

    def weight(self, rank: int) -> float:
        """Weight of a worker's model in the mean of all models: its batch size, where batch sizes differ."""
        return float(self.batch_sizes[rank]) if len(set(self.batch_sizes)) > 1 else 1.0

    def merge_buffers(self, snapshots: Sequence[torch.Tensor]) -> torch.Tensor:
        """Merge buffers in rank order: means weighted by batch size (if all are there), counts by their maximum."""
        weights = self.batch_sizes if len(snapshots) == len(self.batch_sizes) else None
        return self.model.merge_buffers(snapshots, weights)
