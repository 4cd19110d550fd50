"""How far workers are, and what a run counts of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dure.core.deployment import WORKER, Deployment, NodeId, NodeSpec
from dure.run.roster import ProcessRoster, RunProgress


def report(steps, at=0, **fields):
    return {"steps": steps, "at": at, "done": steps, "loss": 0.5, "bytes": 10 * steps} | fields


SETUP = SimpleNamespace(batch_sizes=(32, 32, 8), reports=lambda number: True, replica_of=lambda number: number)


@pytest.fixture
def roster():
    return ProcessRoster(Deployment(tuple(NodeSpec(NodeId(WORKER, rank)) for rank in range(3))))


@pytest.fixture
def progress(roster):
    found = RunProgress(SETUP, roster)
    for rank, steps in enumerate((4, 9, 6)):
        found.report(f"worker {rank}", report(steps, at=steps - 1))
    return found


def test_sums_and_bounds_of_the_reports(progress):
    assert progress.samples() == 32 * 4 + 32 * 9 + 8 * 6
    assert progress.bytes_sent() == 190
    assert progress.highest() == 9
    assert progress.lowest() == 3


def test_the_lowest_step_is_that_of_living_and_finished_workers(progress, roster):
    roster.evicted["worker 0"] = "frozen"
    assert progress.lowest() == 5
    roster.finished["worker 2"] = {"steps": 7}
    assert progress.lowest() == 7
    roster.failed["worker 1"] = "exit status 1"
    assert progress.lowest() == 7


def test_a_living_worker_that_has_reported_nothing_is_at_step_0(progress):
    del progress.at["worker 1"]
    assert progress.lowest() == 0


def test_the_steps_and_bytes_of_a_lost_worker_are_counted_once(progress):
    before = progress.samples()
    progress.count_lost("worker 1")
    progress.count_lost("worker 1")
    assert progress.samples() == before
    assert progress.bytes_sent() == 190
    assert progress.totals.per_worker["worker 1"] == {"steps": 9, "bytes_sent": 90}


def test_what_finished_workers_report_is_in_the_totals(progress, roster):
    said = {"bytes_sent": 1, "bytes_received": 2, "messages": 3, "time": {"wait": 1.5}, "refused": 1}
    said["skew"] = {"0": 2, "1": 1}
    for rank in range(3):
        roster.finished[f"worker {rank}"] = {"steps": 9 + rank, "done": 10, "seconds": float(rank), **said}
    progress.reports.clear()
    progress.refused_of_failed = 2
    progress.count_finished()
    progress.count_refused()
    totals = progress.totals
    assert (totals.seconds, totals.steps) == (2.0, 11)
    assert totals.counts["samples"] == 10 * (32 + 32 + 8)
    assert totals.counts["messages"] == 9
    assert totals.counts["updates_refused"] == 5
    assert totals.time["wait"] == 4.5
    assert totals.version_skew.histogram == {0: 6, 1: 3}


def test_a_checkpoint_gives_back_counts_and_reports(progress, roster):
    other = RunProgress(SETUP, roster)
    other.restore(progress.totals.state(), 12.5, progress.reports, progress.last_steps)
    assert other.last_steps == {"worker 0": 4, "worker 1": 9, "worker 2": 6}
    assert (other.samples(), other.lowest(), other.totals.seconds) == (progress.samples(), progress.lowest(), 12.5)
