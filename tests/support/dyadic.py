"""A job whose numbers have few binary digits: sums are exact in any order, what is equal is equal in every bit."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dure.job.data.dataset import Data
from dure.job.job import Job
from dure.job.optimizer import OptimizerSpec

SIZE = 7
"""Parameters: of two layers, of five and of two, so that no number of shards divides them."""

LR = 0.125


class Bowl(nn.Module):
    """f(w) = sum of 1/2 a w^2 - b w, where each sample brings a and b."""

    def __init__(self) -> None:
        super().__init__()
        start = torch.arange(1, SIZE + 1, dtype=torch.float64) / 4
        self.place = nn.Parameter(start[:5].clone())
        self.rest = nn.Parameter(start[5:].clone())

    def forward(self, inputs: Tensor) -> Tensor:
        a, b = inputs.unbind(dim=1)
        w = torch.cat([self.place, self.rest])
        return (0.5 * a * w * w - b * w).sum(dim=1)


def mean_output(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean()


def bowl_of_many(samples: int = 32) -> Job:
    """Every sample a bowl of its own: curvatures of quarters, offsets of halves."""
    draw = torch.Generator().manual_seed(5)
    curvature = torch.randint(1, 5, (samples, SIZE), generator=draw).double() / 4
    offset = torch.randint(-4, 5, (samples, SIZE), generator=draw).double() / 2
    inputs = torch.stack([curvature, offset], dim=1)
    data = Data(inputs, torch.zeros(samples, dtype=torch.float64))
    return Job(
        name="bowls", model=Bowl, loss=mean_output, train=data, batch_size=2, optimizer=OptimizerSpec(lr=LR),
        split="striped",
    )  # fmt: skip


def serial(steps: int) -> Tensor:
    """Plain gradient descent on the mini-batches of a single worker."""
    job = bowl_of_many()
    sampler = job.samplers([job.batch_size], seed=0)[0]
    w = torch.arange(1, SIZE + 1, dtype=torch.float64) / 4
    for _ in range(steps):
        inputs, _ = job.train.batch(sampler.next())
        a, b = inputs.unbind(dim=1)
        w = w - LR * (a * w - b).mean(dim=0)
    return w
