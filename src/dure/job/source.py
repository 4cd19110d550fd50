"""The source of gradients of a job: its training data, in the order of its sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dure.job.data.structure import moved
from dure.job.gradient import Gradient, GradientWork

if TYPE_CHECKING:
    import torch

    from dure.core.node import Operation
    from dure.job.data.split import BatchSampler
    from dure.job.data.structure import Batch
    from dure.job.gradient_source import Requester
    from dure.job.job import Job


class JobSource:
    """Mini-batches of `batch_size` from a job's training data, for one worker.

    `share` is this worker's share of the group's batch, `flops` the operations of one mini-batch. With `sampler=None`
    (timing only), a unit of work has a size but no data.
    """

    can_stop = True
    whole = True

    def __init__(
        self, job: Job, sampler: BatchSampler | None, *, batch_size: int, share: float, seed: int, flops: float = 0.0
    ) -> None:
        self.job = job
        self.sampler = sampler
        self.batch_size = batch_size
        self.share = share
        self.seed = seed
        self._flops = flops
        self._last: GradientWork | None = None

    @property
    def samples(self) -> int:
        """Number of training samples of the job."""
        return len(self.job.train)

    @property
    def epoch(self) -> float:
        """Passes so far over this worker's samples; over the shared samples if several workers share a stream."""
        return 0.0 if self.sampler is None else self.sampler.epoch

    def gradient(self, requester: Requester) -> Operation[Gradient]:
        return requester.node.compute(self.next(requester))

    def mean_gradient(self, requester: Requester) -> Operation[Gradient]:
        return requester.group.mean_gradient(self.next(requester), self.share)

    def gradient_again(self, requester: Requester, values: torch.Tensor) -> Operation[Gradient]:
        """Start another gradient of the last mini-batch, at `values`, with the same random draws."""
        assert self._last is not None
        return requester.node.compute(replace(self._last, values=values))

    def gradient_at(
        self, requester: Requester, values: torch.Tensor, indices: torch.Tensor, *, draw: int
    ) -> Operation[Gradient]:
        """Start the mean gradient over the samples `indices`, at `values`. The sampler does not advance.

        Random layers draw from (seed, `draw`), so the result does not depend on the worker or the time.
        """
        inputs = targets = None
        if self.sampler is not None:
            inputs, targets = self._batch(indices, (self.seed, 0, draw), values)
        work = GradientWork(
            rank=-1,
            step=draw,
            values=values,
            inputs=inputs,
            targets=targets,
            seed=self.seed,
            flops=self._flops * len(indices) / self.batch_size,
            buffers=requester.buffers,
        )
        return requester.node.compute(work)

    def _batch(self, indices: torch.Tensor, draw: Sequence[int], values: torch.Tensor) -> tuple[Batch, Batch]:
        """The samples `indices`, on the device of the parameters `values`."""
        inputs, targets = self.job.train.batch(indices, draw)
        device = values.device
        if device.type == "cpu":
            return inputs, targets
        return moved(inputs, device), moved(targets, device)

    def model(self, requester: Requester) -> torch.Tensor:
        return requester.params

    async def settled(self) -> None:
        """Return at once: no other node reads from this source."""

    def state(self) -> dict[str, Any]:
        return {} if self.sampler is None else dict(self.sampler.state())

    def restore(self, state: Mapping[str, Any]) -> None:
        if self.sampler is not None:
            self.sampler.restore(dict(state))

    def next(self, requester: Requester) -> GradientWork:
        """Draw the next mini-batch; return the work of computing its gradient at the requester's parameters."""
        inputs = targets = None
        if self.sampler is not None:
            draw = self.seed, 1 + requester.rank, requester.clock
            inputs, targets = self._batch(self.sampler.next(), draw, requester.params)
        self._last = GradientWork(
            rank=requester.rank,
            step=requester.clock,
            values=requester.params,
            inputs=inputs,
            targets=targets,
            seed=self.seed,
            flops=self._flops,
            buffers=requester.buffers,
        )
        return self._last
