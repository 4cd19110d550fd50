"""How good a model is: loss and accuracy of flat parameters on a job's test data."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from dure.data.structure import Batch, called, tensors
from dure.replica import Replica

if TYPE_CHECKING:
    from dure.data.dataset import DataSet
    from dure.job import Job

BATCH = 1024
"""Test samples per forward pass."""


class Grade(NamedTuple):
    """Mean loss, and the share of right answers (None where the job has no notion of one)."""

    loss: float
    accuracy: float | None


def _rows(job: Job, data: DataSet) -> int:
    """Samples per forward pass. A mini-batch of the job where a sample has many labels, as a text has.

    The outputs are then so many times larger, and those of BATCH samples may not fit in memory.
    """
    _, targets = data.batch(torch.zeros(1, dtype=torch.int64))
    return job.batch_size if _has_labels_in_rows(targets) else BATCH


def _has_labels_in_rows(targets: Batch) -> bool:
    return any(each.dim() > 1 and not each.is_floating_point() for each in tensors(targets))


class Examiner:
    """Grades flat parameters on `job.test`, or on its training data where it has no test data."""

    def __init__(self, job: Job) -> None:
        self._job = job
        with torch.random.fork_rng(devices=[]):
            self._replica = Replica(job.model())
        self._replica.module.eval()
        self._data = job.graded
        self._rows = _rows(job, self._data)

    def grade(self, values: torch.Tensor, buffers: torch.Tensor | None = None) -> Grade:
        self._replica.load(values)
        if buffers is not None:
            self._replica.load_buffers(buffers)
        data = self._data
        loss = right = 0.0
        total = len(data)
        with torch.no_grad():
            for start in range(0, total, self._rows):
                indices = torch.arange(start, min(start + self._rows, total))
                inputs, targets = data.batch(indices, (start,))
                outputs = called(self._replica.module, inputs)
                loss += float(self._job.loss(outputs, targets)) * len(indices)
                if self._job.accuracy is not None:
                    right += self._job.accuracy(outputs, targets) * len(indices)
        return Grade(loss / total, right / total if self._job.accuracy is not None else None)
