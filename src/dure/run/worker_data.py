"""The mini-batches of all workers of a run."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dure.job.source import JobSource

if TYPE_CHECKING:
    from dure.job.data.split import Split
    from dure.job.job import Job


@dataclass(frozen=True)
class WorkerData:
    """Mini-batches of `batch_sizes` samples, one size per worker, drawn from `seed` by `split` (the job's if None).

    A `timing_only` run draws none. A run with `modelled` time needs the operations of each mini-batch.
    """

    job: Job
    batch_sizes: tuple[int, ...]
    seed: int
    split: Split | None = None
    timing_only: bool = False
    modelled: bool = False

    @property
    def total(self) -> int:
        """The samples of one mini-batch of every worker."""
        return sum(self.batch_sizes)

    def draw_samplers(self) -> list[Any]:
        """New samplers of all workers, each at its first batch."""
        job = self.job if self.split is None else replace(self.job, split=self.split)
        return list(job.samplers(self.batch_sizes, seed=self.seed))

    @cached_property
    def samplers(self) -> list[Any]:
        """The samplers of all workers, at their first batch: to be copied, not drawn from."""
        return self.draw_samplers()

    def sampler(self, rank: int) -> Any:
        """A sampler of worker `rank`, at its first batch."""
        return copy(self.samplers[rank])

    def source(self, rank: int) -> JobSource:
        """The source of the gradients of worker `rank`, at its first batch."""
        size = self.batch_sizes[rank]
        sampler = None if self.timing_only else self.sampler(rank)
        flops = self.job.flops_per_sample * size if self.modelled else 0.0
        return JobSource(self.job, sampler, batch_size=size, share=size / self.total, seed=self.seed, flops=flops)
