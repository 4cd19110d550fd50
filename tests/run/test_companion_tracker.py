"""Restarts of the companions of a run, in the driver's view."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.wording import raising

from dure.core.deployment import ACTOR, REPLAY, Deployment, NodeId, NodeSpec, WhenLost
from dure.core.node import Call
from dure.errors import DureError
from dure.run.failures import LIMIT
from dure.run.replacement import AGAIN_SECONDS, GONE_SECONDS
from dure.run.supervisor import CompanionTracker

KILLED, RAISED = -9, 1


@pytest.fixture
def tracker():
    nodes = [NodeSpec(NodeId(ACTOR, rank), None, WhenLost.GO_ON, 5.0 * (rank == 1)) for rank in range(2)]
    deployment = Deployment((*nodes, NodeSpec(NodeId(REPLAY, 0), None, WhenLost.ROLL_BACK)))
    return CompanionTracker(SimpleNamespace(deployment=deployment), lambda name: "the cause")


def report(tracker, name="actor 0", **figures):
    tracker.report(Call(name, "figures", {"figures": figures}, ()))


def fail(tracker, status, times=1, *, steps=None):
    for _ in range(times):
        tracker.begin("actor 0")
        if steps is not None:
            report(tracker, steps=next(steps))
        tracker.failed("actor 0", 0.0)
        assert tracker.due(1e6, {"actor 0": status})[0] == "actor 0"


def test_an_actor_is_started_again_once_its_process_has_ended(tracker):
    tracker.failed("actor 0", 1.0)
    assert tracker.due(2.0, {}) == []
    assert tracker.due(1.0 + AGAIN_SECONDS / 2, {"actor 0": KILLED}) == []
    assert tracker.due(2.0, {"actor 0": KILLED}) == ["actor 0"]
    assert tracker.due(3.0, {"actor 0": KILLED}) == []


def test_an_actor_counts_on_from_its_last_figures_and_a_replay_does_not(tracker):
    assert tracker.begin("actor 0") == {}
    report(tracker, steps=30)
    report(tracker, "replay 0", size=8)
    assert tracker.begin("actor 0") == {"steps": 30}
    assert tracker.begin("replay 0") == {}
    assert tracker.figures() == {"actor 0": {"steps": 30}, "replay 0": {"size": 8}}


def test_figures_of_a_checkpoint_are_counted_on_by_the_nodes_that_it_has_no_state_of(tracker):
    tracker.restore({"actor 0": {"steps": 30}, "replay 0": {"size": 8}})
    assert tracker.figures() == {"actor 0": {"steps": 30}}
    assert tracker.begin("actor 0") == {"steps": 30}


def test_an_actor_that_is_killed_while_it_makes_progress_is_always_started_again(tracker):
    fail(tracker, KILLED, 10 * LIMIT, steps=iter(range(1, 1000)))
    assert tracker.figures()["actor 0"]["steps"] == 10 * LIMIT


@pytest.mark.parametrize("status", [KILLED, RAISED])
def test_an_actor_that_fails_in_vain_is_started_again_a_few_times_and_then_ends_the_run(tracker, status):
    fail(tracker, status, LIMIT)
    with raising(DureError, "actor 0"):
        fail(tracker, status)


def test_errors_of_its_own_count_although_an_actor_makes_progress(tracker):
    fail(tracker, RAISED, LIMIT, steps=iter(range(1, 1000)))
    with raising(DureError, "actor 0"):
        fail(tracker, RAISED, steps=iter([1000]))


def test_each_failure_in_vain_doubles_the_time_until_the_next_start(tracker):
    fail(tracker, RAISED, 2)
    tracker.failed("actor 0", 10.0)
    exited = {"actor 0": RAISED}
    assert tracker.due(10.0 + 3.9 * AGAIN_SECONDS, exited) == []
    assert tracker.due(10.0 + 4.1 * AGAIN_SECONDS, exited) == ["actor 0"]


def test_an_actor_whose_exit_nobody_reports_ends_the_run_only_if_it_was_the_last(tracker):
    tracker.failed("actor 0", 0.0)
    assert tracker.due(100.0, {}) == ["actor 1"]
    tracker.failed("actor 1", 100.0)
    assert tracker.due(100.0 + GONE_SECONDS, {}) == []
    with raising(DureError, "actor 0"):
        tracker.due(101.0 + GONE_SECONDS, {})


def test_a_late_actor_is_started_once_when_it_is_due(tracker):
    assert tracker.due(4.9, {}) == []
    assert tracker.due(5.0, {}) == ["actor 1"]
    assert tracker.due(6.0, {}) == []
