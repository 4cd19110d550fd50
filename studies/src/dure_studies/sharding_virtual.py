"""Seconds of a step over parameter servers in virtual time: workers on hosts of their own, or two behind one card.

A step of a worker computes for a given mean time and varies by `VARIATION`. Without variation, the messages of
asynchronous workers repeat one order and never overlap, and the order depends on the last digits of the compute time.
Servers have machines of their own.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import mse_loss

from dure.job.data.dataset import Data
from dure.job.job import Job
from dure.run.train import train
from dure.runtime.virtual.cluster import Cluster, Link, Machines
from dure.runtime.virtual.compute import LogNormal
from dure_studies.output import Row

SYNCS = {"bsp": "bsp", "downpour": "downpour:at_once=true"}
"""Synchronous servers, and servers that answer each worker at once."""

HOSTS = {"separate": 1, "paired": 2}
"""Workers behind one network card."""

STEPS = 24

SEEDS = {"bsp": 1, "downpour": 3}
"""Runs of which the mean is taken: messages of asynchronous workers come to a server together by chance."""

VARIATION = 0.1
"""Standard deviation of the logarithm of a step's compute time."""

BANDWIDTH = 1.25e9
"""Bytes per second in each direction of a card: 10 Gbit/s."""

WORKERS = 8
SERVERS = (1, 2, 4, 8)

EQUAL_LAYERS, WIDTH = 32, 2080
"""Layers of the model of equal layers, and the units of each: as many parameters as VGG-16, within 0.1 %."""


def cluster(workers: int, hosts: str, compute: float, *, scale: float = 1.0, applies: bool = True) -> Cluster:
    """Workers with cards of `BANDWIDTH`. A step computes for `compute` seconds on average.

    `scale` is the size of the model relative to the original: cards, cores and servers move bytes as many times slower.
    If not `applies`, the work of servers takes no time.
    """
    each = min(HOSTS[hosts], workers)
    kind = Machines(count=workers // each, workers=each, compute=LogNormal(seconds=compute, sigma=VARIATION))
    card = Link(bandwidth=BANDWIDTH * scale)
    usual = Cluster()
    gamma = usual.gamma / scale if applies else 0.0
    return Cluster(machines=(kind,), link=card, beta=usual.beta / scale, gamma=gamma)


@dataclass(frozen=True)
class Course:
    """Training of `job` without values: `sync` and `hosts` are keys of `SYNCS` and `HOSTS`."""

    job: Job
    sync: str
    hosts: str
    compute: float

    def seconds(self, workers: int, servers: int, by: str) -> float:
        """Virtual seconds of a step."""
        return mean_seconds(self.summaries(workers, servers, by))

    def summaries(self, workers: int, servers: int, by: str, *, applies: bool = True) -> list[Row]:
        """The summaries of runs of `STEPS` steps; if not `applies`, the work of servers takes no time."""
        _ = self.job.flops_per_sample  # counted here once, as each run would count it again
        return [self._summary(seed, workers, servers, by, applies=applies) for seed in range(SEEDS[self.sync])]

    def _summary(self, seed: int, workers: int, servers: int, by: str, *, applies: bool) -> Row:

        strategy = f"{SYNCS[self.sync]} ps:shards={servers},split={by}"
        on = cluster(workers, self.hosts, self.compute, applies=applies)
        return train(self.job, strategy=strategy, on=on, steps=STEPS, timing_only=True, seed=seed).summary()


def mean_seconds(summaries: Sequence[Row]) -> float:
    """Seconds of a step."""
    return float(statistics.mean(each["seconds"] for each in summaries)) / STEPS


def rows_by_servers(jobs: dict[str, Job], sync: str, hosts: str, compute: float) -> list[Row]:
    """Rows of `WORKERS` workers with 1 to 8 servers, for each of `jobs` by name.

    Of each cut, `seconds` is the time of a step, `seconds_without_updates` that if the work of servers takes no time,
    and `card_bytes` the bytes that the card of each server carries in a step of all workers, in both directions.
    """
    return [
        {
            "model": model,
            "sync": sync,
            "hosts": hosts,
            "workers": WORKERS,
            "servers": servers,
            "compute_seconds": compute,
            **{by: _figures(Course(job, sync, hosts, compute), servers, by) for by in ("layer", "memory")},
        }
        for model, job in jobs.items()
        for servers in SERVERS
    ]


def _figures(course: Course, servers: int, by: str) -> Row:
    whole, free = (course.summaries(WORKERS, servers, by, applies=applies) for applies in (True, False))
    shards = (whole[0]["per_shard"][f"server {number}"] for number in range(servers))  # equal for all seeds
    return {
        "seconds": mean_seconds(whole),
        "seconds_without_updates": mean_seconds(free),
        "card_bytes": [(shard["bytes_sent"] + shard["bytes_received"]) / STEPS for shard in shards],
    }


def equal_layers(count: int = EQUAL_LAYERS, width: int = WIDTH, batch_size: int = 32) -> Job:
    """Dense layers of equal size, with shapes but no values."""

    def model() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(width, width, bias=False, device="meta") for _ in range(count)))

    nothing = torch.empty(batch_size, width, device="meta")
    return Job(name="equal layers", model=model, loss=mse_loss, train=Data(nothing, nothing), batch_size=batch_size)
