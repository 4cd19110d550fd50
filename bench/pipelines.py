"""Pipelines of two processes: dure's GPipe and 1F1B against `torch.distributed.pipelining` on the same stages.

    python bench/pipelines.py [--steps 4] [--repeats 30] [--batch 256] [--micro 8] [--width 1024] [--depth 8]

The same two processes, one thread each, hold all arms. An arm trains a model of `depth` dense layers of `width` units,
cut in the middle: same initial values, same samples in the same order, same rate. At the end both sides of a pair must
have the same parameters. A mini-batch has `batch` samples, which are the samples of an update. Flush schedules divide
it into `micro` micro-batches. PipeDream, which has no counterpart, sends whole mini-batches, and is held against dure's
1F1B. Each repeat ends with an empty pipeline. Random data lie in memory; starting up is not measured.
"""

from __future__ import annotations

import argparse
from itertools import chain

import torch
from _script import parse, told
from _side_by_side import (
    CREDENTIALS,
    Arm,
    Dure,
    Measured,
    Unheard,
    in_processes,
    must_agree,
    options,
    print_table,
    summary,
    take_turns,
    warm_up,
)
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import cross_entropy

from dure.job.data.dataset import Data
from dure.job.job import Job
from dure.job.optimizer import OptimizerSpec
from dure.run.config import TrainConfig
from dure.run.prebuilt import Prebuilt
from dure.run.resolve import resolve
from dure.run.setup import Setup
from dure.run.workers import build_worker
from dure.runtime.process.group import ProcessGroup
from dure.runtime.process.node import ProcessNode
from dure.runtime.wire import Identity

LR = 0.01

CLASSES = 10

PAIRS = [("gpipe", "torch gpipe"), ("1f1b", "torch 1f1b"), ("pipedream", "1f1b")]


def make_job(given: argparse.Namespace) -> Job:
    """`depth` dense layers of `width` units with ReLU between, on random data."""
    draw = torch.Generator().manual_seed(0)
    data = Data(torch.randn(4096, given.width, generator=draw), torch.randint(0, CLASSES, (4096,), generator=draw))

    def model() -> nn.Sequential:
        inner = [[nn.Linear(given.width, given.width), nn.ReLU()] for _ in range(given.depth - 1)]
        return nn.Sequential(*chain.from_iterable(inner), nn.Linear(given.width, CLASSES))

    return Job(model, cross_entropy, data, batch_size=given.batch, optimizer=OptimizerSpec(lr=LR), name="dense layers")


class Stage(Dure):
    """A stage of dure's pipeline, in a process without a driver."""

    def __init__(self, setup: Setup, rank: int, ports: list[int]) -> None:
        node = ProcessNode(Identity(f"bench {setup.strategy.text()['partition']}", f"worker {rank}", rank), CREDENTIALS)
        port = node.wire.listen("127.0.0.1")
        ports[rank] = port
        node.collectives = lambda ranks: ProcessGroup(
            node, ranks, torch.distributed.new_group(list(ranks), use_local_synchronization=True)
        )
        self.setup, self.node, self.until = setup, node, 0
        unheard = Unheard(setup, node)
        unheard.worker = self.worker = build_worker(setup, node, rank, node.meter)
        self.worker.on_step = unheard.on_step
        self.worker.boundary.suspend = lambda worker: worker.clock >= self.until
        self.worker.boundary.checkpoint = lambda: self.until


class Torch:
    """The same stage under a schedule of `torch.distributed.pipelining`."""

    def __init__(self, setup: Setup, rank: int, schedule: type, given: argparse.Namespace) -> None:
        half = given.depth  # of the 2 * depth - 1 modules: layers and activations
        model = setup.job.build(setup.config.seeded)
        assert isinstance(model, nn.Sequential)
        self.module = nn.Sequential(*list(model)[:half]) if rank == 0 else nn.Sequential(*list(model)[half:])
        self.rank = rank
        stage = PipelineStage(self.module, rank, 2, torch.device("cpu"))
        self.schedule = schedule(stage, given.micro, loss_fn=cross_entropy)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=LR)
        self.sampler = setup.job.samplers(setup.batch_sizes, seed=setup.config.seeded)[0]
        self.data = setup.job.train

    def train(self, steps: int) -> None:
        for _ in range(steps):
            inputs, targets = self.data.batch(self.sampler.next())
            self.optimizer.zero_grad()
            if self.rank == 0:
                self.schedule.step(inputs)
            else:
                self.schedule.step(target=targets)
            self.optimizer.step()

    @property
    def params(self) -> torch.Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.module.parameters()])


def connected(config: TrainConfig, job: Job, rank: int) -> Stage:
    """The worker of this process in a run of two, which knows the port of the other."""
    setup, _ = resolve(config, Prebuilt(job=job))
    setup.prepare()
    ports = [0, 0]
    made = Stage(setup, rank, ports)
    gathered: list[list[int]] = [[0, 0], [0, 0]]
    torch.distributed.all_gather_object(gathered, ports)
    for other in (0, 1):
        made.node.directory[f"worker {other}"] = ("127.0.0.1", gathered[other][other])
    return made


def measure(rank: int, given: argparse.Namespace) -> Measured:
    """One of the processes."""
    job = make_job(given)

    def stage(partition: str) -> Stage:
        config = TrainConfig(
            job=job.name,
            sync="bsp",
            topology="collective",
            partition=f"{partition},cuts={given.depth}",
            on="local",
            workers=2,
            steps=10**9,
        )
        return connected(config, job, rank)

    arms: dict[str, Arm] = {
        "gpipe": stage(f"gpipe:stages=2,micro={given.micro}"),
        "torch gpipe": Torch(setup_of(job), rank, ScheduleGPipe, given),
        "1f1b": stage(f"1f1b:stages=2,micro={given.micro}"),
        "torch 1f1b": Torch(setup_of(job), rank, Schedule1F1B, given),
        "pipedream": stage("pipedream:stages=2"),
    }
    warm_up(arms, given.steps)
    seconds = take_turns(arms, given.steps, given.repeats)
    must_agree(arms, "gpipe", "torch gpipe", atol=1e-3)
    must_agree(arms, "1f1b", "torch 1f1b", atol=1e-3)
    return Measured(f"{given.depth} layers of {given.width}", given.steps * given.batch, seconds)


def setup_of(job: Job) -> Setup:
    """The run of one worker with the same data."""
    setup, _ = resolve(TrainConfig(job=job.name, on="local", workers=1, steps=1), Prebuilt(job=job))
    return setup


def main() -> None:
    parser = options(__doc__, job="", steps=4, repeats=30)
    for name, default in (("batch", 256), ("micro", 8), ("width", 1024), ("depth", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parse(parser, steps=1, repeats=2, batch=32, micro=4, width=128, depth=4)
    with told("pipelines", given) as facts:
        measured = in_processes(measure, given)
        print_table(measured, PAIRS, given)
        facts |= summary(measured, PAIRS, given)


if __name__ == "__main__":
    main()
