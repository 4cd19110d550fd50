"""The shards of Downpour refuse pushes whose staleness is above `max_delay`, and their workers go on."""

from __future__ import annotations

import pytest
import torch
from support.runs import virtual
from support.stale import Bench
from support.wording import raising

from dure.runtime.virtual.cluster import Cluster, Link, Machines
from dure.runtime.virtual.compute import Constant
from dure.sync.downpour import Downpour

FRESH = 5


def uneven(method: str, shards: int = 2):
    """A run with five workers, of which one is ten times slower than the others."""
    kinds = (
        Machines(count=4, compute=Constant(seconds=0.01)),
        Machines(count=1, compute=Constant(seconds=0.1)),
    )
    cluster = Cluster(machines=kinds, link=Link(bandwidth=1e12, latency=1e-6))
    return virtual("digits-mlp", f"{method} ps:shards={shards}", cluster, workers=5, steps=12, lr=0.01)


def test_a_shard_refuses_what_is_staler_than_the_largest_delay_and_counts_it():
    bench = Bench("downpour:max_delay=3", 1, [1.0, -2.0], torch.ones_like, lr=0.125)
    for _ in range(FRESH):
        bench.turn(0)
    made = []
    for lag in range(6):
        version, values = bench.shard.version, bench.values
        bench.read[0] = (version - lag, values)
        bench.push(0)
        made.append(bench.shard.version - version)
        assert torch.equal(bench.values, values - 0.125 * made[-1])
    assert made == [1, 1, 1, 1, 0, 0]
    shard = bench.shard
    assert (shard.applied, shard.refused, shard.gradients) == (FRESH + 4, 2, FRESH + 4)
    assert shard.staleness == {0: FRESH + 1, 1: 1, 2: 1, 3: 1}


def test_a_refused_push_that_is_repeated_is_acknowledged_and_counted_once():
    bench = Bench("downpour:max_delay=0", 2, [0.0], torch.ones_like, lr=0.125)
    bench.push(0)
    for _ in range(5):
        bench.push(1)
        bench.seq[1] -= 1
    assert (bench.shard.version, bench.shard.refused) == (1, 1)


def test_a_worker_with_many_refused_pushes_in_a_row_is_not_evicted():
    bench = Bench("downpour:max_delay=0", 2, [0.0], torch.ones_like, lr=0.125)
    bench.push(0)
    for _ in range(5):
        bench.push(1)
    bench.turn(0)
    bench.pull(1)
    bench.push(1)
    assert (bench.shard.applied, bench.shard.refused) == (2, 6)


@pytest.mark.parametrize("method", ["downpour:max_delay=4", "downpour:max_delay=4,at_once=true+dc-asgd"])
def test_of_a_slow_worker_s_pushes_those_that_are_too_stale_are_refused(method):
    counts = uneven(method).summary
    assert [each["steps"] for each in counts["per_worker"].values()] == [12] * 5, "every worker goes on to its end"
    assert counts["updates_applied"] + counts["updates_refused"] == 60
    assert counts["updates_refused"] > 0
    assert 0 < max(map(int, counts["staleness"]["histogram"])) <= 4


def test_without_a_limit_and_within_it_the_run_is_the_same():
    assert torch.equal(uneven("downpour").params, uneven("downpour:max_delay=40").params)


def test_a_negative_delay_is_refused():
    with raising(ValueError, "max_delay"):
        Downpour(max_delay=-1)
