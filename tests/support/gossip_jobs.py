"""A job whose result is known exactly, whatever the order in which processes do things."""

import torch
from torch import nn

from dure.job.data.dataset import Data
from dure.job.job import Job
from dure.job.optimizer import OptimizerSpec

PUSHES = (8.0, -2.0, 1.0)


class Slope(nn.Module):
    """f(w) = -b w, of whatever b is given."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return -inputs[:, 0] * self.place


class Own:
    """Worker k always has the k-th sample."""

    def samplers(self, targets, batch_sizes, *, seed):
        return [Only(rank) for rank in range(len(batch_sizes))]


class Only:
    batch_size = 1

    def __init__(self, index: int) -> None:
        self.index = index

    def next(self) -> torch.Tensor:
        return torch.tensor([self.index])

    def state(self) -> dict[str, int]:
        return {}

    def restore(self, state: dict[str, int]) -> None:
        """Nothing changes."""


def mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.mean()


def linear() -> Job:
    data = Data(torch.tensor(PUSHES, dtype=torch.float64).unsqueeze(1), torch.zeros(3, dtype=torch.float64))
    return Job(
        model=Slope, loss=mean, train=data, batch_size=1, optimizer=OptimizerSpec(lr=0.25), split=Own(), name="linear"
    )


class Block(nn.Module):
    """Adds b w to the last column; its number stands in the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        pushes, sums = inputs[:, :1], inputs[:, 1:]
        return torch.cat([pushes, sums + pushes * self.place], dim=1)


def minus_sum(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -outputs[:, 1].mean()


def blocks() -> Job:
    """Two blocks: f(v, w) = -b v - b w."""
    pushes = torch.tensor([[push, 0.0] for push in PUSHES], dtype=torch.float64)
    return Job(
        model=lambda: nn.Sequential(Block(), Block()), loss=minus_sum, train=Data(pushes, torch.zeros(3)),
        batch_size=1, optimizer=OptimizerSpec(lr=0.25), split=Own(), name="blocks",
    )  # fmt: skip
