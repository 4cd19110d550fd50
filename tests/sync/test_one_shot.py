"""One-shot averaging: the mean of runs that know nothing of each other."""

from __future__ import annotations

import pytest
import torch
from support.runs import Finished, bowls, resolved, virtual

from dure.run.prebuilt import Callbacks
from dure.run.virtual import VirtualRun, VirtualSegment
from dure.runtime.virtual.cluster import Cluster, Event, Link, Machines
from dure.runtime.virtual.compute import Constant
from dure.topology.parameter_server.client import ServerClient

TOPOLOGIES = ["collective", "ps"]
PAIRS = [(0.5, 1.0), (1.0, -2.0), (0.25, 0.5)]


def distance(one: Finished, other: Finished) -> float:
    return float((one.params - other.params).abs().max())


def alone(pair: tuple[float, float], steps: int, lr: float = 0.5) -> float:
    """Where one worker gets to on its bowl from 0, by its closed form."""
    a, b = pair
    return b / a * (1 - (1 - lr * a) ** steps)


def steady(seconds: float, speeds: tuple[float, ...], *events: Event) -> Cluster:
    machines = Machines(count=len(speeds), compute=Constant(seconds=seconds), speed=speeds)
    return Cluster(machines=(machines,), events=events)


def last_segment(strategy: str, cluster: Cluster, **options: object) -> tuple[VirtualSegment, Finished]:
    setup, cluster = resolved(bowls(PAIRS, lr=0.5), strategy, cluster, on="virtual", **options)
    segment = VirtualSegment(VirtualRun(setup, cluster, Callbacks()), None)
    assert segment.run() is None
    return segment, Finished(setup, segment.outcome(), [])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("period", [17, 40])
def test_is_averaging_with_a_period_of_the_whole_run(topology, optimizer, period):
    options = {"workers": 3, "batch_sizes": (4, 8, 20), "steps": 17, "optimizer": optimizer}
    one = virtual("digits-mlp", f"one-shot {topology}", **options)
    other = virtual("digits-mlp", f"averaging:period={period} {topology}", **options)
    assert torch.equal(one.params, other.params)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_is_the_mean_of_independent_runs(topology):
    segment, run = last_segment(f"one-shot {topology}", steady(1.0, (1.0, 1.0, 1.0)), steps=6)
    assert float(run.params) == pytest.approx(sum(alone(pair, 6) for pair in PAIRS) / 3, abs=1e-14)
    assert all(torch.equal(worker.params, run.params) for worker in segment.workers.values())


@pytest.mark.parametrize("steps", [1, 4, 9])
def test_on_a_common_bowl_it_ends_where_bsp_does(steps):
    options = {"workers": 4, "batch_size": 4, "dtype": "float64", "steps": steps, "lr": 0.7}
    assert distance(virtual("quadratic", "one-shot", **options), virtual("quadratic", "bsp", **options)) < 1e-12


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_one_worker_is_serial(topology):
    options = {"workers": 1, "steps": 9, "dtype": "float64"}
    one = virtual("digits-mlp", f"one-shot {topology}", **options)
    assert distance(one, virtual("digits-mlp", "bsp", **options)) == 0


def test_the_model_is_sent_once():
    run = virtual("digits-mlp", "one-shot ps", workers=3, steps=20)
    nbytes = run.setup.replica.numel * 4
    assert run.summary["bytes_sent"] == 3 * nbytes
    ring = virtual("digits-mlp", "one-shot collective", workers=3, steps=20)
    assert ring.summary["bytes_sent"] == 3 * 2 * 2 * nbytes // 3


@pytest.mark.parametrize("topology", ["collective", "ps"])
def test_a_slow_worker_delays_the_end_alone(topology):
    """It is waited for, however long: it says that it is at work."""
    _, run = last_segment(f"one-shot {topology}", steady(1.0, (1.0, 1.0, 0.2)), steps=30)
    assert 150 < run.seconds < 151
    assert run.outcome.totals.failures_survived == 0
    assert float(run.params) == pytest.approx(sum(alone(pair, 30) for pair in PAIRS) / 3, abs=1e-12)


def test_one_that_says_nothing_would_be_taken_for_dead(monkeypatch):
    monkeypatch.setattr(ServerClient, "heartbeat", lambda self: None)
    _, run = last_segment("one-shot ps", steady(1.0, (1.0, 1.0, 0.005)), steps=30)
    assert run.outcome.totals.failures_survived == 1


def test_the_dead_are_left_out():
    crash = Event(at=4.5, kind="crash", worker=1)
    _, run = last_segment("one-shot ps", steady(1.0, (1.0, 1.0, 1.0), crash), steps=9)
    assert float(run.params) == pytest.approx((alone(PAIRS[0], 9) + alone(PAIRS[2], 9)) / 2, abs=1e-12)


def test_who_comes_late_does_all_its_steps_and_is_waited_for():
    join = Event(at=4.5, kind="join", worker=2)
    segment, run = last_segment("one-shot ps", steady(1.0, (1.0, 1.0, 1.0), join), steps=9)
    assert [worker.clock for worker in segment.workers.values()] == [9, 9, 9]
    assert 13.5 < run.seconds < 14
    assert float(run.params) == pytest.approx(sum(alone(pair, 9) for pair in PAIRS) / 3, abs=1e-12)


def test_who_comes_when_all_is_over_changes_nothing():
    join = Event(at=30.0, kind="join", worker=2)
    slow = Cluster(
        machines=(Machines(count=3, compute=Constant(seconds=1.0), link=Link(latency=0.001)),), events=(join,)
    )
    _, run = last_segment("one-shot ps", slow, steps=9)
    assert float(run.params) == pytest.approx((alone(PAIRS[0], 9) + alone(PAIRS[1], 9)) / 2, abs=1e-12)


def test_who_comes_when_the_others_have_met_sends_nothing():
    """They still fetch what they made, over slow links: the work of one more would be for nobody."""
    events = (Event(at=0.05, kind="crash", worker=2), Event(at=0.5, kind="join", worker=2))
    slow = Cluster(
        machines=(Machines(count=3, compute=Constant(seconds=0.01)),), link=Link(bandwidth=1e5), events=events
    )
    run = virtual("digits-mlp", "one-shot ps", slow, steps=10)
    assert run.outcome.totals.per_worker["worker 0"]["bytes_sent"] > 0
    assert run.outcome.totals.per_worker["worker 2"]["bytes_sent"] == 0


def test_a_worker_that_stood_still_goes_on_where_it_was():
    """Evicted while the others wait for it and back before they have all met, it keeps its own run."""
    pause = Event(at=5.5, kind="pause", worker=1, duration=70.0)
    segment, run = last_segment("one-shot ps", steady(1.0, (1.0, 1.0, 0.1), pause), steps=9)
    assert segment.clock is not None
    assert segment.clock.lost_workers == [1]
    assert [worker.clock for worker in segment.workers.values()] == [9, 9, 9]
    assert float(run.params) == pytest.approx(sum(alone(pair, 9) for pair in PAIRS) / 3, abs=1e-12)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_with_a_limit_of_time_each_ends_in_its_own(topology):
    segment, _ = last_segment(f"one-shot {topology}", steady(0.03, (1.0, 0.5, 1.0)), seconds=1.0)
    clocks = [worker.clock for worker in segment.workers.values()]
    assert clocks == [34, 17, 34]
