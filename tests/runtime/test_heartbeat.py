"""Heartbeats in a pipe: a full pipe delays no process, and a number belongs to one incarnation."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import pytest

from dure.runtime.heartbeat import Beat, BeatPipe, Heartbeat, put


@pytest.fixture
def pipe() -> Iterator[BeatPipe]:
    with contextlib.closing(BeatPipe()) as one:
        yield one


def test_beats_arrive_in_order_with_the_name_of_their_number(pipe: BeatPipe) -> None:
    first, second = pipe.admit("worker 0"), pipe.admit("server 0")
    put(pipe.sink, first, 7, False)
    put(pipe.sink, second, 0, True)
    assert [*pipe.received()] == [Beat("worker 0", 7, False), Beat("server 0", 0, True)]
    assert [*pipe.received()] == []


def test_a_beat_of_an_earlier_incarnation_is_ignored(pipe: BeatPipe) -> None:
    earlier = pipe.admit("worker 0")
    now = pipe.admit("worker 0")
    put(pipe.sink, earlier, 3, False)
    put(pipe.sink, now, 4, False)
    assert [*pipe.received()] == [Beat("worker 0", 4, False)]


def test_a_full_pipe_delays_no_process_and_hides_none(pipe: BeatPipe) -> None:
    """The launcher was stopped for long: beats of all processes are in the pipe, and later ones are dropped."""
    numbers = {name: pipe.admit(name) for name in ("worker 0", "worker 1")}
    began = time.monotonic()
    for clock in range(10_000):
        for number in numbers.values():
            put(pipe.sink, number, clock, False)
    assert time.monotonic() - began < 5.0, "a process waited for the reader"
    assert {beat.name for beat in pipe.received()} == numbers.keys()
    put(pipe.sink, numbers["worker 1"], 20_000, False)
    assert [*pipe.received()] == [Beat("worker 1", 20_000, False)]


def test_a_process_whose_launcher_has_ended_goes_on(pipe: BeatPipe) -> None:
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), pipe.source)  # the only reader is gone
    put(pipe.sink, 0, 0, False)


def test_a_heartbeat_repeats_within_its_period(pipe: BeatPipe) -> None:
    number = pipe.admit("worker 0")
    beating = Heartbeat(lambda clock, waiting: put(pipe.sink, number, clock, waiting), lambda: (5, True), 0.01)
    deadline = time.monotonic() + 5.0
    heard: list[Beat] = []
    while len(heard) < 3 and time.monotonic() < deadline:
        heard += pipe.received()
    beating.stop()
    assert heard[:3] == [Beat("worker 0", 5, True)] * 3
    heard = [*pipe.received()]
    time.sleep(0.05)
    assert [*pipe.received()] == []
