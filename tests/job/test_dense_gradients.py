"""Models that are no chain of dense layers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dure.job.dense_gradients import Dense
from dure.job.gradient import GradientWork
from dure.job.gradients import GradientEngine


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (lambda: nn.Sequential(nn.Linear(12, 3), nn.Softmax(1)), (7, 12)),
        (lambda: nn.Sequential(nn.Linear(12, 3), nn.PReLU()), (7, 12)),
        (lambda: nn.Sequential(nn.Flatten(0), nn.Linear(84, 3)), (7, 12)),
        (lambda: nn.Sequential(nn.Linear(12, 3)), (7, 2, 12)),
        (lambda: nn.Sequential(nn.Linear(12, 4), nn.Linear(5, 3)), (7, 12)),
        (lambda: nn.Linear(12, 3), (7, 12)),
    ],
)
def test_what_is_no_dense_chain(model, inputs):
    exact = GradientEngine(SimpleNamespace(model=model, loss=cross_entropy), exact=True)
    work = GradientWork(0, 0, exact.initial_values(0), torch.zeros(inputs), torch.zeros(7, dtype=torch.long), 0, 1.0)
    assert Dense.of(exact.replica, cross_entropy, work, 1) is None
