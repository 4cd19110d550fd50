"""Jobs whose sums are exact in any order, and one whose loss bends both ways. Named in job texts by their file."""

from __future__ import annotations

import time
from functools import partial

import torch
from torch import Tensor, nn

from dure.job.data.dataset import Data
from dure.job.job import Job
from dure.job.models.quadratic import Point, half_square
from dure.job.optimizer import OptimizerSpec

SAMPLES, DIM = 256, 8


def targets() -> Tensor:
    return torch.randint(-32, 32, (SAMPLES, DIM), generator=torch.Generator().manual_seed(3)).double() / 64


def dyadic() -> Job:
    """f(w) = mean of 1/2 |w - t_i|^2 / 4, in 64 portions."""
    curvature = torch.full((DIM,), 0.25, dtype=torch.float64)
    return Job(
        name="dyadic",
        model=partial(Point, DIM, torch.float64),
        loss=partial(half_square, curvature),
        train=Data(torch.zeros(SAMPLES, 1, dtype=torch.float64), targets()),
        batch_size=4,
        optimizer=OptimizerSpec(lr=0.5),
    )


def slow_dyadic() -> Job:
    """As `dyadic`, each portion taking 10 ms."""
    job = dyadic()
    half = job.loss

    def loss(outputs: Tensor, given: Tensor) -> Tensor:
        time.sleep(0.01)
        return half(outputs, given)

    job.loss = loss
    return job


class Angle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.angle = nn.Parameter(torch.tensor([2.8], dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return -torch.cos(self.angle).expand(len(inputs))


def hill() -> Job:
    """f(w) = -cos w, from 2.8 on."""
    data = Data(torch.zeros(8, 1, dtype=torch.float64), torch.zeros(8, dtype=torch.float64))
    return Job(name="hill", model=Angle, loss=lambda outputs, _: outputs.mean(), train=data, batch_size=2)
