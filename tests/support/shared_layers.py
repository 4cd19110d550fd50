"""A sharing of the layers of `stage_jobs.py`, named in strategy texts: `shared_layers.py:Pairs:ways=2`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dure.job.data.loaders import load_digits
from dure.job.job import Job
from dure.job.models.mlp import top1
from dure.partition.shared_layers import SharedLayers
from dure.partition.tensor.layers import Column, Row
from dure.partition.tensor.plan import LayerSplit, SplitPlan

HERE = Path(__file__)


@dataclass(frozen=True)
class Pairs(SharedLayers):
    """Each two linear layers share their units: by outputs, then by inputs."""

    def plan(self, job: Job, module: nn.Module) -> SplitPlan:
        linear = [name for name, each in module.named_modules() if isinstance(each, nn.Linear)]
        splits: list[LayerSplit] = [Column(), Row()]
        return SplitPlan({name: splits[number % 2] for number, name in enumerate(linear)})


def pairs(ways: int) -> str:
    """The text of the sharing."""
    return f"{HERE}:Pairs:ways={ways}"


def conv_job() -> Job:
    """A small convolutional network on digits: two convolutions and three dense layers."""
    data = load_digits()

    def model() -> nn.Sequential:
        return nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 4, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 5, 2),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(20, 12),
            nn.ReLU(),
            nn.Linear(12, 9),
            nn.ReLU(),
            nn.Linear(9, 10),
        )

    return Job(model, cross_entropy, data.train, data.test, name="convolutions", accuracy=top1)


class Failing(nn.Module):
    """Fails in a forward for training, after as many as `FAILS_AFTER` in the environment says."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.forwards += torch.is_grad_enabled()
        if self.forwards > int(os.environ["FAILS_AFTER"]):
            raise ArithmeticError("between two pairs of layers")
        return inputs


def failing_job() -> Job:
    """Two pairs of layers, and `Failing` between them."""
    data = load_digits()

    def model() -> nn.Sequential:
        return nn.Sequential(
            *(nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 14)),
            Failing(),
            *(nn.Linear(14, 12), nn.Tanh(), nn.Linear(12, 10)),
        )

    return Job(model, cross_entropy, data.train, data.test, name="failing", accuracy=top1)
