"""Timings on several processes are those of one process, in order."""

import math
import os
import signal
import time
from pathlib import Path

import pytest

from dure.job.job import load_job
from dure.planner import side_by_side
from dure.planner.candidates import Scene
from dure.planner.side_by_side import Deadline, timings
from dure.planner.timing import Timing
from dure.runtime.virtual.cluster import Cluster

WANTED = [(0, "bsp"), (1, "bsp"), (0, "bsp 1f1b:stages=3,micro=3"), (1, "averaging:period=4")]


@pytest.fixture
def scenes():
    job = load_job("digits-mlp")
    return [Scene(job, Cluster.uniform(workers), 32) for workers in (2, 4)]


def test_processes_find_what_one_process_finds(scenes, monkeypatch):
    monkeypatch.setattr(side_by_side, "usable_processors", lambda: 2)
    apart = list(timings(scenes, WANTED, Deadline(math.inf)))
    monkeypatch.setattr(side_by_side, "usable_processors", lambda: 1)
    assert list(timings(scenes, WANTED, Deadline(math.inf))) == apart
    assert [each for each, _ in apart] == WANTED
    assert [type(timing) for _, timing in apart] == [Timing, Timing, str, Timing]
    assert "3" in apart[2][1]


def test_nothing_is_timed_after_the_deadline(scenes):
    assert [timing for _, timing in timings(scenes, WANTED, Deadline(-1.0))] == [0.0] * 4


@pytest.mark.long
def test_a_timing_under_way_ends_at_the_deadline(scenes, monkeypatch):
    """It has reached no bound, and those behind it have none; a timing that has ended counts."""

    def slow(scenes, wanted, began):
        if wanted[1] != "bsp":
            time.sleep(600)
        return "no"

    monkeypatch.setattr(side_by_side, "usable_processors", lambda: 2)
    monkeypatch.setattr(side_by_side, "_timed", slow)
    found = list(timings(scenes, WANTED, Deadline(2.0)))
    assert [timing for _, timing in found][2:] == [0.0, 0.0]
    assert {timing for _, timing in found[:2]} == {"no"}


def test_a_timing_that_takes_more_than_its_share_gives_way_to_the_others_and_leaves_its_bound(scenes, monkeypatch):
    def slow(scenes, wanted, began):
        if wanted == WANTED[0]:
            began(lambda: 3.5)
            time.sleep(600)
        return wanted[1]

    monkeypatch.setattr(side_by_side, "usable_processors", lambda: 1)
    monkeypatch.setattr(side_by_side, "_timed", slow)
    found = [timing for _, timing in timings(scenes, WANTED, Deadline(60.0), share=0.005)]
    assert found == [3.5, *(strategy for _, strategy in WANTED[1:])]


def test_a_process_that_is_killed_costs_only_its_own_timing(scenes, monkeypatch):
    def dying(scenes, wanted, began):
        if wanted == WANTED[1]:
            os.kill(os.getpid(), signal.SIGKILL)
        return wanted[1]

    monkeypatch.setattr(side_by_side, "usable_processors", lambda: 2)
    monkeypatch.setattr(side_by_side, "_timed", dying)
    found = [timing for _, timing in timings(scenes, WANTED, Deadline(math.inf))]
    assert "ended with exit code -9" in found[1]
    assert [found[0], *found[2:]] == [strategy for _, strategy in (WANTED[0], *WANTED[2:])]


def test_processes_end_with_the_one_that_has_made_them(scenes, monkeypatch, tmp_path):
    """A kill leaves it no time to end them; what they time ends first."""
    pids = tmp_path / "pids"

    def telling(scenes, wanted, began):
        with pids.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return wanted[1]

    monkeypatch.setattr(side_by_side, "usable_processors", lambda: 2)
    monkeypatch.setattr(side_by_side, "_timed", telling)
    parent = os.fork()
    if not parent:
        for number, _ in enumerate(timings(scenes, WANTED, Deadline(math.inf))):
            if number == 2:
                os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(parent, 0)
    ends = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids.read_text().split()):
        assert time.monotonic() < ends, "a process waits for ever"
        time.sleep(0.05)


def test_figures_that_processes_measure_are_known_to_later_ones(scenes, monkeypatch):
    monkeypatch.setattr(side_by_side, "usable_processors", lambda: 2)
    assert not scenes[0].model.replica.figures
    list(timings(scenes, [(0, "bsp 1f1b:stages=2,micro=4")] * 2, Deadline(math.inf)))
    assert scenes[0].model.replica.figures


def test_processes_that_end_before_they_have_begun_print_nothing(scenes, monkeypatch, capfd):
    def answer(number, frame):
        raise KeyboardInterrupt

    monkeypatch.setattr(side_by_side, "usable_processors", lambda: 8)
    before = signal.signal(signal.SIGTERM, answer)
    try:
        for _ in range(2):
            assert [found for _, found in timings(scenes, WANTED * 2, Deadline(-1.0))] == [0.0] * 8
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not capfd.readouterr().err
