"""Methods that train apart and meet every H mini-batches: dure's against `torch`'s and `torchft`'s.

    pip install 'dure[bench]'
    python bench/local_methods.py [--job mnist-mlp] [--period 10] [--steps 100] [--repeats 60] [--json FILE]
    python bench/local_methods.py --job mnist-cnn --steps 20 --repeats 20

| dure, over collectives       | beside it                                                                          |
|------------------------------|------------------------------------------------------------------------------------|
| `averaging:period=H`         | a plain loop with `PeriodicModelAverager(period=H)` of `torch.distributed`         |
|                              | a plain loop in torchft's `LocalSGD`                                               |
| `bmuf:period=H,momentum=0.5` | a plain loop in torchft's `DiLoCo`, outside Nesterov SGD with rate 1, momentum 0.5 |
| `diloco:period=H`            | the same with AdamW inside, outside Nesterov SGD with rate 0.7, momentum 0.9       |

Two processes, one thread each, hold all of them and train with each in turn: the same initial values, samples in the
same order, batch size, rates. They are the same algorithms: unless those beside each other have the same parameters
after two repeats (later, rounding errors have grown), the script fails. Data lie in memory; starting up is not
measured.

torchft asks a lighthouse who is there before each meeting, and all whether it went well after it: its runs survive a
death, dure's over collectives restart from a checkpoint (over servers, `averaging ps`, they survive one; that is not
measured here). Each process is a replica group of one rank, on Gloo; DiLoCo sends its parameters in one bucket. With
torchft 0.2.0 and torch 2.13 on the CPU all of this works. Without torchft its rows are left out.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from _script import absent, parse, told
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
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from dure.run.config import TrainConfig
from dure.run.prebuilt import Prebuilt
from dure.run.resolve import resolve
from dure.run.setup import Setup

WAIT = timedelta(seconds=60)

PAIRS = [
    ("dure averaging", "PeriodicModelAverager"),
    ("dure averaging", "torchft LocalSGD"),
    ("dure bmuf", "torchft DiLoCo, SGD inside"),
    ("dure diloco", "torchft DiLoCo, AdamW inside"),
]

WITHOUT_TORCHFT = absent("torchft", "bench")

Optimizer = Callable[[Any], torch.optim.Optimizer]


def plain(setup: Setup, rank: int, optimizer: Optimizer | None = None) -> Loop:
    model = setup.job.build(setup.config.seeded)
    made = torch.optim.SGD(model.parameters(), lr=setup.job.optimizer.lr) if optimizer is None else optimizer(model)
    return Loop(setup, rank, model, made)


def model_averager(setup: Setup, rank: int, period: int) -> Loop:
    loop = plain(setup, rank)
    averager = PeriodicModelAverager(period=period)
    averager.step = 1  # from 0 it would average after the first step, and then in the middle of dure's periods
    loop.after_step = lambda: averager.average_parameters(loop.model.parameters())
    return loop


class Torchft:
    """Each process is a replica group of its own; the first has the lighthouses. Close `held` at the end."""

    def __init__(self, setup: Setup, rank: int, period: int, held: ExitStack) -> None:
        os.environ.setdefault("RUST_LOG", "warn")
        logging.getLogger("torchft").setLevel(logging.ERROR)
        self.setup, self.rank, self.period, self.held = setup, rank, period, held
        self.stores: list[dist.TCPStore] = []

    def lighthouse(self) -> str:
        """The address of a new one: replica groups of one lighthouse would all wait for each other."""
        from torchft.coordination import LighthouseServer

        addresses: list[Any] = [""]
        if self.rank == 0:
            server = LighthouseServer(bind="[::]:0", min_replicas=self.setup.workers)
            self.held.callback(server.shutdown)
            addresses = [server.address()]
        dist.broadcast_object_list(addresses, 0)
        return str(addresses[0])

    def manager(self, name: str) -> Any:
        from torchft.manager import Manager
        from torchft.process_group import ProcessGroupGloo

        store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
        self.stores.append(store)
        manager = Manager(
            ProcessGroupGloo(timeout=WAIT),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=self.setup.workers,
            use_async_quorum=False,  # as DiLoCo needs it and torchft's tests have it for LocalSGD
            init_sync=False,  # all begin with the same values
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=store.port,
            lighthouse_addr=self.lighthouse(),
            replica_id=f"{name}_{self.rank}",
            hostname="127.0.0.1",
        )
        self.held.callback(manager.shutdown, wait=False)
        return manager

    def local_sgd(self) -> Loop:
        from torchft.local_sgd import LocalSGD

        loop = plain(self.setup, self.rank)
        self.held.enter_context(LocalSGD(self.manager("local"), loop.model, loop.optimizer, self.period))
        return loop

    def diloco(self, name: str, inner: Optimizer | None, lr: float, momentum: float) -> Loop:
        from torchft.local_sgd import DiLoCo

        loop = plain(self.setup, self.rank, inner)
        outer = torch.optim.SGD(loop.model.parameters(), lr=lr, momentum=momentum, nesterov=True)
        method = DiLoCo(self.manager(name), [loop.model], loop.optimizer, outer, self.period, use_bucketization=True)
        self.held.enter_context(method)
        return loop


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    """That of dure's preset."""
    return torch.optim.AdamW(model.parameters(), lr=0.001, weight_decay=0.1)


def measure(rank: int, given: argparse.Namespace) -> Measured:
    """One of the processes."""
    job = load(given.job, given.data)

    def task_of(sync: str) -> Setup:
        config = TrainConfig(job=given.job, sync=sync, on="local", workers=given.workers, steps=10**9)
        return resolve(config, Prebuilt(job=job))[0]

    period = f"period={given.period}"
    setup = task_of(f"averaging:{period}")
    arms: dict[str, Arm] = {
        "dure averaging": Dure(setup, rank),
        "PeriodicModelAverager": model_averager(setup, rank, given.period),
        "dure bmuf": Dure(task_of(f"bmuf:{period},momentum=0.5"), rank),
        "dure diloco": Dure(task_of(f"diloco:{period}"), rank),
    }
    with ExitStack() as held:
        if not WITHOUT_TORCHFT:
            torchft = Torchft(setup, rank, given.period, held)
            arms["torchft LocalSGD"] = torchft.local_sgd()
            arms["torchft DiLoCo, SGD inside"] = torchft.diloco("bmuf", None, lr=1.0, momentum=0.5)
            arms["torchft DiLoCo, AdamW inside"] = torchft.diloco("diloco", adamw, lr=0.7, momentum=0.9)
        warm_up(arms, given.steps)
        for ours, theirs in PAIRS:
            if theirs in arms:
                must_agree(arms, ours, theirs)
        seconds = take_turns(arms, given.steps, given.repeats)
        dist.barrier()  # the lighthouse is needed up to here
    return Measured(job.source, given.steps * sum(setup.batch_sizes), seconds)


def main() -> None:
    parser = options(__doc__, steps=100, repeats=60)
    parser.add_argument("--period", type=int, default=10)
    given = parse(parser, steps=10, repeats=2)
    if given.steps % given.period:
        parser.error(
            f"--steps must be a multiple of --period ({given.period}), so that each repeat has as many meetings"
        )
    with told("local_methods", given) as facts:
        measured = in_processes(measure, given)
        pairs = [pair for pair in PAIRS if pair[1] in measured.seconds]
        print_table(measured, pairs, given)
        if WITHOUT_TORCHFT:
            print(WITHOUT_TORCHFT)
        facts |= summary(measured, pairs, given)


if __name__ == "__main__":
    main()
