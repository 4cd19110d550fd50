"""The mini-batches of a pipeline, as the first and the last of its stages read them.

The first stage reads the inputs and the last stage the targets. Both draw from samplers that are equal, so targets do
not travel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from dure.core.ranges import equal_ranges
from dure.job.data.structure import mapped, moved

if TYPE_CHECKING:
    from dure.job.data.split import BatchSampler
    from dure.job.data.structure import Batch
    from dure.job.job import Job


class StageBatches:
    """Mini-batches of `batch_size` samples of pipeline `replica`, each divided into `micro_batches`.

    `flops` are the operations of the whole model for one mini-batch. With `sampler=None` (timing only) a mini-batch has
    a size but no data.
    """

    def __init__(
        self,
        job: Job,
        sampler: BatchSampler | None,
        *,
        replica: int,
        batch_size: int,
        micro_batches: int,
        seed: int,
        flops: float,
        device: str = "cpu",
    ) -> None:
        self.job = job
        self.sampler = sampler
        self.replica = replica
        self.batch_size = batch_size
        self.seed = seed
        self.flops = flops
        self._micro = equal_ranges(batch_size, micro_batches)
        self._device = torch.device(device)
        self._drawn: dict[int, torch.Tensor | tuple[Batch, Batch]] = {}
        self._next = 0

    def begin(self, batch: int) -> None:
        """Set the number of the mini-batch that the sampler draws next."""
        self._next = batch
        self._drawn.clear()

    def inputs(self, batch: int, micro: int) -> Batch:
        """The inputs of a micro-batch."""
        return self._slice(self._batch(batch)[0], micro)

    def targets(self, batch: int, micro: int) -> Batch:
        """The targets of a micro-batch."""
        return self._slice(self._batch(batch)[1], micro)

    def drop(self, batch: int) -> None:
        """Drop a mini-batch that is done. At a stage that has read none of it the sampler passes it over."""
        if self.sampler is not None:
            self._draw_to(batch)
            del self._drawn[batch]

    def state(self) -> dict[str, Any]:
        """The state of the sampler."""
        return {} if self.sampler is None else dict(self.sampler.state())

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        if self.sampler is not None:
            self.sampler.restore(dict(state))

    def _batch(self, batch: int) -> tuple[Batch, Batch]:
        self._draw_to(batch)
        found = self._drawn[batch]
        if isinstance(found, torch.Tensor):
            found = self.job.train.batch(found, (self.seed, 1 + self.replica, batch))
            if self._device.type != "cpu":
                found = moved(found[0], self._device), moved(found[1], self._device)
            self._drawn[batch] = found
        return found

    def _draw_to(self, batch: int) -> None:
        """Draw the samples of all mini-batches up to `batch`."""
        assert self.sampler is not None
        while self._next <= batch:
            self._drawn[self._next] = self.sampler.next()
            self._next += 1

    def _slice(self, whole: Batch, micro: int) -> Batch:
        start, stop = self._micro[micro]
        return mapped(lambda each: each[start:stop], whole)


class PortionBatches(StageBatches):
    """The samples of one portion at a time, of any number, that a coordinator has chosen.

    The number of the mini-batch is that of the draws of its random layers, so that any copy of the model computes the
    same gradient.
    """

    def __init__(self, job: Job, sampler: BatchSampler | None, **options: Any) -> None:
        super().__init__(job, sampler, **options | {"replica": -1})
        self._flops_of_one = self.flops / self.batch_size

    def give(self, batch: int, indices: torch.Tensor) -> None:
        """Set the samples of a mini-batch."""
        self.batch_size = len(indices)
        self.flops = self._flops_of_one * self.batch_size
        self._micro = equal_ranges(self.batch_size, len(self._micro))
        self._drawn = {batch: indices}

    def _draw_to(self, batch: int) -> None:
        """The samples are given."""
