"""Sweeps of a plan: the speed of a few strategies over variants of a cluster and over batches."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dure.planner.candidates import Scene
from dure.planner.ranking import Ranked, in_order, ranked
from dure.planner.side_by_side import Deadline, Result, timings
from dure.planner.timing import Timing
from dure.runtime.virtual.accelerators import InsideLink
from dure.runtime.virtual.cluster import Cluster, Link
from dure.runtime.virtual.compute import Compute, Constant, LogNormal, Trace
from dure.runtime.virtual.fabric import SiteLine

L = TypeVar("L", Link, InsideLink, SiteLine)

SIGMA = 0.5
"""Spread of the durations of steps in a cluster with stragglers."""


def with_bandwidth(cluster: Cluster, factor: float) -> Cluster:
    """`cluster` with the bandwidths of all links between machines multiplied by `factor`."""
    return _with_links(cluster, factor)


def with_free_network(cluster: Cluster) -> Cluster:
    """`cluster` in which messages take almost no time; on one host, a synchronization costs no core."""
    near = {"factor": 1e6, "latency": 0.0}
    host = cluster.host
    if host is not None:
        free = host.all_reduce.changed(start=0.0, byte=0.0)
        host = host.changed(all_reduce=free, gradient=free)
    cards = {"transport": "rdma", "flow": None, "hop": 0.0}  # a flow of TCP is never without a limit
    kinds = tuple(
        kind.changed(inside=kind.inside and _scaled(kind.inside, **near), card=kind.card and kind.card.changed(**cards))
        for kind in cluster.machines
    )
    rest = {
        "machines": kinds,
        "inside": _scaled(cluster.inside, **near),
        "racks": cluster.racks and cluster.racks.changed(latency=0.0),
        **({"card": cluster.card.changed(**cards)} if cluster.accelerated else {}),
    }
    return _with_links(cluster.changed(**rest, host=host, alpha=0.0, beta=0.0), **near)


def with_equal_workers(cluster: Cluster) -> Cluster:
    """`cluster` whose workers all have the mean speed, and steps of constant duration."""
    speeds = [cluster.durations(worker, 0).speed for worker in range(cluster.workers)]
    mean = sum(speeds) / len(speeds)
    kinds = [kind.changed(speed=mean, compute=Constant(**_common(kind.compute))) for kind in cluster.machines]
    return cluster.changed(machines=tuple(kinds), events=())


def with_stragglers(cluster: Cluster) -> Cluster:
    """`cluster` whose steps have log-normal durations of the same means."""
    kinds = [kind.changed(compute=LogNormal(sigma=SIGMA, **_common(kind.compute))) for kind in cluster.machines]
    return cluster.changed(machines=tuple(kinds))


def of_workers(cluster: Cluster, workers: int) -> Cluster | None:
    """`cluster` with another number of workers.

    None if its machines are of several kinds or at several sites, or one would be in part.
    """
    kind = cluster.machines[0]
    if len(cluster.machines) > 1 or isinstance(kind.speed, tuple) or cluster.events or cluster.sites:
        return None
    if kind.count == 1 and kind.workers > 1:
        return cluster.changed(machines=(kind.with_workers(workers),))
    if workers % kind.workers:
        return None
    return cluster.changed(machines=(kind.changed(count=workers // kind.workers),))


def without_limits(cluster: Cluster) -> Cluster:
    """`cluster` whose workers have memory without limit."""
    return cluster.changed(machines=tuple(kind.changed(memory=None) for kind in cluster.machines))


def _with_links(cluster: Cluster, factor: float, **rest: float) -> Cluster:
    kinds = tuple(kind.changed(link=kind.link and _scaled(kind.link, factor, **rest)) for kind in cluster.machines)
    servers = cluster.servers.changed(link=cluster.servers.link and _scaled(cluster.servers.link, factor, **rest))
    between: SiteLine | tuple[SiteLine, ...] | None = cluster.between
    if isinstance(between, tuple):
        between = tuple(_scaled(line, factor, **rest) for line in between)
    elif between is not None:
        between = _scaled(between, factor, **rest)
    return cluster.changed(machines=kinds, servers=servers, link=_scaled(cluster.link, factor, **rest), between=between)


def _scaled(link: L, factor: float, **rest: float) -> L:
    return link.changed(bandwidth=link.bandwidth * factor, **rest)


def _common(compute: Compute) -> dict[str, Any]:
    """The values that all distributions have; of a trace its mean."""
    found = {name: getattr(compute, name) for name in ("seconds", "flops", "flops_per_second", "overhead", "call")}
    return found | {"seconds": compute.mean(0.0)} if isinstance(compute, Trace) else found


FACTORS_OF_BANDWIDTH = tuple(4.0**power for power in range(-4, 5))

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Factors of the number of workers, and of the samples of a step."""


@dataclass(slots=True)
class Sweep:
    """Strategies at each value of `at`; None where a strategy does not work. `now` is the value of the scene.

    `wanted` counts the values that are timed if time suffices.
    """

    unit: str
    now: float
    wanted: int = 1
    at: list[float] = field(default_factory=list)
    rows: list[list[Ranked | None]] = field(default_factory=list)

    def add(self, value: float, rows: list[Ranked | None]) -> None:
        """Add the strategies at a value; values are in ascending order."""
        place = bisect.bisect(self.at, value)
        self.at.insert(place, value)
        self.rows.insert(place, rows)

    def values(self) -> dict[str, object]:
        """The sweep as plain values."""
        names = list(dict.fromkeys(row.strategy for rows in self.rows for row in rows if row is not None))
        speeds: dict[str, list[float | None]] = {name: [] for name in names}
        seconds: dict[str, list[float | None]] = {name: [] for name in names}
        scores: dict[str, list[float | None]] = {name: [] for name in names}
        for rows in self.rows:
            here = {row.strategy: row for row in rows if row is not None}
            for name in names:
                row = here.get(name)
                speeds[name].append(None if row is None else row.timing.samples_per_second)
                seconds[name].append(None if row is None else row.timing.seconds)
                scores[name].append(None if row is None else row.score)
        return {
            "unit": self.unit,
            "now": self.now,
            "at": self.at,
            "samples_per_second": speeds,
            "seconds_per_step": seconds,
            "score": scores,
        }

    def winners(self) -> list[str | None]:
        """The winner at each value; None where no strategy works."""
        found = []
        for rows in self.rows:
            ordered = in_order([row for row in rows if row is not None])
            found.append(ordered[0].strategy if ordered else None)
        return found


def sweeps(scene: Scene, strategies: Sequence[str], deadline: Deadline) -> dict[str, Sweep]:
    """Sweeps of bandwidth, workers and batch around `scene`, the nearest values first, until the deadline."""
    cluster, bandwidth = scene.cluster, scene.cluster.link.bandwidth
    factors = FACTORS_OF_BANDWIDTH if sum(kind.count for kind in cluster.machines) > 1 else (1.0,)
    points = {
        "bandwidth": {each * bandwidth: scene.on(with_bandwidth(cluster, each)) for each in factors},
        "workers": {
            float(count): other
            for count in _times(FACTORS, scene.workers)
            if count > 1 and (other := _of_workers(scene, count))
        },
        "batch": {float(count): scene.of(count) for count in _times(FACTORS, scene.batch)},
    }
    swept = {
        "bandwidth": Sweep("bytes per second", bandwidth, len(points["bandwidth"])),
        "workers": Sweep("workers", scene.workers, len(points["workers"])),
        "batch": Sweep("samples per step", scene.batch, len(points["batch"])),
    }
    nearest = sorted(
        ((name, value) for name, at in points.items() for value in at),
        key=lambda point: abs(math.log(point[1] / swept[point[0]].now)),
    )
    scenes = [points[name][value] for name, value in nearest]
    wanted = [(number, strategy) for number in range(len(scenes)) for strategy in strategies]
    found = dict(timings(scenes, wanted, deadline))
    for number, (name, value) in enumerate(nearest):
        timed = [(strategy, found[number, strategy]) for strategy in strategies]
        if not any(isinstance(timing, float) for _, timing in timed):  # whose time was over
            swept[name].add(value, [_ranked(strategy, timing, scenes[number]) for strategy, timing in timed])
    return swept


def _ranked(strategy: str, timing: Result, scene: Scene) -> Ranked | None:
    return ranked(strategy, timing, scene) if isinstance(timing, Timing) else None


def _times(factors: Sequence[float], number: int) -> list[int]:
    products = [round(factor * number) for factor in factors]
    return list(dict.fromkeys(product for product in products if product >= 1))


def _of_workers(scene: Scene, workers: int) -> Scene | None:
    cluster = of_workers(scene.cluster, workers)
    return None if cluster is None else scene.on(cluster)
