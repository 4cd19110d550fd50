"""Timings on several processes are those of one process, in order."""

import pytest

from dure.job.job import load_job
from dure.planner import side_by_side
from dure.planner.deadline import NEVER, Deadline
from dure.planner.scene import Scene
from dure.planner.side_by_side import timings
from dure.planner.timing import Timing
from dure.runtime.virtual.cluster import Cluster

WANTED = [(0, "bsp"), (1, "bsp"), (0, "bsp 1f1b:stages=3,micro=3"), (1, "averaging:period=4")]


@pytest.fixture
def scenes():
    job = load_job("digits-mlp")
    return [Scene(job, Cluster.uniform(workers), 32) for workers in (2, 4)]


def test_processes_find_what_one_process_finds(scenes, monkeypatch):
    monkeypatch.setattr(side_by_side, "_cores", lambda: 2)
    apart = list(timings(scenes, WANTED, NEVER))
    monkeypatch.setattr(side_by_side, "_cores", lambda: 1)
    assert list(timings(scenes, WANTED, NEVER)) == apart
    assert [each for each, _ in apart] == WANTED
    assert [type(timing) for _, timing in apart] == [Timing, Timing, str, Timing]
    assert "3" in apart[2][1]


def test_nothing_is_timed_after_the_deadline(scenes):
    assert [timing for _, timing in timings(scenes, WANTED, Deadline(-1.0))] == [None] * 4
