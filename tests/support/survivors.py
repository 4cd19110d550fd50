"""Kills of the workers of a run, and the same training as a plain loop in one process.

The loop knows nothing of dure but the model, the data and the order of each worker's samples. It all-reduces by Gloo,
between groups of this process: the sum of a ring depends on the number of its members in the last bits.
"""

from __future__ import annotations

import copy
import itertools
import os
import random
import signal
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from support.real_runs import Trial
from support.survivor_jobs import BATCH, LR, MOMENTUM, STAMP, model
from torch import Tensor, nn


def times(folder: Path, pid: int) -> list[float]:
    """The monotonic seconds of the steps that a process has noted."""
    path = folder / f"{pid}.steps"
    return [each for (each,) in STAMP.iter_unpack(path.read_bytes())] if path.exists() else []


class Kills:
    """Ends workers of a run at random moments, each by a random one of `ways`; at least one worker is left.

    `burst` are the workers that are ended within 0.15 s of each other. With `again`, each is started again once its end
    is known. `only` are the ranks that may be ended, all if None. `ended` has the time, the rank and the way.
    """

    def __init__(
        self,
        count: int,
        seed: int,
        *,
        ways: Sequence[str] = ("kill",),
        burst: int = 1,
        until: float = 0.5,
        again: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.left, self.ways, self.burst, self.until, self.again = count, ways, burst, until, again
        self.gone: set[int] = set()
        self.only: set[int] | None = None
        self.ended: list[tuple[float, int, str]] = []
        self.due: float | None = None

    def __call__(self, trial: Trial) -> None:
        driver, now = trial.driver, time.monotonic()
        if self.due is None:
            self.due = now + self.random.uniform(0.0, self.until)
        for rank in sorted(self.gone) if self.again else ():
            if f"worker {rank}" in driver.roster.failed and f"worker {rank}" in trial.fork_server.exited:
                self.gone.discard(rank)
                driver.start(f"worker {rank}")
        pids = trial.fork_server.pids
        ranks = sorted(int(name.split()[1]) for name in driver.roster.living() if name in pids)
        ranks = [rank for rank in ranks if rank not in self.gone and (self.only is None or rank in self.only)]
        if (
            not self.left
            or now < self.due
            or len(driver.roster.living() - {f"worker {rank}" for rank in self.gone}) < 2
            or not ranks
        ):
            return
        rank, way = self.random.choice(ranks), self.random.choice(self.ways)
        pid = pids[f"worker {rank}"]
        self.left -= 1
        self.ended.append((now, rank, way))
        self.gone.add(rank)
        if way == "exit":
            assert trial.config.data is not None
            (trial.config.data / f"{pid}.exit").touch()
        else:
            os.kill(pid, signal.SIGKILL if way == "kill" else signal.SIGSTOP)
        again = len(self.ended) % self.burst
        self.due = now + (self.random.uniform(0.0, 0.15) if again else self.random.uniform(0.3, 0.3 + self.until))


def members(generations: Sequence[Mapping[str, Any]], steps: int) -> list[list[int]]:
    """The ranks that made each step: those of the last generation that began at it or before."""
    found: list[list[int]] = [[] for _ in range(steps)]
    for each in generations:
        for step in range(each["step"], steps):
            found[step] = list(each["ranks"])
    return found


def reference(trial: Trial, made_by: Sequence[Sequence[int]], folder: Path) -> Tensor:
    """The parameters after the steps that the ranks of `made_by` make, one after another."""
    setup = trial.setup
    inputs, targets = setup.job.train.inputs, setup.job.train.targets
    samplers = setup.job.samplers([BATCH] * setup.workers, seed=setup.config.seeded)
    samples = [[sampler.next() for _ in made_by] for sampler in samplers]
    module = model()
    nn.utils.vector_to_parameters(setup.model.replica.params.clone(), module.parameters())
    optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=MOMENTUM)
    for number, (ranks, group) in enumerate(itertools.groupby(enumerate(made_by), key=lambda each: tuple(each[1]))):
        groups = _ring(folder / f"store {number}", len(ranks))
        for step, _ in group:
            parts = []
            for rank in ranks:
                optimizer.zero_grad()
                rows = samples[rank][step]
                loss = ((module(inputs[rows]) - targets[rows]) ** 2).mean()
                (loss * (1 / len(ranks))).backward()
                parts.append(torch.cat([each.grad.flatten() for each in module.parameters()]))
            works = [each.allreduce([part]) for each, part in zip(groups, parts, strict=True)]
            for work in works:
                work.wait()
            at = 0
            for each in module.parameters():
                each.grad = parts[0][at : at + each.numel()].view_as(each).clone()
                at += each.numel()
            optimizer.step()
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def reference_of_rounds(trial: Trial, generations: Sequence[Mapping[str, Any]], steps: int, folder: Path) -> Tensor:
    """The model of `averaging` or `bmuf` after rounds in which the ranks of `generations` train alone."""
    setup, method, momentum = trial.setup, trial.setup.sync, getattr(trial.setup.sync, "momentum", 0.0)
    samplers = setup.job.samplers([BATCH] * setup.workers, seed=setup.config.seeded)
    samples = [[sampler.next() for _ in range(steps)] for sampler in samplers]
    start = setup.model.replica.params.clone()
    common, members, states = start.clone(), [*range(setup.workers)], dict[int, dict[str, Any]]()
    for begun in range(0, steps, method.period):
        formed = [each for each in generations if each["step"] == begun]
        made_by = {*members, *(rank for each in formed for rank in each["ranks"])}
        models = {rank: start.clone() for rank in made_by}
        for rank in made_by:
            rows = samples[rank][begun : begun + method.period]
            states[rank] = _train_alone(trial, models[rank], rows, states.get(rank))
        for each in formed:
            members = each["ranks"]
            (source, *_) = (rank for rank in members if rank not in each["copies"])
            for rank in each["copies"]:
                models[rank], states[rank] = models[source].clone(), copy.deepcopy(states[source])
        parts = [models[rank] * (1 / len(members)) for rank in members]
        groups = _ring(folder / f"store {begun}", len(members))
        for work in [group.allreduce([part]) for group, part in zip(groups, parts, strict=True)]:
            work.wait()
        before, common = common, parts[0]
        start = common + (common - before) * momentum
    return common


def _train_alone(trial: Trial, params: Tensor, rows: Sequence[Any], state: dict[str, Any] | None) -> dict[str, Any]:
    """Train flat `params` in place on mini-batches of these rows; return the state of the optimizer."""
    module, train = model(), trial.setup.job.train
    nn.utils.vector_to_parameters(params.clone(), module.parameters())
    optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=MOMENTUM)
    if state is not None:
        optimizer.load_state_dict(state)
    for each in rows:
        optimizer.zero_grad()
        ((module(train.inputs[each]) - train.targets[each]) ** 2).mean().backward()
        optimizer.step()
    params.copy_(nn.utils.parameters_to_vector(module.parameters()).detach())
    return optimizer.state_dict()


def _ring(path: Path, size: int) -> list[Any]:
    """Gloo groups of `size` members, all in this process."""
    found: dict[int, Any] = {}

    def connect(index: int) -> None:
        found[index] = dist.ProcessGroupGloo(dist.FileStore(str(path), -1), index, size, timedelta(seconds=60))

    threads = [Thread(target=connect, args=(index,)) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[index] for index in range(size)]
