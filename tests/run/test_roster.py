"""The states of a run's processes."""

from __future__ import annotations

import pytest

from dure.core.deployment import SERVER, WORKER, Deployment, NodeId, NodeSpec
from dure.run.roster import ProcessRoster


@pytest.fixture
def roster():
    nodes = [NodeSpec(NodeId(SERVER, 0)), *(NodeSpec(NodeId(WORKER, rank)) for rank in range(12))]
    return ProcessRoster(Deployment(tuple(nodes)), absent=[11])


def test_an_absent_worker_is_expected_once_it_is_admitted(roster):
    assert roster.is_over("worker 11")
    assert roster.admit("worker 11") == 0
    assert "worker 11" in roster.living()
    assert not roster.is_over("worker 11")


def test_living_workers_are_neither_failed_nor_evicted_nor_finished(roster):
    roster.failed["worker 0"] = roster.evicted["worker 1"] = "reason"
    roster.finished["worker 2"] = {}
    assert roster.living() == {f"worker {rank}" for rank in range(3, 11)}
    assert roster.first_living == "worker 3"


def test_the_first_living_worker_is_that_of_the_lowest_rank(roster):
    for rank in (0, 1, *range(3, 10)):
        roster.failed[f"worker {rank}"] = "reason"
    assert roster.first_living == "worker 2"  # and not 10, which is less as a text
    roster.failed["worker 2"] = roster.failed["worker 10"] = "reason"
    assert roster.first_living is None


def test_a_run_has_not_finished_if_all_workers_failed(roster):
    roster.failed |= dict.fromkeys(roster.workers, "reason")
    assert not roster.all_finished
    roster.finished[roster.workers[0]] = {}
    assert roster.all_finished


def test_failed_processes_are_not_missing(roster):
    assert not roster.all_present
    roster.present |= roster.expected - {"worker 4"}
    assert not roster.all_present
    roster.failed["worker 4"] = "reason"
    assert roster.all_present
    assert roster.missing == roster.expected - {"worker 4"}


def test_a_new_incarnation_is_not_ready(roster):
    assert roster.admit("worker 3") == 0
    roster.ready.add("worker 3")
    assert roster.admit("worker 3") == 1
    assert "worker 3" in roster.missing
    assert not roster.is_current("worker 3", 0)
    assert roster.is_current("worker 3", 1)
    assert roster.workers.count("worker 3") == 1


def test_workers_that_had_finished_before_a_checkpoint_are_not_expected(roster):
    roster.restore({"worker 5": {"steps": 9}})
    assert "worker 5" not in roster.missing
    assert "worker 5" not in roster.watched()


@pytest.mark.parametrize("state", ["failed", "finished", "dismissed"])
def test_processes_that_are_over_need_no_heartbeats(roster, state):
    assert roster.watched()[:2] == ["server 0", "worker 0"]
    getattr(roster, state).update({"worker 0": {}})
    assert "worker 0" not in roster.watched()
    assert roster.is_over("worker 0")


def test_an_evicted_worker_still_sends_heartbeats(roster):
    roster.evicted["worker 0"] = "frozen"
    assert "worker 0" in roster.watched()
