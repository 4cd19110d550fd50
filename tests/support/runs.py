"""Runs whose final parameters a test can see, and jobs whose arithmetic is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dure.job.data.dataset import Data
from dure.job.job import Job
from dure.job.optimizer import OptimizerSpec
from dure.report.run import Run
from dure.run.checkpoint import Parts
from dure.run.config import TrainConfig
from dure.run.launchers.local import run_processes
from dure.run.outcome import Outcome, summary
from dure.run.prebuilt import Callbacks, Prebuilt
from dure.run.resolve import resolve
from dure.run.resume import resumed as resumed_config
from dure.run.setup import Setup
from dure.run.train import run
from dure.run.virtual import VirtualRun
from dure.runtime.launch.fork_server import ForkServer
from dure.runtime.virtual.cluster import Cluster


@dataclass
class Finished:
    """A run that is over: `params` are what it delivered, `rows` its history."""

    setup: Setup
    outcome: Outcome
    rows: list[dict[str, Any]]
    states: list[tuple[int, Parts]] = field(default_factory=list)

    @property
    def params(self) -> Tensor:
        assert self.outcome.params is not None
        return self.outcome.params

    @property
    def summary(self) -> dict[str, Any]:
        return summary(self.setup, self.outcome, "virtual")

    @property
    def seconds(self) -> float:
        return self.outcome.totals.seconds


def resolved(job: str | Job, strategy: str, cluster: Cluster | None = None, **options: Any) -> tuple[Setup, Any]:
    config = TrainConfig(job=job if isinstance(job, str) else "given", strategy=strategy, **options)
    return resolve(config, Prebuilt(job=None if isinstance(job, str) else job, cluster=cluster))


def virtual(job: str | Job, strategy: str, cluster: Cluster | None = None, **options: Any) -> Finished:
    """A run in virtual time, without a folder."""
    setup, cluster = resolved(job, strategy, cluster, on="virtual", **{"eval_every": 1000} | options)
    assert cluster is not None
    rows: list[dict[str, Any]] = []
    return Finished(setup, VirtualRun(setup, cluster, Callbacks(row=rows.append)).run(), rows)


def local(job: str, strategy: str, *, fork_server: ForkServer | None = None, **options: Any) -> Finished:
    """A run on processes of this machine, without a folder."""
    setup, _ = resolved(job, strategy, on="local", **{"eval_every": 1000} | options)
    rows: list[dict[str, Any]] = []
    callbacks = Callbacks(row=rows.append)
    return Finished(setup, run_processes(setup, callbacks, None, None, fork_server=fork_server), rows)


def recorded(job: str, strategy: str, fork_server: ForkServer, **options: Any) -> Run:
    """What `dure.train` does on processes of this machine, with a fork server that serves other runs too."""
    return run(TrainConfig(job=job, strategy=strategy, on="local", **options), Prebuilt(fork_server=fork_server))


def resume_local(folder: Path, fork_server: ForkServer | None = None) -> Finished:
    """The run in `folder`, from its last checkpoint on processes of this machine to its end."""
    setup, _ = resolve(resumed_config(TrainConfig(resume=folder)))
    rows: list[dict[str, Any]] = []
    place = folder / "checkpoints"
    callbacks = Callbacks(row=rows.append)
    return Finished(setup, run_processes(setup, callbacks, place, place, fork_server=fork_server), rows)


class Bowls(nn.Module):
    """A point w that starts at `start`; each sample is a pair (a, b) of its own for f(w) = 1/2 a w^2 - b w."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.tensor([start], dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        a, b = inputs.unbind(dim=1)
        return 0.5 * a * self.place * self.place - b * self.place


def mean_output(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean()


def bowls(pairs: Sequence[tuple[float, float]], *, lr: float, start: float = 0.0) -> Job:
    """One sample (a, b) per worker, whose gradient a w - b is exact."""
    inputs = torch.tensor(pairs, dtype=torch.float64)
    return Job(
        name="bowls",
        model=partial(Bowls, start),
        loss=mean_output,
        train=Data(inputs, torch.zeros(len(pairs), dtype=torch.float64)),
        batch_size=1,
        optimizer=OptimizerSpec(lr=lr),
        split=Fixed(),
    )


class Fixed:
    """Worker k's data are the k-th part of the samples, in order."""

    def samplers(self, targets: Tensor, batch_sizes: Sequence[int], *, seed: int) -> list[Any]:
        parts = torch.arange(len(targets)).tensor_split(len(batch_sizes))
        return [Cycle(part, size) for part, size in zip(parts, batch_sizes, strict=True)]


class Cycle:
    """The same indices over and over."""

    def __init__(self, indices: Tensor, batch_size: int) -> None:
        self.indices, self.batch_size, self.position = indices, batch_size, 0

    def next(self) -> Tensor:
        taken = (torch.arange(self.batch_size) + self.position) % len(self.indices)
        self.position += self.batch_size
        return self.indices[taken]

    @property
    def number(self) -> int:
        return self.position // self.batch_size

    @number.setter
    def number(self, number: int) -> None:
        self.position = number * self.batch_size

    def state(self) -> dict[str, int]:
        return {"position": self.position}

    def restore(self, state: dict[str, int]) -> None:
        self.position = state["position"]
