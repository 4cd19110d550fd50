"""Gossip on a ring: dure's AD-PSGD against `decent-dp`'s DecentralizedDataParallel.

    pip install 'dure[bench]'
    python bench/ad_psgd.py [--job mnist-mlp] [--workers 2] [--steps 200] [--repeats 60] [--json FILE]
    python bench/ad_psgd.py --workers 4 --repeats 30
    python bench/ad_psgd.py --job mnist-cnn --steps 20 --repeats 40

| here               | a worker averages                                                | waits for its neighbor |
|--------------------|------------------------------------------------------------------|------------------------|
| `ad-psgd`          | with a neighbor drawn at random, atomically, beside the gradients | never                  |
| decent-dp's `ring` | with its left and right neighbor in turn, during the next gradient | at the next step      |

They are relatives, not the same algorithm: decent-dp keeps neighbors at the same step (D-PSGD with overlap), so that
one slow worker slows all, and a worker's death ends the run. What is compared is the samples a second of workers that
are equally fast, the kindest case for it. Same job, initial values, samples in the same order, batch size and rate; the
same processes, one thread each, hold both. A repeat of dure's ends when all workers have done their steps and their
averagings have been settled; one of decent-dp's ends with the last step, the last averaging still on its way. Starting
up and the final averaging of all models are not measured.

The script also tells how many averagings a worker of dure's took part in per step (decent-dp's: one), and fails if the
mean models of the two are not about equally good. Without decent-dp only dure's rate is told.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import torch.distributed as dist
from _script import absent, parse, told
from _side_by_side import (
    Arm,
    Dure,
    Measured,
    in_processes,
    load,
    options,
    print_table,
    summary,
    take_turns,
    warm_up,
)

from dure.core.node import Address, Call, Operation, Reply
from dure.job.evaluation import Evaluator
from dure.job.job import Job
from dure.run.config import TrainConfig
from dure.run.prebuilt import Prebuilt
from dure.run.resolve import resolve
from dure.run.setup import Setup
from dure.runtime.process.node import ProcessNode

THEIRS = "decent-dp ring"
PAIRS = [("dure ad-psgd", THEIRS)]
WITHOUT_DECENT = absent("decent_dp", "bench", "decent-dp")


class Line:
    """Where everybody waits until all are through with a repeat, still answering their neighbors."""

    def __init__(self, node: ProcessNode, workers: int) -> None:
        self.node, self.workers = node, workers
        self.here: list[Operation[Reply]] = []

    def expects(self, method: str) -> tuple[()]:
        return ()

    def handle(self, call: Call) -> Operation[Reply]:
        through: Operation[Reply] = self.node.promise("the others to be through")
        self.here.append(through)
        if len(self.here) == self.workers:
            for each in self.here:
                each.resolve(Reply())
            self.here = []
        return through


class Gossiping(Dure):
    """A worker that its neighbors can call."""

    def __init__(self, setup: Setup, rank: int) -> None:
        super().__init__(setup, rank)
        self.node.serve("line", Line(self.node, setup.workers))
        ports: list[Any] = [None] * setup.workers
        dist.all_gather_object(ports, self.node.wire.listen())
        self.node.directory.update({f"worker {each}": ("127.0.0.1", port) for each, port in enumerate(ports)})

    async def _work(self) -> None:
        await super()._work()
        await self.node.call(Address("worker 0", "line"), "through")

    @property
    def averagings(self) -> int:
        """How many this worker has begun and that came to something."""
        return self.worker.peer.averaged


class Decent:
    """The loop of decent-dp's examples: its hooks on parameters step and average."""

    def __init__(self, setup: Setup, rank: int) -> None:
        from loguru import logger

        logger.remove()
        logger.add(sys.stderr, level="WARNING")
        from decent_dp.ddp import DecentralizedDataParallel

        job = setup.job
        self.model = DecentralizedDataParallel(
            job.build(setup.config.seeded),
            optim_fn=lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=job.optimizer.lr),
            topology="ring",
        )
        self.model.train()
        self.sampler = job.samplers(setup.batch_sizes, seed=setup.config.seeded)[rank]
        self.data, self.loss = job.train, job.loss

    def train(self, steps: int) -> None:
        for _ in range(steps):
            inputs, targets = self.data.batch(self.sampler.next())
            self.loss(self.model(inputs), targets).backward()  # type: ignore[no-untyped-call]

    @property
    def params(self) -> torch.Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()])


def accuracy(job: Job, arm: Arm) -> float:
    """Of the mean of all workers' models."""
    mean = arm.params / dist.get_world_size()
    dist.all_reduce(mean)
    grade = Evaluator(job).grade(mean, None)
    return 0.0 if grade.accuracy is None else grade.accuracy


def measure(rank: int, given: argparse.Namespace) -> tuple[Measured, dict[str, float], float]:
    """One of the processes."""
    config = TrainConfig(
        job=given.job, strategy="ad-psgd gossip:graph=ring", on="local", workers=given.workers, steps=10**9
    )
    job = load(given.job, given.data)
    setup, _ = resolve(config, Prebuilt(job=job))
    ours = Gossiping(setup, rank)
    arms: dict[str, Arm] = {"dure ad-psgd": ours}
    if not WITHOUT_DECENT:
        arms[THEIRS] = Decent(setup, rank)
    warm_up(arms, given.steps)
    seconds = take_turns(arms, given.steps, given.repeats)
    accuracies = {name: accuracy(job, arm) for name, arm in arms.items()}
    begun = torch.tensor(float(ours.averagings))
    dist.all_reduce(begun)
    averagings = 2 * float(begun) / (ours.worker.clock * given.workers)
    return Measured(job.source, given.steps * sum(setup.batch_sizes), seconds), accuracies, averagings


def main() -> None:
    given = parse(options(__doc__, steps=200, repeats=60), steps=20, repeats=2)
    if given.workers % 2:
        raise SystemExit(f"decent-dp's ring needs an even number of workers, got {given.workers}.")
    with told("ad_psgd", given) as facts:
        measured, accuracies, averagings = in_processes(measure, given)
        pairs = [pair for pair in PAIRS if pair[1] in measured.seconds]
        print_table(measured, pairs, given)
        for name, value in accuracies.items():
            print(f"{name}: test accuracy {value:.4f} of the mean model")
        print(f"a worker of dure's took part in {averagings:.2f} averagings per step, of decent-dp's in one")
        if WITHOUT_DECENT:
            print(WITHOUT_DECENT)
        facts |= summary(measured, pairs, given) | {"accuracy": accuracies, "averagings_per_step": round(averagings, 3)}
    if not given.smoke and max(accuracies.values()) - min(accuracies.values()) > 0.05:
        raise SystemExit("one of the two has learned less: this is no fair comparison.")


if __name__ == "__main__":
    main()
