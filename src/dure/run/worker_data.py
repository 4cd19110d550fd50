"""The mini-batches that each worker of a run gets, and the model that it shows, with the gradients in it."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dure.job.data.split import Striped
from dure.job.gradient import JobSource

if TYPE_CHECKING:
    import torch

    from dure.job.data.split import Split
    from dure.job.initial_model import InitialModel
    from dure.job.job import Job
    from dure.sync.base import Traits
    from dure.sync.worker_state import WorkerState


@dataclass(frozen=True)
class WorkerData:
    """Mini-batches of `batch_sizes` samples, one size per worker, drawn from `seed` by `split` (the job's if None).

    A `timing_only` run draws none. A run with `modelled` time needs the operations of each mini-batch. Where they are
    `leased`, all samplers have the same mini-batches, and each is moved to those that its worker leases.
    """

    job: Job
    batch_sizes: tuple[int, ...]
    seed: int
    split: Split | None = None
    timing_only: bool = False
    modelled: bool = False
    leased: bool = False

    @property
    def total(self) -> int:
        """The samples of one mini-batch of every worker."""
        return sum(self.batch_sizes)

    def draw_samplers(self) -> list[Any]:
        """New samplers of all workers, each at its first batch."""
        if self.leased:
            (sampler,) = replace(self.job, split=Striped()).samplers(self.batch_sizes[:1], seed=self.seed)
            return [copy(sampler) for _ in self.batch_sizes]
        job = self.job if self.split is None else replace(self.job, split=self.split)
        return list(job.samplers(self.batch_sizes, seed=self.seed))

    @cached_property
    def samplers(self) -> list[Any]:
        """The samplers of all workers, at their first batch: to be copied, not drawn from."""
        return self.draw_samplers()

    def sampler(self, rank: int) -> Any:
        """A sampler of worker `rank`, at its first batch."""
        return copy(self.samplers[rank])

    def source(self, rank: int, number: int = 0) -> JobSource:
        """The source of the gradients of worker `rank`, at its batch `number`."""
        size = self.batch_sizes[rank]
        sampler = None if self.timing_only else self.sampler(rank)
        if sampler is not None and number and not self.leased:
            sampler.number = number
        flops = self.job.flops_per_sample * size if self.modelled else 0.0
        return JobSource(self.job.train, sampler, batch_size=size, share=size / self.total, seed=self.seed, flops=flops)


@dataclass(frozen=True)
class Delivery:
    """Reads models and counts from workers of a method with `traits` that meet every `period` steps."""

    traits: Traits
    period: int
    batch_sizes: tuple[int, ...]
    model: InitialModel

    def is_common(self, worker: WorkerState, done: int) -> bool:
        """Whether a worker of a synchronous method has, after `done` steps, the model that all others have then.

        Where models differ between two meetings, their mean is the method's model.
        """
        if self.traits.delivers != "mean":
            return True
        if worker.boundary.alone or self.traits.agreed is None:
            return False
        return done % self.period == 0 if worker.last_sync is None else done == worker.last_sync

    def shown(self, worker: WorkerState) -> torch.Tensor:
        """The model of a worker of a synchronous method at a step boundary, as the run would deliver it there."""
        common = self.is_common(worker, worker.clock)
        traits = self.traits
        return worker.delivering((traits.agreed or traits.delivers) if common else traits.delivers)

    def gradients_in(self, worker: WorkerState) -> int:
        """The number of a worker's own gradients in the model that it delivers without a server."""
        # A model kept apart from the worker's parameters has the gradients up to the worker's last update only.
        apart = self.traits.delivers in worker.kept
        return (worker.given if apart else worker.clock - worker.joined_at) - worker.refusals.total

    def gradients_of_part(self, worker: WorkerState) -> int:
        """The number of a worker's own gradients in its part of the mean of models, those at servers left out."""
        return worker.clock - worker.given if worker.over_servers else self.gradients_in(worker)

    def gradients_in_common(self, worker: WorkerState) -> int:
        """The number of gradients in the model that all workers have over collectives, where this worker is now.

        If some were away for some steps, the driver corrects it.
        """
        return len(self.batch_sizes) * (self.gradients_in(worker) + worker.joined_at)

    def weight(self, rank: int) -> float:
        """Weight of a worker's model in the mean of all models: its batch size, where batch sizes differ."""
        return float(self.batch_sizes[rank]) if len(set(self.batch_sizes)) > 1 else 1.0

    def merge_buffers(self, snapshots: Sequence[torch.Tensor]) -> torch.Tensor:
        """Merge buffers in rank order: means weighted by batch size (if all are there), counts by their maximum."""
        weights = self.batch_sizes if len(snapshots) == len(self.batch_sizes) else None
        return self.model.merge_buffers(snapshots, weights)
