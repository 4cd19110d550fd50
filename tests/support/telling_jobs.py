"""Jobs whose loss tells which gradients a model holds. Named in job texts by their file."""

from __future__ import annotations

from functools import partial

import torch
from support.runs import Fixed, bowls, mean_output
from torch import Tensor, nn

from dure.job.data.dataset import Data
from dure.job.job import Job
from dure.job.optimizer import OptimizerSpec

BASE = 64
"""More than the steps of a worker."""


def square(workers: int = 3) -> Job:
    """f(w) = w^2 / 2 from w = 1 on, at rate 0.5, at every worker: the loss after t steps is 0.5^(2 t + 1)."""
    return bowls([(1.0, 0.0)] * workers, lr=0.5, start=1.0)


def square_of_two() -> Job:
    return square(2)


class Tally(nn.Module):
    """A point w of four equal numbers, from 0 on; f(w) = -b w of whatever b is given."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(4, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return -inputs[:, 0] * self.place.sum()


def tally(workers: int = 3) -> Job:
    """Worker k has the slope BASE^k: where its gradients are added up, w has as digits how many each made."""
    slopes = torch.tensor([[float(BASE**rank)] for rank in range(workers)], dtype=torch.float64)
    return Job(
        name="tally",
        model=Tally,
        loss=mean_output,
        train=Data(slopes, torch.zeros(workers, dtype=torch.float64)),
        batch_size=1,
        optimizer=OptimizerSpec(lr=1.0),
        split=Fixed(),
    )


tally_of_two = partial(tally, 2)


def gradients_by_worker(loss: float, workers: int, divisor: int = 1) -> list[int]:
    """How many gradients of each worker are in a model of `tally`; `divisor` workers' make a mean."""
    mean_slope = sum(BASE**rank for rank in range(workers)) / workers
    total = round(-loss / (4 * mean_slope) * divisor)
    return [total // BASE**rank % BASE for rank in range(workers)]
