"""Runs whose workers start at places of their own, and whose models a test can see afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from support.runs import bowls, resolved

from dure.run.prebuilt import Callbacks
from dure.run.strategy import Strategy
from dure.run.virtual import VirtualRun, VirtualSegment
from dure.runtime.virtual.cluster import Cluster


@dataclass(frozen=True)
class Scattered:
    """A method whose workers begin at `starts`; in all else it is `method`."""

    method: Any
    starts: Any

    @property
    def traits(self) -> Any:
        return self.method.traits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.method, name)

    async def work(self, worker: Any) -> None:
        if not worker.over_servers:
            worker.keep("center").copy_(worker.params)
        worker.params.fill_(self.starts[worker.rank])
        await self.method.work(worker)


def scattered(
    strategy: str,
    starts: Sequence[float],
    cluster: Cluster,
    *,
    steps: int,
    lr: float = 0.0,
    curvature: float = 1.0,
    place: float = 0.0,
    seed: int = 0,
) -> tuple[float, list[float], VirtualSegment]:
    """What is delivered, every worker's model, and the segment: on curvature / 2 w^2, the center at `place`."""
    job = bowls([(curvature, 0.0)] * len(starts), lr=lr, start=place)
    setup, _ = resolved(job, strategy, cluster, on="virtual", steps=steps, eval_every=1000, seed=seed)
    moved = Strategy(Scattered(setup.sync, starts), setup.strategy.topology)  # type: ignore[arg-type]
    object.__setattr__(setup, "strategy", moved)
    segment = VirtualSegment(VirtualRun(setup, cluster, Callbacks()), None)
    segment.run()
    models = [float(segment.workers[rank].params) for rank in range(len(starts))]
    return float(segment.delivered()), models, segment


def total(center: float, models: Sequence[float]) -> float:
    return center + float(torch.tensor(models, dtype=torch.float64).sum())
