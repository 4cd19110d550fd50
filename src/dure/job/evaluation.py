"""Evaluation of a model: loss and accuracy of flat parameters on a job's test data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from dure.job.data.structure import Batch, called, moved, tensors
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


class Evaluator:
    """Grades flat parameters on `job.test`, or on training data if the job has no test data.

    `samples` limits the number of samples; None takes all test data, or SAMPLES of the training data. A limited choice
    is random without repetition, and depends only on the number of samples. So runs of all seeds and strategies, in
    virtual and in real time, are graded on the same samples. The values of frozen parameters are those of a model made
    under `seed`.
    """

    def __init__(self, job: Job, samples: int | None = None, *, device: str = "cpu", seed: int = 0) -> None:
        self._job = job
        with torch.random.fork_rng(devices=[]):
            self._replica = Replica(job.build(seed).to(device))
        self._replica.module.eval()
        self._data = job.graded
        self._rows = _choice(len(self._data), SAMPLES if samples is None and job.test is None else samples)
        self._batch = _batch(job, self._data)

    def grade(self, values: torch.Tensor, buffers: torch.Tensor | None = None) -> Metrics:
        self._replica.load(values)
        if buffers is not None:
            self._replica.load_buffers(buffers)
        losses, accuracies = [], []
        parts = torch.split(self._rows, self._batch)
        with torch.no_grad():
            for number, rows in enumerate(parts):
                inputs, targets = (self._there(each) for each in self._data.batch(rows, (number * self._batch,)))
                outputs = called(self._replica.module, inputs)
                losses.append(self._job.loss(outputs, targets))
                if self._job.accuracy is not None:
                    accuracies.append(self._job.accuracy(outputs, targets))
        accuracy = _mean(accuracies, parts) if self._job.accuracy is not None else None
        return Metrics(_mean(losses, parts), accuracy)

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
