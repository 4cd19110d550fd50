"""Jobs of small models in blocks, for pipelines. Their functions are named in job texts: `stage_jobs.py:NAME`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dure.job.data.loaders import load_digits
from dure.job.job import Job
from dure.job.models.mlp import top1
from dure.job.optimizer import OptimizerSpec
from dure.runtime.process.node import ProcessNode

HERE = Path(__file__)


def job_text(name: str) -> str:
    """The text that names a job of this file."""
    return f"{HERE}:{name}"


def job(model: Callable[[], nn.Module], **options: object) -> Job:
    data = load_digits()
    given = {"batch_size": 10, "optimizer": OptimizerSpec("sgd", lr=0.1)} | options
    return Job(
        model=model, loss=cross_entropy, train=data.train, test=data.test, accuracy=top1, name="stages", **given
    )  # fmt: skip


def _blocks(normed: Sequence[int], dropped: float) -> nn.Sequential:
    """Four blocks of two layers each, those in `normed` with batch norm."""
    widths = (64, 12, 14, 12, 10)
    blocks: list[nn.Module] = []
    for number, (before, after) in enumerate(pairwise(widths)):
        last = number == len(widths) - 2
        block: list[nn.Module] = [nn.Linear(before, after)]
        block += [nn.BatchNorm1d(after)] if number in normed else []
        block += [] if last else [nn.Tanh()]
        block += [nn.Dropout(dropped)] if dropped and not last else []
        blocks.append(nn.Sequential(*block))
    return nn.Sequential(*blocks)


def plain() -> Job:
    return job(partial(_blocks, (), 0.0))


class Slope(nn.Module):
    """Multiplies its inputs by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor([0.5]))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.slope


def few() -> Job:
    """Three parameters; the group of the first two keeps no velocity, and that of the third does."""
    made = job(lambda: nn.Sequential(Slope(), Slope(), Slope()))
    return replace(
        made,
        loss=lambda outputs, targets: (outputs.mean(1) - targets).square().mean(),
        accuracy=None,
        optimizer=OptimizerSpec("sgd", lr=0.01),
        groups=lambda name, _: {"momentum": 0.9} if name.startswith("2") else {},
    )


def normed_between() -> Job:
    """Two pairs of layers, with batch norm and dropout between the pairs."""

    def model() -> nn.Sequential:
        first = nn.Sequential(nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 14))
        return nn.Sequential(
            first, nn.BatchNorm1d(14), nn.Dropout(0.2), nn.Sequential(nn.Linear(14, 12), nn.Tanh(), nn.Linear(12, 10))
        )

    return job(model)


def frozen() -> Job:
    """As `plain`, with a weight and a bias that keep their random initial values."""

    def model() -> nn.Sequential:
        network = _blocks((), 0.0)
        for name in ("0.0.bias", "2.0.weight"):
            network.get_parameter(name).requires_grad_(False)
        return network

    return job(model)


def normed() -> Job:
    """Batch norm and dropout in each pair of blocks."""
    return job(partial(_blocks, (0, 1, 2, 3), 0.2))


def normed_first() -> Job:
    """Batch norm and dropout in the first blocks only."""
    return job(partial(_blocks, (0,), 0.2))


def _tied() -> nn.Module:
    """Six blocks. Blocks 1, 2 and 4 share a weight, and blocks 2 and 4 a bias too."""
    blocks = [nn.Linear(64, 12), *(nn.Linear(12, 12) for _ in range(4)), nn.Linear(12, 10)]
    blocks[2].weight = blocks[4].weight = blocks[1].weight
    blocks[4].bias = blocks[2].bias
    return nn.Sequential(*(nn.Sequential(nn.Tanh(), block) if number else block for number, block in enumerate(blocks)))


def tied() -> Job:
    return job(_tied)


def normed_last() -> Job:
    """Batch norm in the last block only."""
    return job(partial(_blocks, (3,), 0.0))


class Pause(nn.Module):
    """Waits a little in each forward, so that a test can interfere."""

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(0.002)
        return inputs


def slow() -> Job:
    return job(lambda: nn.Sequential(Pause(), *_blocks((), 0.0).children()))


def fails() -> Job:
    """The 50th training loss of a process raises an error."""
    losses: list[None] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        losses.append(None) if outputs.requires_grad else None
        if len(losses) == 50:
            raise RuntimeError("the 50th loss")
        return cross_entropy(outputs, targets)

    return replace(plain(), loss=loss)


LATE_SECONDS = 0.2
LATE = {"worker 0": 0, "worker 3": 1}
"""The number of messages that a worker asks for in time; its later requests come late."""


def late_requests() -> Job:
    """Some requests for messages come late, on two pipelines of two stages. A process that has loaded this keeps it.

    Worker 0 (stage 0) asks worker 1 late for its first gradient, and worker 3 (stage 1) asks worker 2 late for its
    second input. Both that are asked stand in an all-reduce then, and each of these waits for one of the late.
    """
    recv = ProcessNode._recv
    asked: Counter[str] = Counter()

    async def late(self: ProcessNode, peer: str, into: Tensor, tag: int) -> Tensor:
        asked[self.name] += 1
        if asked[self.name] > LATE.get(self.name, 10**6):
            await self.sleep(LATE_SECONDS)
        return await recv(self, peer, into, tag)

    ProcessNode._recv = late
    return plain()


def slow_requests() -> Job:
    """Each request of worker 0 for a message comes a little late. A process that has loaded this keeps it."""
    recv = ProcessNode._recv

    async def late(self: ProcessNode, peer: str, into: Tensor, tag: int) -> Tensor:
        if self.name == "worker 0":
            await self.sleep(0.03)
        return await recv(self, peer, into, tag)

    ProcessNode._recv = late
    return plain()


def large() -> Job:
    """Eight layers of 2048 units: 34 M parameters, 134 MB."""
    widths = [64, *[2048] * 9, 10]
    return job(lambda: nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(widths))), batch_size=16)
