"""Who is late, and until when one waits."""

from __future__ import annotations

import math

import pytest

from dure.topology.parameter_server.clock import ProgressMonitor


class Time:
    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


def paced(pace, steps=5):
    """Workers that have made `steps` steps of `pace` seconds each, and begin another at the same moment."""
    time = Time()
    patience = ProgressMonitor(time, seconds=5.0)
    for worker, seconds in pace.items():
        time.seconds = 100.0 - seconds * steps
        patience.begin(worker)
        for _ in range(steps):
            time.seconds += seconds
            patience.step(worker)
    time.seconds = 100.0
    return time, patience


@pytest.mark.parametrize(("pace", "limit"), [(0.1, 5.0), (0.5, 5.0), (0.7, 7.0), (3.0, 30.0)])
def test_a_worker_is_late_after_five_seconds_or_ten_of_its_steps(pace, limit):
    time, patience = paced({0: pace, 1: 0.01})
    assert math.isclose(patience.wait([0]), 5.0)
    time.seconds = 100.0 + limit - 0.001
    assert patience.late([0]) == []
    time.seconds = 100.0 + limit + 0.001
    assert patience.late([0]) == [0]
    assert patience.wait([0]) == 0.0


def test_one_slow_step_does_not_make_a_worker_slow():
    time, patience = paced({0: 0.1})
    time.seconds += 60.0
    patience.step(0)
    time.seconds += 5.001
    assert patience.late([0]) == [0]


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_worker_of_few_steps_is_given_ten_times_as_long_as_the_slowest(steps):
    time, patience = paced({0: 0.1, 1: 2.0})
    patience.begin(2)
    for _ in range(steps):
        patience.step(2)
    time.seconds += 199.0
    assert patience.late([2]) == []
    time.seconds += 2.0
    assert patience.late([2]) == [2]


def test_nobody_is_late_before_anybody_has_made_a_step():
    time = Time()
    patience = ProgressMonitor(time, seconds=5.0)
    patience.begin(0)
    time.seconds = 1e6
    assert patience.late([0, 1]) == []
    assert patience.wait([0, 1]) == 5.0


def test_a_step_counts_from_when_it_was_allowed_to_start():
    time, patience = paced({0: 0.1})
    time.seconds += 4.9  # it waited for others
    patience.begin(0)
    time.seconds += 4.9
    assert patience.late([0]) == []


def test_time_in_which_we_stood_still_ourselves_counts_against_nobody():
    time, patience = paced({0: 0.1, 1: 0.1})
    time.seconds += 60.0
    patience.begin_again()
    assert patience.late([0, 1]) == []
    time.seconds += 5.001
    assert patience.late([0, 1]) == [0, 1]


def test_a_worker_whose_machine_does_not_answer_is_not_late():
    time, patience = paced({0: 0.1, 1: 0.1})
    down = {0}
    patience.reaches = lambda worker: worker not in down
    time.seconds += 5.001
    assert patience.late([0, 1]) == [1]
    time.seconds += 5.001
    assert patience.late([0]) == []
    down.clear()
    time.seconds += 4.9
    assert patience.late([0]) == []
    time.seconds += 0.2
    assert patience.late([0]) == [0]
