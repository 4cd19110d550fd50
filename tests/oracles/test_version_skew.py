"""The version skew of pulls from several servers: against arrivals counted by hand, and the same figure for real."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from support.runs import local, virtual

from dure.job.job import load_job
from dure.report.metrics import VersionCounts
from dure.runtime.virtual.cluster import Cluster, Link, Machines
from dure.runtime.virtual.compute import Constant

LATENCY = 1.0
NBYTES = [4 * 4096, 4 * (64 + 640 + 10)]
"""The part of each server: the largest layer of `digits-mlp`, and the three others."""

WORKERS = [(10.0, 1000.0), (17.3, 1000.0), (36.7, 300.0)]
"""Seconds of a gradient, and bytes per second of the link. No two messages of these reach a server at one time."""

STEPS = 12


def cluster() -> Cluster:
    """Messages take their latency and their bytes, never queue, and cost nothing else."""
    machines = tuple(
        Machines(count=1, compute=Constant(seconds=seconds), link=Link(bandwidth=rate, latency=LATENCY))
        for seconds, rate in WORKERS
    )
    free: dict[str, Any] = {"alpha": 0, "beta": 0, "gamma": 0, "header": 0, "field": 0, "small": 10**9}
    return Cluster(machines=machines, link=Link(bandwidth=10_000, latency=LATENCY), **free)


def arrivals(seconds: float, rate: float, *, at_once: bool) -> tuple[list[list[float]], list[list[float]]]:
    """When the pulls of a worker reach each server, and its pushes.

    A pull is a question of no bytes, and an answer with each server's part; a gradient follows when all parts are
    there. A push brings the parts, and its answers have no bytes. If a push is answered by the parameters (`at_once`),
    it is the next pull as well.
    """
    ways = [nbytes / rate for nbytes in NBYTES]
    now, pulls, pushes = 0.0, [], []
    for step in range(STEPS):
        if step == 0 or not at_once:
            pulls.append([now + LATENCY for _ in ways])
            now += 2 * LATENCY + max(ways)
        now += seconds
        pushes.append([now + LATENCY + way for way in ways])
        now += 2 * LATENCY + max(ways)
        if at_once and step < STEPS - 1:
            pulls.append(pushes[-1])
            now += max(ways)
    return pulls, pushes


def by_hand(*, at_once: bool) -> Counter[int]:
    """Pulls by the difference between the pushes that each server had got before."""
    each = [arrivals(*worker, at_once=at_once) for worker in WORKERS]
    pushed = [sorted(push[shard] for _, pushes in each for push in pushes) for shard in range(len(NBYTES))]
    found: Counter[int] = Counter()
    for pulls, _ in each:
        for pull in pulls:
            versions = [sum(at <= pull[shard] for at in pushed[shard]) for shard in range(len(NBYTES))]
            found[max(versions) - min(versions)] += 1
    return found


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("timing_only", [False, True])
def test_skew_is_that_of_arrivals_counted_by_hand(at_once, timing_only):
    expected = by_hand(at_once=at_once)
    assert len(expected) > 1, "a case in which versions differ"
    strategy = f"downpour:at_once={str(at_once).lower()} ps:shards=2,split=layer"
    run = virtual("digits-mlp", strategy, cluster(), steps=STEPS, timing_only=timing_only)
    assert run.summary["version_skew"] == VersionCounts(expected).as_dict()


def test_a_shard_without_parameters_is_no_part_of_a_model():
    """A single layer of 4,096 parameters leaves one of two servers without any, which pushes reach 16 s earlier."""
    job = load_job("quadratic", dim=4096)
    found = virtual(job, "downpour ps:split=layer,shards=2", cluster(), steps=STEPS).summary["version_skew"]
    assert found["histogram"] == {"0": len(WORKERS) * STEPS}


@pytest.mark.parametrize("strategy", ["bsp", "k-sync:k=2", "averaging:period=2"])
def test_synchronous_pulls_have_one_version(strategy):
    found = virtual("digits-mlp", f"{strategy} ps:shards=2,split=layer", cluster(), steps=STEPS).summary
    assert list(found["version_skew"]["histogram"]) == ["0"]
    assert found["version_skew"]["max"] == 0


@pytest.mark.parametrize("strategy", ["downpour ps", "bsp collective", "lbfgs ps:shards=2"])
def test_nothing_is_counted_where_no_model_comes_in_parts(strategy):
    assert "version_skew" not in virtual("digits-mlp", strategy, cluster(), steps=4).summary


@pytest.mark.long
def test_processes_count_every_pull():
    steps, workers = 9, 2
    found = local("digits-mlp", "downpour ps:shards=2", workers=workers, steps=steps).summary["version_skew"]
    assert sum(found["histogram"].values()) == workers * steps
