"""Tensor parallelism of two processes: dure's split layers against a plain script with DTensor on the same model.

    python bench/tensor.py [--steps 4] [--repeats 30] [--batch 64] [--width 512] [--inner 2048] [--depth 4]

The same two processes, one thread each, hold both arms. An arm trains `depth` pairs of dense layers, `width` -> `inner`
-> `width`, the first of each pair split by outputs and the second by inputs: same initial values, same samples in the
same order, same rate. At the end both must have the same parameters. The script is what PyTorch's documentation
describes: `parallelize_module` with `ColwiseParallel` and `RowwiseParallel` over a mesh of two processes, Gloo and
`torch.optim.SGD`. Random data lie in memory; starting up is not measured.
"""

from __future__ import annotations

import argparse
from itertools import chain

import torch
from _script import parse, told
from _side_by_side import (
    Arm,
    Measured,
    in_processes,
    must_agree,
    options,
    print_table,
    summary,
    take_turns,
    warm_up,
)
from pipelines import CLASSES, LR, connected, setup_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

from dure.job.data.dataset import Data
from dure.job.job import Job
from dure.job.optimizer import OptimizerSpec
from dure.run.config import TrainConfig
from dure.run.setup import Setup

OURS, THEIRS = "dure tensor", "DTensor"
PAIRS = [(OURS, THEIRS)]


def make_job(given: argparse.Namespace) -> Job:
    """`depth` pairs of dense layers on random data; the first `CLASSES` outputs are those of the classes."""
    draw = torch.Generator().manual_seed(0)
    data = Data(torch.randn(4096, given.width, generator=draw), torch.randint(0, CLASSES, (4096,), generator=draw))

    def model() -> nn.Sequential:
        pairs = [
            [nn.Linear(given.width, given.inner), nn.ReLU(), nn.Linear(given.inner, given.width)]
            for _ in range(given.depth)
        ]
        return nn.Sequential(*chain.from_iterable(pairs))

    return Job(model, cross_entropy, data, batch_size=given.batch, optimizer=OptimizerSpec(lr=LR), name="dense pairs")


class Script:
    """The same training with DTensor."""

    def __init__(self, setup: Setup, rank: int) -> None:
        self.module = setup.job.build(setup.config.seeded)
        linear = [name for name, each in self.module.named_modules() if isinstance(each, nn.Linear)]
        styles = [ColwiseParallel(), RowwiseParallel()]
        plan = {name: styles[number % 2] for number, name in enumerate(linear)}
        parallelize_module(self.module, init_device_mesh("cpu", (2,)), plan)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=LR, foreach=False)
        self.sampler = setup.job.samplers(setup.batch_sizes, seed=setup.config.seeded)[0]
        self.data = setup.job.train

    def train(self, steps: int) -> None:
        for _ in range(steps):
            inputs, targets = self.data.batch(self.sampler.next())
            self.optimizer.zero_grad()
            cross_entropy(self.module(inputs), targets).backward()
            self.optimizer.step()

    @property
    def params(self) -> torch.Tensor:
        shards = [each.to_local() if isinstance(each, DTensor) else each for each in self.module.parameters()]
        return torch.cat([each.detach().reshape(-1) for each in shards])


def measure(rank: int, given: argparse.Namespace) -> Measured:
    """One of the processes."""
    job = make_job(given)
    config = TrainConfig(
        job=job.name,
        sync="bsp",
        topology="collective",
        partition=given.partition,
        on="local",
        workers=2,
        steps=10**9,
    )
    arms: dict[str, Arm] = {OURS: connected(config, job, rank), THEIRS: Script(setup_of(job), rank)}
    warm_up(arms, given.steps)
    seconds = take_turns(arms, given.steps, given.repeats)
    must_agree(arms, OURS, THEIRS, atol=1e-3)
    return Measured(
        f"{given.depth} pairs {given.width}-{given.inner}-{given.width}", given.steps * given.batch, seconds
    )


def main() -> None:
    parser = options(__doc__, job="", steps=4, repeats=30)
    for name, default in (("batch", 64), ("width", 512), ("inner", 2048), ("depth", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--partition", default="tensor:ways=2")
    given = parse(parser, steps=1, repeats=2, batch=16, width=64, inner=128, depth=2)
    with told("tensor", given) as facts:
        measured = in_processes(measure, given)
        print_table(measured, PAIRS, given)
        facts |= summary(measured, PAIRS, given)


if __name__ == "__main__":
    main()
