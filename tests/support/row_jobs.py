"""Jobs whose batches read some rows of a table, in numbers with few binary digits. Named in job texts by their file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from dure.job.data.dataset import Data
from dure.job.job import Job
from dure.job.optimizer import OptimizerSpec

ROWS, WIDTH, TOKENS = 23, 2, 3


class Bag(nn.Module):
    """The sum of a sample's rows, and a shift that all share."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True, dtype=torch.float64)
        self.shift = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
        start = torch.arange(ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH)
        self.table.weight.data.copy_((start % 9 - 4) / 8)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.table(inputs) + self.shift


def eighth_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(dim=1).mean() / 8


def rows_of(inputs: Tensor) -> dict[str, Tensor]:
    return {"table.weight": inputs}


def bags(rows: Callable[[Tensor], dict[str, Tensor]] | None = rows_of, optimizer: str = "sgd") -> Job:
    """Every sample names three rows, some of them twice; every second sample names but the first few."""
    draw = torch.Generator().manual_seed(5)
    inputs = torch.randint(0, ROWS, (64, TOKENS), generator=draw)
    inputs[::2] %= 3
    targets = torch.randint(-8, 8, (64, WIDTH), generator=draw).double() / 8
    return Job(
        name="bags",
        model=Bag,
        loss=eighth_square,
        train=Data(inputs, targets),
        test=Data(inputs, targets),
        batch_size=2,
        optimizer=OptimizerSpec(optimizer, lr=0.5),
        rows=rows,
    )


def wrong_rows() -> Job:
    """It forgets the last of a sample's rows."""
    return bags(lambda inputs: {"table.weight": inputs[:, :-1]})


def grouped() -> Job:
    """The table and the shift are a group each, and their rates fall."""
    job = replace(bags(), split="striped", schedule=lambda step: 1 / (1 + 0.3 * step))
    return replace(job, groups=lambda name, parameter: {"lr": 0.5} if parameter.dim() == 2 else {"lr": 0.05})
