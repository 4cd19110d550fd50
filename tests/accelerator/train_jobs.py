"""Jobs that `dure train FILE:FUNCTION` runs on the device under test, which every process of a run has then.

Their sums have few binary digits, so that they are exact in any order: runs on a device and on the CPU are equal bit
for bit, also where messages come in another order.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import torch
from accelerator import target
from torch import Tensor, nn

from dure import Data, Job, OptimizerSpec
from dure.job.models.quadratic import Point

DEVICE = target.prepare()


def eighth_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(dim=1).mean() / 8


def dyadic() -> Job:
    """f(w) = mean of 1/8 |w - t_i|^2."""
    targets = torch.randint(-32, 32, (256, 8), generator=torch.Generator().manual_seed(3)).double() / 64
    return Job(
        name="dyadic",
        model=partial(Point, 8, torch.float64),
        loss=eighth_square,
        train=Data(torch.zeros(256, 1, dtype=torch.float64), targets),
        batch_size=4,
        steps=6,
        optimizer=OptimizerSpec(lr=0.5),
    )


class Bag(nn.Module):
    """The sum of a sample's rows of a table, and a shift that all samples share."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 2, dtype=torch.float64, sparse=sparse)
        self.shift = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.table.weight.data.copy_((torch.arange(24.0).view(12, 2) % 9 - 4) / 8)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.table(inputs).sum(dim=1) + self.shift


def bags() -> Job:
    """A table of which a batch reads some rows."""
    draw = torch.Generator().manual_seed(5)
    inputs = torch.randint(0, 12, (64, 3), generator=draw)
    targets = torch.randint(-8, 8, (64, 2), generator=draw).double() / 8
    return Job(
        name="bags",
        model=Bag,
        loss=eighth_square,
        train=Data(inputs, targets),
        batch_size=2,
        steps=6,
        optimizer=OptimizerSpec(lr=0.5),
        rows=lambda inputs: {"table.weight": inputs},
    )


def sparse_bags() -> Job:
    """As `bags`; the gradient of the table is sparse."""
    job = bags()
    job.model = partial(Bag, sparse=True)
    return job


def plain() -> Job:
    """A dense model with batch norm, momentum and a schedule, in float32."""
    draw = torch.Generator().manual_seed(7)
    inputs = torch.randn(96, 6, generator=draw)
    targets = inputs @ torch.randn(6, 2, generator=draw)
    return Job(
        name="plain",
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)),
        loss=eighth_square,
        train=Data(inputs, targets),
        batch_size=8,
        steps=6,
        optimizer=OptimizerSpec("momentum", lr=0.1, momentum=0.9),
    )


def shared() -> Job:
    """As `plain`, with layers that several workers can share, and batch norm behind them."""

    def model() -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2), nn.BatchNorm1d(2))

    return replace(plain(), name="shared", model=model)


def there(job: Job) -> Job:
    """The job, with a loss that fails where a gradient is computed anywhere but on the device."""
    given = job.loss

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if torch.is_grad_enabled() and outputs.device.type != DEVICE:
            raise RuntimeError(f"a gradient is computed on {outputs.device}")
        return given(outputs, targets)

    job.loss = loss
    return job


def dyadic_there() -> Job:
    return there(dyadic())


def sparse_bags_there() -> Job:
    return there(sparse_bags())


def bags_there() -> Job:
    return there(bags())


def plain_there() -> Job:
    return there(plain())


def slow_there() -> Job:
    return there(slow())


def computing() -> Job:
    """A job that computes a gradient while it is loaded."""
    job, start = dyadic(), torch.ones(1, requires_grad=True)
    start.square().sum().backward()
    return job


def touching() -> Job:
    """A job that uses the device while it is loaded."""
    torch.ones(1, device=DEVICE)
    return dyadic()


def elsewhere() -> Job:
    """A job whose model is on the device from the start."""
    job = dyadic()
    job.model = lambda: Point(8, torch.float64).to(DEVICE)
    return job


def data_elsewhere() -> Job:
    """A job whose samples are on the device from the start."""
    job = dyadic()
    job.train = Data(job.train.inputs.to(DEVICE), job.train.targets.to(DEVICE))
    return job


def slow() -> Job:
    """As `dyadic`; a step takes some milliseconds, so that a test can interfere."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        time.sleep(0.004)
        return eighth_square(outputs, targets)

    job = dyadic()
    job.loss = loss
    return job
