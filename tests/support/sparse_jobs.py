"""Jobs for shared memory: sparse gradients, and gradients that are known. Named in job texts: `sparse_jobs.py:NAME`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dure.job.data.dataset import Data
from dure.job.job import Job
from dure.job.optimizer import OptimizerSpec

PER_SAMPLE = 3


class Sparse(nn.Module):
    """Logistic regression on samples of a few features each: one weight per feature, `width` outputs."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.weights = nn.EmbeddingBag(features, width, mode="sum", sparse=True)
        nn.init.zeros_(self.weights.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.weights(inputs)


def logistic(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(outputs.squeeze(1), targets)


def right(outputs: Tensor, targets: Tensor) -> float:
    return float(((outputs.squeeze(1) > 0) == (targets > 0.5)).double().mean())


def sparse(features: int = 600, samples: int = 1200, lr: float = 0.5) -> Job:
    """A label is the sign of the sum of its features' true weights."""
    draw = torch.Generator().manual_seed(5)
    inputs = torch.randint(0, features, (samples, PER_SAMPLE), generator=draw)
    truth = torch.randn(features, generator=draw)
    targets = (truth[inputs].sum(dim=1) > 0).float()
    return Job(
        name="sparse",
        model=lambda: Sparse(features, 1),
        loss=logistic,
        train=Data(inputs, targets),
        test=Data(inputs, targets),
        batch_size=1,
        optimizer=OptimizerSpec(lr=lr),
        accuracy=right,
        split="whole",
    )


def large() -> Job:
    """Two million weights, of which a sample touches 48: what takes as long as a pass over all of them is seen."""
    draw = torch.Generator().manual_seed(5)
    inputs = torch.randint(0, 1000, (256, PER_SAMPLE), generator=draw)
    return Job(
        name="large",
        model=lambda: Sparse(125_000, 16),
        loss=lambda outputs, targets: outputs.mean(dim=1).add(-1).square().mean(),
        train=Data(inputs, torch.zeros(256)),
        test=Data(inputs[:2], torch.zeros(2)),
        batch_size=1,
        optimizer=OptimizerSpec(lr=0.5),
        split="whole",
    )


class Point(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(dim))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.place


def ones() -> Job:
    """Every gradient is all ones, wherever: with a rate of 1 each update takes one off each of 64 numbers."""
    return Job(
        name="ones",
        model=lambda: Point(64),
        loss=lambda outputs, targets: outputs.mean(),
        train=Data(torch.ones(8, 64), torch.zeros(8)),
        test=Data(torch.zeros(2, 64), torch.zeros(2)),
        batch_size=1,
        optimizer=OptimizerSpec(lr=1.0),
        split="whole",
    )
