"""Synchronous SGD on `mnist-cnn`: dure's BSP over collectives against a plain DistributedDataParallel script.

    python bench/bsp_vs_ddp.py [--workers 2] [--steps 10] [--repeats 60] [--job mnist-cnn] [--json FILE]

The same processes, one thread each, hold both; each repeat trains so many steps with one, then with the other, from a
barrier to the last one's end. Same initial values, same samples in the same order, same batch size, same rate:
at the end both must have the same parameters. Data lie in memory; starting up and loading are not measured.

Medians of the alternating repeats, and the median of their ratios. Without MNIST under `DURE_DATA` (or --data) the
data are random numbers of its shape, which takes as long.
"""

from __future__ import annotations

import argparse

import torch
from _script import parse, told
from _side_by_side import (
    Arm,
    Dure,
    Loop,
    Measured,
    in_processes,
    load,
    must_agree,
    options,
    print_table,
    summary,
    take_turns,
    warm_up,
)
from torch.nn.parallel import DistributedDataParallel

from dure.run.config import TrainConfig
from dure.run.prebuilt import Prebuilt
from dure.run.resolve import resolve
from dure.run.setup import Setup

OURS, THEIRS = "dure bsp", "DistributedDataParallel"


def ddp(setup: Setup, rank: int) -> Loop:
    model = DistributedDataParallel(setup.job.build(setup.config.seeded))
    return Loop(setup, rank, model, torch.optim.SGD(model.parameters(), lr=setup.job.optimizer.lr))


def measure(rank: int, given: argparse.Namespace) -> Measured:
    """One of the processes."""
    config = TrainConfig(job=given.job, sync="bsp", on="local", workers=given.workers, steps=10**9)
    setup, _ = resolve(config, Prebuilt(job=load(given.job, given.data)))
    arms: dict[str, Arm] = {THEIRS: ddp(setup, rank), OURS: Dure(setup, rank)}
    warm_up(arms, given.steps)
    seconds = take_turns(arms, given.steps, given.repeats)
    must_agree(arms, OURS, THEIRS)
    return Measured(setup.job.source, given.steps * sum(setup.batch_sizes), seconds)


def main() -> None:
    given = parse(options(__doc__, job="mnist-cnn", steps=10, repeats=60), steps=1, repeats=2)
    with told("bsp_vs_ddp", given) as facts:
        measured = in_processes(measure, given)
        print_table(measured, [(OURS, THEIRS)], given)
        facts |= summary(measured, [(OURS, THEIRS)], given)


if __name__ == "__main__":
    main()
