"""Sweeps of a plan: the speed of a few strategies over bandwidths, numbers of workers and batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dure.errors import DureError
from dure.planner.deadline import Deadline
from dure.planner.ranking import Ranked, in_order, ranked
from dure.planner.scene import Scene
from dure.planner.timing import timed
from dure.planner.variants import of_workers, with_bandwidth

BANDWIDTHS = tuple(4.0**power for power in range(-4, 5))
"""Factors of the bandwidth."""

WORKERS = (0.25, 0.5, 1.0, 2.0, 4.0)
BATCHES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Factors of the number of workers, and of the samples of a step."""


@dataclass(slots=True)
class Sweep:
    """Strategies at each value of `at`; None where a strategy does not work. `now` is the value of the scene."""

    unit: str
    now: float
    at: list[float] = field(default_factory=list)
    rows: list[list[Ranked | None]] = field(default_factory=list)

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
    """Sweeps of bandwidth, workers and batch around `scene`, until the deadline."""
    bandwidth = scene.cluster.link.bandwidth
    at: Mapping[str, tuple[str, float, Sequence[tuple[float, Scene | None]]]] = {
        "bandwidth": (
            "bytes per second",
            bandwidth,
            [(factor * bandwidth, scene.on(with_bandwidth(scene.cluster, factor))) for factor in BANDWIDTHS],
        ),
        "workers": ("workers", scene.workers, [_of_workers(scene, factor) for factor in WORKERS]),
        "batch": (
            "samples per step",
            scene.batch,
            [(factor * scene.batch, scene.of(round(factor * scene.batch))) for factor in BATCHES],
        ),
    }
    return {name: _swept(unit, now, points, strategies, deadline) for name, (unit, now, points) in at.items()}


def _of_workers(scene: Scene, factor: float) -> tuple[float, Scene | None]:
    workers = round(factor * scene.workers)
    cluster = of_workers(scene.cluster, workers) if workers >= 1 else None
    return float(workers), None if cluster is None else scene.on(cluster)


def _swept(
    unit: str, now: float, points: Sequence[tuple[float, Scene | None]], strategies: Sequence[str], deadline: Deadline
) -> Sweep:
    sweep = Sweep(unit, now)
    for value, scene in points:
        if scene is not None and (value == now or not deadline.over):
            sweep.at.append(value)
            sweep.rows.append([_timed(scene, strategy) for strategy in strategies])
    return sweep


def _timed(scene: Scene, strategy: str) -> Ranked | None:
    try:
        return ranked(strategy, timed(scene, strategy), scene.batch)
    except DureError:
        return None
