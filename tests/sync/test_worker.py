"""What ends a worker's work."""

from __future__ import annotations

import pytest
from support.runs import resolved

from dure.run.prebuilt import Callbacks
from dure.run.virtual import VirtualRun, VirtualSegment
from dure.runtime.virtual.cluster import Cluster, Machines
from dure.runtime.virtual.compute import Constant


def clocks(strategy, **options):
    """The clocks of two workers, the second of half the speed, after a second in virtual time."""
    cluster = Cluster(machines=(Machines(count=2, compute=Constant(seconds=0.03), speed=(1.0, 0.5)),))
    setup, cluster = resolved("digits-mlp", strategy, cluster, on="virtual", seconds=1.0, **options)
    segment = VirtualSegment(VirtualRun(setup, cluster, Callbacks()), None)
    assert segment.run() is None
    assert 1.0 <= segment.outcome().totals.seconds < 1.5
    return [worker.clock for worker in segment.workers.values()]


@pytest.mark.parametrize("strategy", ["bsp", "averaging:period=1", "averaging:period=4"])
@pytest.mark.parametrize("timing_only", [False, True])
def test_workers_of_a_group_end_at_the_same_step(strategy, timing_only):
    fast, slow = clocks(strategy, timing_only=timing_only)
    assert fast == slow >= 16
    assert fast < 21


def test_workers_of_servers_end_each_in_its_own_time():
    fast, slow = clocks("downpour ps")
    assert fast > 1.8 * slow
