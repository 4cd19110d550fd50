"""Curves of the engine's collectives in `dure probe`: seconds by the size of the tensor.

    rank 0 ── "collective" ──> every rank      barrier, collective, barrier, collective, ...
           <── seconds of each ──

A collective ends when its last rank has ended. Of each repetition the longest time of a rank counts, and of the
repetitions the median.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dure.core.cost import fit
from dure.runtime.virtual.cluster import Cluster
from dure.runtime.virtual.kernel import Kernel
from dure.runtime.virtual.network import Network

if TYPE_CHECKING:
    from dure.core.node import Group

KINDS = ("all_reduce", "all_gather", "broadcast")

SIZES = tuple(1 << power for power in range(10, 25, 2))
"""Sizes of a rank's tensor in bytes: 1 KiB to 16 MiB, up to the first that takes LONGEST."""

LONGEST = 0.1
"""If a collective takes more seconds, no larger one is measured; at least FEWEST sizes are measured."""

FEWEST = 3
REPEATS, SHORT_REPEATS = 7, 25
"""Number of repetitions of a collective, and of one with a tensor of at most SHORT bytes."""

SHORT = 1 << 16

Points = list[tuple[int, float]]
"""Bytes of a rank's tensor, and seconds."""


async def repeated(group: Group, kind: str, nbytes: int) -> list[float]:
    """Seconds of repeated collectives at this rank, each after a barrier; a first one is not counted."""
    tensor = torch.zeros(nbytes // 4)
    arguments = {"root": 0} if kind == "broadcast" else {}
    times = []
    for _ in range(1 + (SHORT_REPEATS if nbytes <= SHORT else REPEATS)):
        await group.barrier()
        began = time.perf_counter()
        await getattr(group, kind)(tensor, **arguments)
        times.append(time.perf_counter() - began)
    return times[1:]


async def curve(at_ranks: Callable[[int], Awaitable[Sequence[Sequence[float]]]]) -> Points:
    """The points of one kind of collective. `at_ranks` gives the seconds of each rank for a size."""
    points: Points = []
    for nbytes in SIZES:
        times = await at_ranks(nbytes)
        points.append((nbytes, statistics.median(map(max, zip(*times, strict=True)))))
        if len(points) >= FEWEST and points[-1][1] > LONGEST:
            break
    return points


def fitted(kind: str, points: Points, cluster: Cluster, ranks: int) -> dict[str, Any]:
    """A curve of so many ranks: its line, `start` + `byte` * bytes, its `residual`, and what `cluster` predicts."""
    line = fit(points)
    return {
        "ranks": ranks,
        "points": points,
        "start": line.start,
        "byte": line.slopes[0],
        "residual": line.residual,
        "predicted": [predicted(cluster, kind, nbytes, ranks) for nbytes, _ in points],
    }


def predicted(cluster: Cluster, kind: str, nbytes: int, ranks: int) -> float:
    """Seconds of a collective of the first `ranks` workers of `cluster` in virtual time."""
    places = {f"worker {worker}": worker for worker in range(cluster.workers)}
    network = Network(cluster, Kernel(), cluster.placed(places), np.random.default_rng(0))
    return network.cost(kind, nbytes, list(places)[:ranks]).seconds
