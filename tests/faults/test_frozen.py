"""Workers that stand still, in virtual time: the others go on, and take them in again under a new incarnation."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from support.runs import resolved

from dure.run.prebuilt import Callbacks
from dure.run.virtual import VirtualRun, VirtualSegment
from dure.runtime.virtual.cluster import Cluster, Event
from dure.runtime.virtual.compute import Constant, ShiftedExponential

STEPS = 60
STEADY = Constant(seconds=0.2)


def run(strategy, *, pause=None, evict_seconds=5.0, compute=STEADY, **options):
    """A run of three workers and its last segment; worker 1 stands still for `pause` seconds from second 2 on."""
    events = (Event(at=2.0, kind="pause", worker=1, **{"for": pause}),) if pause else ()
    cluster = Cluster.uniform(3, compute=compute, events=events)
    setup, cluster = resolved(
        "digits-mlp", strategy, cluster, on="virtual", **{"steps": STEPS, "eval_every": 5} | options
    )
    segment = VirtualSegment(VirtualRun(setup, cluster, Callbacks()), None)
    segment.clock.progress.seconds = evict_seconds
    for shard in segment.shards:
        shard.updater.log = []
    assert segment.run() is None
    return segment, segment.outcome()


def longest_silence(segment, outcome):
    """Virtual seconds between rows of history, at most."""
    times = [0.0, *(row["seconds"] for row in outcome.history)]
    return max(later - earlier for earlier, later in pairwise(times))


@pytest.mark.parametrize("strategy", ["bsp ps:shards=2", "ssp:bound=2 ps:shards=2", "averaging:period=2 ps"])
def test_a_worker_that_stands_still_is_left_behind_refused_and_taken_in_again(strategy):
    segment, outcome = run(strategy, pause=8.0)
    assert 5.0 < longest_silence(segment, outcome) < 6.5
    assert outcome.totals.failures_survived == 1
    assert segment.clock.lost_workers == [1]
    first = segment.shards[0]
    assert all(shard.updater.log == first.updater.log for shard in segment.shards)
    mine = [incarnation for worker, incarnation, _ in first.updater.log if worker == 1]
    assert set(mine) == {0, 1}
    assert mine == sorted(mine), "an update of the incarnation before was taken"
    assert first.refused == 1, "its first push after the pause is refused"
    assert segment.workers[1].clock == STEPS
    period = segment.setup.period
    assert len(mine) * period <= segment.workers[1].clock - segment.workers[1].joined_at <= (len(mine) + 1) * period
    assert outcome.history[-1]["accuracy"] > 0.9


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["bsp ps", "ssp:bound=2 ps"])
def test_a_worker_that_stands_still_for_less_is_waited_for(strategy):
    segment, outcome = run(strategy, pause=4.0)
    assert 4.0 < longest_silence(segment, outcome) < 5.5
    assert outcome.totals.failures_survived == 0
    assert len(segment.shards[0].updater.log) == 3 * STEPS
    assert segment.shards[0].refused == 0


def test_nobody_is_evicted_where_nobody_waits():
    segment, outcome = run("ssp:bound=inf ps", pause=8.0)
    assert outcome.totals.failures_survived == 0
    assert len(segment.shards[0].updater.log) == 3 * STEPS


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["bsp ps:shards=2", "ssp ps"])
@pytest.mark.parametrize("compute", [STEADY, ShiftedExponential(seconds=0.2)])
def test_being_watched_changes_no_run_in_which_nobody_stands_still(strategy, compute):
    _, watched = run(strategy, compute=compute)
    _, alone = run(strategy, compute=compute, evict_seconds=math.inf)
    assert watched.params.equal(alone.params)
    assert watched.totals.seconds == alone.totals.seconds
    assert watched.history == alone.history


def test_the_watch_keeps_no_run_alive():
    segment, outcome = run("bsp ps", steps=3)
    assert outcome.totals.seconds < 1.0
    assert segment.runtime.kernel.now < 1.0
