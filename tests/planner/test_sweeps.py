"""Sweeps as values: each number at its place, also where a strategy does not work."""

from __future__ import annotations

from dure.job.job import load_job
from dure.partition.memory import MemoryUse
from dure.planner.candidates import Scene
from dure.planner.ranking import Ranked
from dure.planner.side_by_side import Deadline
from dure.planner.sweeps import Sweep, sweeps
from dure.planner.timing import Timing
from dure.runtime.virtual.cluster import Cluster


def row(name: str, seconds: float, speed: float) -> Ranked:
    """A strategy that needs a machine for servers beside three for workers, and 1.5 times the samples."""
    memory = MemoryUse(400, 400, 0, 0, 0)
    return Ranked(name, Timing(seconds, speed, 0.0, 0.0, {"compute": 1.0}, memory, 10, 3, 3, 1), 1.5)


def test_strategies_keep_their_places_where_others_do_not_work() -> None:
    sweep = Sweep("workers", 4.0)
    sweep.add(8.0, [row("bsp", 0.5, 400.0), row("downpour ps", 0.25, 800.0)])
    sweep.add(2.0, [row("bsp", 2.0, 100.0), None])
    sweep.add(16.0, [None, None])
    sweep.add(4.0, [None, row("downpour ps", 0.75, 300.0)])
    assert sweep.values() == {
        "unit": "workers",
        "now": 4.0,
        "at": [2.0, 4.0, 8.0, 16.0],
        "samples_per_second": {"bsp": [100.0, None, 400.0, None], "downpour ps": [None, 300.0, 800.0, None]},
        "seconds_per_step": {"bsp": [2.0, None, 0.5, None], "downpour ps": [None, 0.75, 0.25, None]},
        "score": {"bsp": [50.0, None, 200.0, None], "downpour ps": [None, 150.0, 400.0, None]},
    }
    assert sweep.winners() == ["bsp", "downpour ps", "downpour ps", None]


def test_a_sweep_has_no_point_whose_timings_had_no_time() -> None:
    found = sweeps(Scene(load_job("digits-mlp"), Cluster.uniform(2), 64), ["bsp"], Deadline(-1.0))
    assert [sweep.values()["at"] for sweep in found.values()] == [[], [], []]
