"""Elastic averaging against its closed forms: what is conserved, how fast it contracts, where it becomes unstable."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from oracles.test_equivalences import staggered
from support.runs import bowls, local, virtual
from support.scattered import scattered, total
from support.wording import raising
from torch import nn

import dure
from dure.errors import StrategyError
from dure.run.strategy import Strategy
from dure.runtime.virtual.cluster import Cluster, Event, Machines
from dure.runtime.virtual.compute import Constant

METHODS = ("easgd", "eamsgd")


def even(workers: int) -> Cluster:
    return Cluster.uniform(workers)


# ---- without gradients


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("topology", ["ps", "collective"])
def test_center_and_models_have_the_sum_that_they_began_with(method, topology):
    starts = [8.0, -2.0, 1.0, 5.0]
    for steps in (1, 2, 5, 40):
        z, x, _ = scattered(f"{method}:period=1 {topology}", starts, staggered(4, steps), steps=steps, place=3.0)
        assert total(z, x) == pytest.approx(15.0, abs=1e-12)
    assert [z, *x] == pytest.approx([3.0] * 5, abs=1e-3), "all meet at the mean of all"


def test_the_sum_is_kept_when_machines_differ_and_messages_are_slow():
    machines = Machines(count=4, compute=Constant(seconds=1e-3), speed=(1.0, 0.3, 2.1, 0.7))
    z, x, _ = scattered("easgd:period=3", [8.0, -2.0, 1.0, 5.0], Cluster(machines=(machines,)), steps=31, place=3.0)
    assert total(z, x) == pytest.approx(15.0, abs=1e-12)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("alpha", [None, 0.125, 0.3])
def test_synchronous_contraction_is_exact(workers, alpha):
    """Mean minus center by 1 - alpha (p + 1), differences of models by 1 - alpha."""
    starts = [float(5 * rank - 3) for rank in range(workers)]
    text = "none" if alpha is None else alpha
    alpha = 0.9 / workers if alpha is None else alpha
    for steps in (1, 2, 6):
        strategy = f"easgd:period=1,elasticity={text} collective"
        z, x, _ = scattered(strategy, starts, even(workers), steps=steps, place=2.0)
        gap = (sum(starts) / workers - 2.0) * (1 - alpha * (workers + 1)) ** steps
        assert sum(x) / workers - z == pytest.approx(gap, abs=1e-13)
        for one, start in zip(x, starts, strict=True):
            assert one - x[0] == pytest.approx((start - starts[0]) * (1 - alpha) ** steps, abs=1e-13)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("factor", "grows"), [(0.97, False), (1.03, True)])
@pytest.mark.parametrize("workers", [2, 4])
def test_synchronously_it_is_stable_below_two_over_p_plus_one(workers, factor, grows):
    alpha = factor * 2 / (workers + 1)
    strategy = f"easgd:period=1,elasticity={alpha} collective"
    z, x, _ = scattered(strategy, [1.0] * workers, even(workers), steps=100, place=0.0)
    assert (abs(sum(x) / workers - z) > 1) is grows


@pytest.mark.parametrize(("alpha", "z", "x"), [(0.5, 4.0, 4.0), (1.0, 7.0, 1.0), (0.0, 1.0, 7.0)])
@pytest.mark.parametrize("topology", ["ps", "collective"])
def test_one_worker_meets_the_center_in_the_middle_or_swaps_with_it(topology, alpha, z, x):
    center, models, _ = scattered(f"easgd:elasticity={alpha} {topology}", [7.0], even(1), steps=1, place=1.0)
    assert (center, models) == (z, [x])


def test_with_beta_one_the_center_is_the_mean_of_the_models():
    """alpha = 1/p, synchronous: after step t + 1 it is where the mean of the models was after step t."""
    starts, means = [8.0, -2.0, 1.0, 5.0], []
    for steps in range(1, 8):
        z, x, _ = scattered(
            "easgd:period=1,elasticity=0.25 collective", starts, even(4), steps=steps, lr=0.25, place=16.0
        )
        if means:
            assert z == means[-1]
        means.append(sum(x) / 4)


# ---- with gradients


@pytest.mark.parametrize("topology", ["ps", "collective"])
def test_without_elasticity_everybody_is_alone_and_the_center_stays(topology):
    z, x, _ = scattered(f"easgd:elasticity=0 {topology}", [8.0, -2.0], even(2), steps=5, lr=0.25, place=3.0)
    assert z == 3.0
    assert x == [start * 0.75**5 for start in (8.0, -2.0)]


def by_hand(momentum: float, *, post: bool = False) -> tuple[float, float]:
    """x and z after seven steps of one worker on w^2 / 2, as in the paper; `post`: the force after the gradient."""
    alpha, lr, period, x, z, v = 0.3, 0.25, 2, 8.0, 3.0, 0.0
    for t in range(7):
        force = alpha * (x - z) if t % period == 0 else 0.0
        v *= momentum
        x += v
        g = x
        x, v = x - lr * g, v - lr * g
        if post and t % period == 0:
            force = alpha * (x - z)
        x, z = x - force, z + force
    return x, z


@pytest.mark.parametrize("topology", ["ps", "ps:shards=1,split=layer", "collective"])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_it_is_the_loop_of_the_paper(momentum, topology):
    method = f"eamsgd:period=2,elasticity=0.3,momentum={momentum}" if momentum else "easgd:period=2,elasticity=0.3"
    z, (x,), _ = scattered(f"{method} {topology}", [8.0], even(1), steps=7, lr=0.25, place=3.0)
    assert (x, z) == pytest.approx(by_hand(momentum), abs=1e-13)
    late = by_hand(momentum, post=True)
    assert abs(z - late[1]) > 1e-3, "the force is taken before the gradient step"


@pytest.mark.long
@pytest.mark.parametrize("lr", [0.1, 1.0, 1.5])
def test_round_robin_is_stable_up_to_its_limit(lr):
    """A step of one worker is a symmetric map of (x, z); it expands nothing while alpha <= (4 - 2 lr) / (4 - lr)."""
    limit = (4 - 2 * lr) / (4 - lr)
    assert limit == pytest.approx({0.1: 0.974, 1.0: 2 / 3, 1.5: 0.4}[lr], abs=5e-4)
    for factor, workers, grows in ((0.98, 1, False), (0.98, 2, False), (0.98, 4, False), (1.02, 1, True)):
        alpha = factor * limit
        cluster, steps = staggered(workers, 150), 150
        strategy = f"easgd:period=1,elasticity={min(alpha, 1.0)}"
        z, x, _ = scattered(strategy, [1.0] * workers, cluster, steps=steps, lr=lr, place=-1.0)
        size = max(map(abs, (z, *x)))
        assert (size > 1.5) is grows, (workers, alpha, size)
        if workers == 1:
            step = np.array([[1 - lr - alpha, alpha], [alpha, 1 - alpha]])
            exact = np.linalg.matrix_power(step, steps) @ [1.0, -1.0]
            assert (x[0], z) == pytest.approx(tuple(exact), rel=1e-6)


def test_the_center_is_closer_to_the_optimum_than_what_pulls_at_it():
    """On bowls of different places, models stay apart by what the spring allows; the center is at their mean."""
    pairs = [(1.0, float(b)) for b in (8, -2, 1, 5)]
    run = virtual(bowls(pairs, lr=0.25), "easgd:period=1,elasticity=0.25 collective", workers=4, steps=80)
    assert float(run.params) == pytest.approx(3.0, abs=1e-6)


# ---- traffic, machines, deaths


@pytest.mark.parametrize("period", [1, 4, 7])
def test_the_model_travels_both_ways_once_a_period(period):
    run = virtual("digits-mlp", f"easgd:period={period} ps:shards=2", workers=3, steps=14)
    nbytes = run.setup.replica.numel * 4
    meetings = math.ceil(14 / period)
    for counted in run.outcome.totals.per_worker.values():
        assert counted["bytes_sent"] == counted["bytes_received"] == meetings * nbytes


def test_a_slow_worker_delays_nobody_over_servers_and_everybody_over_collectives():
    kinds = (Machines(count=3, compute=Constant(seconds=0.01)), Machines(compute=Constant(seconds=0.01), speed=0.2))
    ends = {}
    for topology in ("ps", "collective"):
        _, _, segment = scattered(f"easgd:period=2 {topology}", [1.0] * 4, Cluster(machines=kinds), steps=20, lr=0.1)
        ends[topology] = segment.runtime.nodes["worker 0"].meter.seconds
    waiting = ends["collective"]["communicate"] + ends["collective"]["wait"]
    assert waiting == pytest.approx(0.8, rel=0.1)
    assert ends["ps"]["communicate"] + ends["ps"]["wait"] < 0.02


def test_a_death_leaves_the_center_and_a_newcomer_starts_there():
    events = (Event(at=2.3, kind="crash", worker=1), Event(at=4.5, kind="join", worker=1))
    cluster = Cluster(machines=(Machines(count=2, compute=Constant(seconds=1.0)),), events=events)
    z, x, segment = scattered("easgd:period=1,elasticity=0.25", [8.0, 8.0], cluster, steps=9, place=0.0)
    assert segment.totals.failures_survived == 1
    assert segment.steps[1] > 2
    assert 0 < z < 8
    assert x[1] != x[0]


def test_its_result_is_the_center_on_processes_too(fork_server):
    """Synchronously it is determined: real and virtual runs deliver the same, which is no worker's model."""
    options = {"workers": 2, "steps": 7, "dtype": "float64"}
    for method in METHODS:
        strategy = f"{method}:period=3 collective"
        real = local("quadratic", strategy, fork_server=fork_server, **options)
        modelled = virtual("quadratic", strategy, **options)
        assert float((real.params - modelled.params).abs().max()) < 1e-12
    over_servers = local("quadratic", "easgd:period=3 ps", fork_server=fork_server, **options)
    assert over_servers.params.isfinite().all()


@pytest.mark.long
@pytest.mark.parametrize("topology", ["ps", "collective"])
def test_in_a_loop_of_ones_own_the_model_becomes_the_center(topology):
    """Alone with its center: evaluation shows it, and the end leaves it."""
    model = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        model.weight.fill_(3.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    x = z = 3.0
    with dure.attach(model, optimizer, sync="easgd:period=2,elasticity=0.25", topology=topology) as replica:
        for step in range(5):
            force = 0.25 * (x - z) if step % 2 == 0 else 0.0
            x, z = x - 0.25 * x - force, z + force
            (0.5 * model.weight.square().sum()).backward()
            replica.step()
            if step == 2:
                with replica.evaluation():
                    assert model.weight.item() == pytest.approx(z, abs=1e-12)
                assert model.weight.item() != pytest.approx(z, abs=1e-3)
    assert model.weight.item() == pytest.approx(z, abs=1e-12)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("easgd:period=0", "mini-batches"),
        ("easgd:elasticity=1.5", "from 0"),
        ("easgd:elasticity=-0.1", "from 0"),
        ("eamsgd:momentum=1", "least 0"),
        ("eamsgd:period=-1", "mini-batches"),
    ],
)
def test_what_makes_no_sense_is_refused(text, reason):
    with raising(StrategyError, reason):
        Strategy.parse(text)
