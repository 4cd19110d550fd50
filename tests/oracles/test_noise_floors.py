"""How near to the optimum the noise of mini-batches lets a method come, at a constant rate: against closed forms.

On a bowl of curvature 1 in many dimensions, with noise of variance 1 in each, w(t+1) = w(t) - q (w(t-d) + noise(t)).
The distance from the optimum ends as a sum of past noises, each weighed by the response h to one of them: its variance
is q^2 times the sum of all h^2, averaged over the dimensions here.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from oracles.test_equivalences import staggered
from support.runs import virtual

from dure.job.models.quadratic import quadratic
from dure.job.optimizer import OptimizerSpec
from dure.runtime.virtual.cluster import Cluster, Link, Machines
from dure.runtime.virtual.compute import LogNormal, ShiftedExponential

DIM = 500


def floor(q: float, delay: int = 0) -> float:
    """Variance of the distance after long, at rate `q` and with gradients `delay` versions old."""
    response = [0.0] * delay + [1.0]
    for _ in range(2000):
        response.append(response[-1] - q * response[-1 - delay])
    return q * q * sum(h * h for h in response)


def distances(strategy: str, cluster: Cluster, *, q: float, updates: int, every: int) -> list[tuple[float, float]]:
    """Mean squared distance from the optimum per dimension, in units of the noise's variance; with its seconds."""
    bowl = quadratic(dim=DIM, conditioning=1.0, noise=0.3, samples=512, dtype="float64")
    job = replace(bowl, batch_size=1, split="whole", optimizer=OptimizerSpec(lr=q))
    assert job.optimum is not None
    noise = float((job.train.targets - job.optimum).square().sum(dim=1).mean())
    run = virtual(job, strategy, cluster, steps=updates // cluster.workers, eval_every=every, exact=True)
    return [(row["seconds"], (2 * row["loss"] - noise) / noise) for row in run.rows]


def settled(path: list[tuple[float, float]]) -> float:
    """The mean of the later half."""
    later = [distance for _, distance in path[len(path) // 2 :]]
    return sum(later) / len(later)


def test_closed_forms():
    q = 0.25
    assert floor(q) == pytest.approx(q / (2 - q))
    assert floor(q, delay=1) == pytest.approx(q * (1 + q) / ((1 - q) * (2 + q)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("strategy", ["downpour ps", "hogwild", "k-batch-async:k=1 ps"])
def test_the_floor_of_a_constant_rate_grows_with_the_number_of_asynchronous_workers(strategy, workers):
    """In turn, each gradient is K - 1 updates old."""
    path = distances(strategy, staggered(workers, 240 // workers), q=0.25, updates=240, every=12 // workers)
    assert settled(path) == pytest.approx(floor(0.25, delay=workers - 1), rel=0.1)
    assert floor(0.25, delay=1) > 1.25 * floor(0.25)
    assert floor(0.25, delay=3) > 1.8 * floor(0.25, delay=1)


def exponential(workers: int) -> Cluster:
    machines = Machines(count=workers, compute=ShiftedExponential(seconds=1.0, shift=0.0))
    return Cluster(machines=(machines,), link=Link(bandwidth=1e15, latency=1e-9), alpha=0.0, beta=0.0, gamma=0.0)


@pytest.mark.long
def test_asynchronous_is_faster_at_first_and_synchronous_comes_nearer():
    """At one rate: K - async makes H_K times as many updates in a second, of K times the variance, and stale."""
    q, workers = 0.2, 4
    cluster = exponential(workers)
    sync = distances(f"k-sync:k={workers} ps", cluster, q=q, updates=80 * workers, every=5)
    asynchronous = distances("k-async:k=1 ps", cluster, q=q, updates=80 * workers, every=1)
    seconds = sync[0][0]
    ahead = min(distance for at, distance in asynchronous if at <= seconds)
    assert ahead < sync[0][1] / 5
    assert settled(sync) == pytest.approx(floor(q) / workers, rel=0.1)
    assert settled(asynchronous) > 4 * settled(sync)


@pytest.mark.long
@pytest.mark.parametrize("form", ["snapshot", "rmw"])
def test_the_floor_of_bounded_staleness_grows_with_the_bound(form):
    """K updates on one snapshot are one of K times the rate and 1 / K of the variance; a cache gets older."""
    q, workers = 0.2, 3
    cluster = Cluster(machines=(Machines(count=workers, compute=LogNormal(seconds=0.01, sigma=0.7)),))
    found = [
        settled(distances(f"ssp:bound={bound},form={form} ps", cluster, q=q, updates=80 * workers, every=1))
        for bound in (0, 1, 9)
    ]
    assert found[0] == pytest.approx(floor(q * workers) / workers, rel=0.1)
    assert found[1] > 1.05 * found[0]
    if form == "snapshot":  # it reads the newest, however far it leads: like no bound at all
        assert found[2] == pytest.approx(found[1], rel=0.1)
    else:
        assert found[2] > 1.5 * found[1]
