"""How good a model is: loss and accuracy of flat parameters on a job's test data."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from dure.replica import Replica

if TYPE_CHECKING:
    from dure.job import Job

BATCH = 1024
"""Test samples per forward pass."""


class Grade(NamedTuple):
    """Mean loss, and the share of right answers (None where the job has no notion of one)."""

    loss: float
    accuracy: float | None


class Examiner:
    """Grades flat parameters on `job.test`, or on its training data where it has no test data."""

    def __init__(self, job: Job) -> None:
        self._job = job
        with torch.random.fork_rng(devices=[]):
            self._replica = Replica(job.model())
        self._replica.module.eval()

    def grade(self, values: torch.Tensor, buffers: torch.Tensor | None = None) -> Grade:
        self._replica.load(values)
        if buffers is not None:
            self._replica.load_buffers(buffers)
        data = self._job.test if self._job.test is not None else self._job.train
        loss = right = 0.0
        total = len(data.targets)
        with torch.no_grad():
            for start in range(0, total, BATCH):
                inputs, targets = data.inputs[start : start + BATCH], data.targets[start : start + BATCH]
                outputs = self._replica.module(inputs)
                loss += float(self._job.loss(outputs, targets)) * len(targets)
                if self._job.accuracy is not None:
                    right += self._job.accuracy(outputs, targets) * len(targets)
        return Grade(loss / total, right / total if self._job.accuracy is not None else None)
