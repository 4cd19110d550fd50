"""A job and a method whose code raises in the middle of a run: in the model, the loss, the data, at a server."""

from __future__ import annotations

import torch

import dure
from dure.topology.parameter_server.policies import Barrier


def broken(where: str) -> None:
    raise RuntimeError(f"the {where} is broken")


class Model(torch.nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.line, self.where, self.calls = torch.nn.Linear(4, 3), where, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 10 and self.where == "model":
            broken("model")
        if self.calls > 10 and self.where == "shape":
            return self.line(x[:, :2])
        return self.line(x)


class Loss:
    def __init__(self, where: str) -> None:
        self.where, self.calls = where, 0

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 10 and self.where == "loss":
            broken("loss")
        return torch.nn.functional.cross_entropy(outputs, targets)


class Samples(torch.utils.data.Dataset):
    def __init__(self, where: str) -> None:
        self.where = where

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.where == "data" and index == 200:
            broken("data")
        return torch.full((4,), index / 256), index % 3


def job(where: str) -> dure.Job:
    return dure.Job(
        model=lambda: Model(where),
        loss=Loss(where),
        train=Samples(where),
        test=Samples(""),
        batch_size=4,
        steps=40,
    )


class BrokenBarrier(Barrier):
    def ask(self, worker: int) -> list:
        if self.version > 3:
            broken("server")
        return super().ask(worker)


class BrokenAtServer(dure.BSP):
    def server_rule(self, optimizer: dure.OptimizerSpec) -> dure.ServerRule:
        return dure.ServerRule(optimizer, BrokenBarrier())
