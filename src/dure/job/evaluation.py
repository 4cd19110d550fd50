"""Evaluation of a model: loss and accuracy of flat parameters on a job's test data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dure.core.user_code import explain_user_errors
from dure.errors import DureError
from dure.job.data.dataset import Batch, called, moved, tensors
from dure.job.metrics import Metrics
from dure.job.replica import Replica

if TYPE_CHECKING:
    from dure.job.companions import Grader
    from dure.job.data.dataset import DataSet
    from dure.job.job import Job

BATCH = 1024
"""Samples per forward pass."""

SAMPLES = 1000
"""Number of training samples that an evaluation uses if the job has no test data."""


def _batch(job: Job, data: DataSet) -> int:
    """Samples per forward pass: BATCH, or the job's batch size if a sample has many labels, as a text has.

    Each label has outputs of its own, so the outputs of BATCH such samples may not fit in memory.
    """
    _, targets = data.batch(torch.zeros(1, dtype=torch.int64))
    return job.batch_size if _has_labels_in_rows(targets) else BATCH


def _has_labels_in_rows(targets: Batch) -> bool:
    return any(each.dim() > 1 and not each.is_floating_point() for each in tensors(targets))


class _Way(NamedTuple):
    """A way to evaluate: the samples of each forward pass, and whether outputs have gradients."""

    parts: Sequence[torch.Tensor]
    differentiable: bool


def _ways(rows: torch.Tensor, batch: int, batch_size: int) -> Iterator[_Way]:
    """The ways to evaluate, in the order in which they are tried.

    A loss of pairs, for example, may take whole mini-batches only; then samples behind the last one are left out.
    """
    whole = rows[: len(rows) // batch_size * batch_size]
    for differentiable in (False, True):
        yield _Way(torch.split(rows, batch), differentiable)
        if len(whole):
            yield _Way(torch.split(whole, max(1, batch // batch_size) * batch_size), differentiable)


class Evaluator:
    """Grades flat parameters on `job.test`, or on training data if the job has no test data.

    `samples` limits the number of samples; None takes all test data, or SAMPLES of the training data. A limited choice
    is random without repetition, and depends only on the number of samples. So runs of all seeds and strategies, in
    virtual and in real time, are graded on the same samples. The values of frozen parameters are those of a model made
    under `seed`.

    The first grade decides the way, for all later ones: BATCH samples at a time without gradients, or else whole
    mini-batches, or with gradients, if the model or the loss needs that.
    """

    def __init__(self, job: Job, samples: int | None = None, *, device: str = "cpu", seed: int = 0) -> None:
        self._job = job
        with torch.random.fork_rng(devices=[]):
            self._replica = Replica(job.build(seed).to(device))
        self._replica.module.eval()
        self._data = job.graded
        self._rows = _choice(len(self._data), SAMPLES if samples is None and job.test is None else samples)
        batch = _batch(job, self._data)
        self._ways = list(_ways(self._rows, batch, job.batch_size))

    def grade(self, values: torch.Tensor, buffers: torch.Tensor | None = None) -> Metrics:
        self._replica.load(values)
        if buffers is not None:
            self._replica.load_buffers(buffers)
        first: BaseException | None = None
        for place, way in enumerate(self._ways):
            try:
                with explain_user_errors("an evaluation raised"):
                    found = self._graded(way)
            except DureError as error:  # the user's code may take other batches only, or need gradients
                first = first or error.__cause__ or error
            else:
                self._ways = self._ways[place : place + 1]
                return found
        assert first is not None
        raise first

    def _graded(self, way: _Way) -> Metrics:
        losses, accuracies, start = [], [], 0
        for rows in way.parts:
            inputs, targets = (self._there(each) for each in self._data.batch(rows, (start,)))
            start += len(rows)
            with torch.set_grad_enabled(way.differentiable):
                outputs = called(self._replica.module, inputs)
                losses.append(self._job.loss(outputs, targets).detach())
                if self._job.accuracy is not None:
                    accuracies.append(self._job.accuracy(outputs, targets))
        accuracy = _mean(accuracies, way.parts) if self._job.accuracy is not None else None
        return Metrics(_mean(losses, way.parts), accuracy)

    def _there(self, batch: Batch) -> Batch:
        """A batch on the device of the model."""
        device = self._replica.device
        return batch if device.type == "cpu" else moved(batch, device)


def grader_of(job: Job, samples: int | None = None, *, device: str = "cpu", seed: int = 0) -> Grader:
    """The grader of the models of `job`: that of its companions, or else an `Evaluator`."""
    if job.companions is not None:
        return job.companions.grader(job.build, samples, seed=seed)
    return Evaluator(job, samples, device=device, seed=seed)


def _mean(values: Sequence[Any], parts: Sequence[torch.Tensor]) -> float:
    """The mean of one number per part, weighted by the samples of the part. Tensors come in one transfer."""
    if all(isinstance(value, torch.Tensor) for value in values):
        values = torch.stack([value.reshape(()) for value in values]).tolist()
    total = 0.0
    for value, rows in zip(values, parts, strict=True):
        total += float(value) * len(rows)
    return total / sum(map(len, parts))


def _choice(total: int, samples: int | None) -> torch.Tensor:
    """Indices of the samples of an evaluation, in the order of the data set."""
    if samples is None or samples >= total:
        return torch.arange(total)
    return torch.randperm(total, generator=torch.Generator().manual_seed(0))[:samples].sort().values
