"""Downpour's warm start and its pushes and fetches beside the computation; the rest is in `oracles`."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from support.runs import bowls, local, virtual
from support.wording import raising

import dure
from dure.job.job import load_job
from dure.run import checkpoint
from dure.run.strategy import member_text
from dure.runtime.virtual.cluster import Cluster, Event, Link, Machines
from dure.runtime.virtual.compute import Constant, LogNormal
from dure.sync.downpour import Downpour
from dure.topology.parameter_server.admission import Accept, Start
from dure.topology.parameter_server.policies import OneFirst


def machines(workers: int, *events: Event, bandwidth: float = 1e12, seconds: float = 0.01) -> Cluster:
    kinds = (Machines(count=workers, compute=Constant(seconds=seconds)),)
    link = Link(bandwidth=bandwidth, latency=1e-6)
    return Cluster(machines=kinds, link=link, alpha=0.0, beta=0.0, gamma=0.0, events=events)


def computed(method: str, cluster: Cluster, **options: Any) -> dict[int, list[float]]:
    """When each worker's gradients began."""
    run = virtual("quadratic", f"{method} ps:shards=2", cluster, trace=True, out="unused", **options)
    return {
        rank: [span.start for span in _spans(run) if span.rank_name == f"worker {rank}" and span.kind == "compute"]
        for rank in range(run.setup.workers)
    }


def _spans(run: Any) -> list[Any]:
    spans: list[Any] = run.outcome.spans
    return spans


# ---- the warm start


def test_one_goes_ahead_until_it_says_that_it_is_done():
    policy = OneFirst()
    for worker in range(3):
        policy.join(worker)
    assert policy.ask(1) == [Start(1, 0)]
    assert policy.ask(0) == []
    assert policy.ask(1) == [Start(1, 0)], "once for each of its steps"
    assert policy.ask(2) == []
    assert policy.offer(1, 0) == [Accept(1, 0), Start(0, 1), Start(2, 1)]
    policy.join(3)
    assert policy.ask(3) == [Start(3, 1)]


def test_another_takes_its_place():
    policy = OneFirst()
    for worker in range(3):
        policy.join(worker)
        policy.ask(worker)
    assert policy.leave(1) == []
    assert policy.leave(0) == [Start(2, 0)]
    again = OneFirst()
    again.restore(policy.state())
    assert again.ask(1) == []
    assert again.ask(2) == [Start(2, 0)]


def test_the_others_start_when_the_share_is_done():
    begun = computed("downpour:warm_start=0.25", machines(4), steps=20)
    assert begun[0][:6] == pytest.approx([0.01 * step for step in range(6)], abs=1e-4)
    for rank in (1, 2, 3):
        assert begun[rank][0] == pytest.approx(0.05, abs=1e-3)
        assert len(begun[rank]) == 20


def test_a_share_of_the_seconds_where_the_run_ends_by_them():
    begun = computed("downpour:warm_start=0.25", machines(3), seconds=0.4)
    assert min(begun[1][0], begun[2][0]) == pytest.approx(0.1, abs=0.011)


def test_when_the_one_dies_another_warms_up():
    begun = computed("downpour:warm_start=0.5", machines(3, Event(at=0.055, kind="crash", worker=0)), steps=20)
    assert begun[1][0] == pytest.approx(0.105, abs=2e-3), "once the death is noticed"
    assert begun[2][0] == pytest.approx(begun[1][0] + 0.1, abs=2e-3), "ten steps later"
    assert len(begun[1]) == len(begun[2]) == 20


def test_when_the_one_stands_still_another_warms_up():
    events = (Event(at=0.055, kind="pause", worker=0, duration=60.0),)
    begun = computed("downpour:warm_start=0.5", machines(3, *events), steps=20)
    assert 5 < begun[1][0] < 7, "the clock waits for five seconds"
    assert len(begun[0]) >= 20


def test_a_warm_start_of_one_worker_changes_nothing():
    options = {"workers": 1, "steps": 10, "dtype": "float64"}
    warm = virtual("digits-mlp", "downpour:warm_start=0.5 ps:shards=2", **options)
    assert torch.equal(warm.params, virtual("digits-mlp", "downpour ps:shards=2", **options).params)


def test_adagrad_with_a_warm_start_stays_where_a_fixed_rate_does_not():
    """Sixteen workers in turn on a parabola: a fixed rate is unstable from 2 sin(pi / 62) on, 20 times below one's."""
    workers, lr = 16, 1.0
    assert lr > 2 * math.sin(math.pi / (2 * (2 * workers - 1)))
    kinds = (Machines(count=workers, compute=LogNormal(seconds=0.01, sigma=0.3)),)
    job = bowls([(1.0, 0.0)] * workers, lr=lr, start=1.0)
    fixed = virtual(job, "downpour ps", Cluster(machines=kinds), steps=30)
    warm = virtual(job, "downpour:server=adagrad,warm_start=0.05 ps", Cluster(machines=kinds), steps=30)
    assert not abs(float(fixed.params)) < 100
    assert abs(float(warm.params)) < 1


REAL = {"workers": 2, "steps": 60, "lr": 0.05}


def test_for_real_the_others_wait_for_the_warm_start(fork_server):
    run = local("digits-mlp", "downpour:warm_start=0.5 ps:shards=2", fork_server=fork_server, **REAL)
    assert [row["steps"] for row in run.outcome.totals.per_worker.values()] == [60, 60]
    assert run.outcome.totals.time["wait"] > 0
    assert run.outcome.history[-1]["accuracy"] > 0.7


@pytest.mark.long
def test_for_real_a_checkpoint_in_the_warm_start_does_not_wait_for_those_who_wait(tmp_path):
    """They can go on only when the one has gone on, which stands still until all have stopped."""
    options = {"workers": 2, "steps": 40, "lr": 0.05, "checkpoint_every": 5, "out": tmp_path}
    run = dure.train("digits-mlp", strategy="downpour:warm_start=0.5 ps", on="local", **options)
    assert run.summary()["updates_applied"] == 80
    assert checkpoint.load(tmp_path / "checkpoints").step % 5 == 0


# ---- beside the computation


def test_what_overlaps_takes_no_time():
    """A push and a fetch of 1,000 elements take 4 ms each at 1 MB/s, a gradient 10 ms."""
    cluster, job = machines(1, bandwidth=1e6), load_job("quadratic", dim=1000)
    alone = virtual(job, "downpour ps", cluster, steps=20)
    beside = virtual(job, "downpour:overlap=true ps", cluster, steps=20)
    assert alone.seconds == pytest.approx(20 * 0.018, rel=0.05)
    assert beside.seconds == pytest.approx(20 * 0.01 + 0.008, rel=0.05)
    assert beside.outcome.totals.time["communicate"] < 0.1 * alone.outcome.totals.time["communicate"]
    assert beside.summary["updates_applied"] == 20


def test_what_goes_on_beside_the_gradient_is_two_steps_older():
    """One worker: a fetch that begins with a step is used at the next, and has not seen the push of the one before."""
    q = 0.4
    run = virtual(bowls([(1.0, 0.0)], lr=q, start=1.0), "downpour:overlap=true ps", machines(1), steps=12)
    path = [1.0]
    for step in range(12):
        path.append(path[step] - q * path[max(0, step - 2)])
    assert float(run.params) == pytest.approx(path[-1], rel=1e-12)


@pytest.mark.parametrize("method", ["downpour:overlap=true", "downpour:n_push=3,n_fetch=2,overlap=true,local_lr=0.05"])
def test_nothing_that_is_on_its_way_is_lost(method):
    """Whatever was accrued is pushed by the end, and counts once: on a tilted plane every order gives the same."""
    job = bowls([(0.0, 1.0), (0.0, 2.0), (0.0, 4.0)], lr=0.125)
    run = virtual(job, f"{method} ps", machines(3, bandwidth=1e4), steps=10)
    assert float(run.params) == 0.125 * 10 * 7.0


def test_for_real_with_overlap_every_gradient_counts(fork_server):
    run = local("digits-mlp", "downpour:overlap=true ps:shards=2", fork_server=fork_server, **REAL)
    assert run.outcome.totals.counts["updates_applied"] == 120
    assert run.outcome.history[-1]["accuracy"] > 0.7


# ---- whenever a push or a fetch is due


@pytest.mark.parametrize(("n_push", "n_fetch"), [(1, 1), (1, 3), (2, 1), (2, 2), (2, 3), (3, 2)])
def test_one_worker_makes_the_steps_of_the_paper(n_push, n_fetch, tmp_path):
    """Whatever is due together, with checkpoints between or not: the gradient of w^2 / 2 is w."""
    job = bowls([(1.0, 0.0)], lr=0.1, start=1.0)
    how = {"checkpoint_every": 4, "out": tmp_path}
    text = f"downpour:n_push={n_push},n_fetch={n_fetch} ps"
    server = cache = 1.0
    accrued = 0.0
    for step in range(13):
        if step % n_fetch == 0:
            cache = server
        accrued += cache
        if step % n_push == 0 or step == 12:
            server, accrued = server - 0.1 * accrued, 0.0
    for options in ({}, how):
        run = virtual(job, text, machines(1), steps=13, **options)
        assert float(run.params) == pytest.approx(server, rel=1e-12)


SPEEDS = (0.7, 0.61, 0.47, 0.23)
"""Of four workers whose steps never end at the same time; messages take no time beside steps of a second."""


@dataclass
class Reference:
    """Algorithm 7.1 of Dean et al. on w^2 / 2, written from the paper: its server, and what it counts."""

    value: float
    version: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    pulls: int = 0


def reference(steps: int, n_push: int, n_fetch: int, lr: float, remedy: str = "") -> Reference:
    server = Reference(1.0)
    caches: dict[int, tuple[float, int]] = {}
    accrued = dict.fromkeys(range(len(SPEEDS)), 0.0)

    def fetch(worker: int) -> None:
        caches[worker] = server.value, server.version
        server.pulls += 1

    for worker in accrued:
        fetch(worker)
    ends = sorted(((step + 1) / speed, worker, step) for worker, speed in enumerate(SPEEDS) for step in range(steps))
    for _, worker, step in ends:
        cache, version = caches[worker]
        accrued[worker] += cache
        if step % n_push == 0 or step == steps - 1:
            update, delay = accrued[worker], server.version - version
            if remedy == "dc-asgd:lambda=1":
                update += update**2 * (server.value - cache)
            if remedy == "staleness-lr":
                update /= max(delay, 1)
            server.value -= lr * update
            server.version += 1
            server.staleness[delay] += 1
            accrued[worker] = 0.0
        if (step + 1) % n_fetch == 0 and step < steps - 1:
            fetch(worker)
    return server


@pytest.mark.sampled(5)
@pytest.mark.parametrize("remedy", ["", "dc-asgd:lambda=1", "staleness-lr"])
@pytest.mark.parametrize(("steps", "n_push", "n_fetch"), [(5, 2, 1), (6, 2, 1), (6, 2, 2), (6, 4, 3), (7, 3, 1)])
def test_several_workers_make_the_steps_of_the_paper(steps, n_push, n_fetch, remedy):
    """Values, the staleness of each push, and the number of pulls; in the last three cases a partial push is left."""
    server = reference(steps, n_push, n_fetch, 0.1, remedy)
    job = bowls([(1.0, 0.0)] * 4, lr=0.1, start=1.0)
    kind = Machines(count=4, compute=Constant(seconds=1.0), speed=SPEEDS)
    cluster = Cluster(machines=(kind,), link=Link(bandwidth=1e12, latency=1e-6), alpha=0.0, beta=0.0, gamma=0.0)
    text = f"downpour:n_push={n_push},n_fetch={n_fetch}" + (f"+{remedy}" if remedy else "")
    run = virtual(job, f"{text} ps", cluster, steps=steps)
    assert run.outcome.totals.staleness.histogram == server.staleness
    assert float(run.params) == pytest.approx(server.value, rel=1e-12)
    assert run.summary["bytes_received"] == 8 * server.pulls


OVERLAPS = Downpour(overlap=True)


@pytest.mark.parametrize(
    "method", [Downpour(n_push=3, n_fetch=2), OVERLAPS, replace(OVERLAPS, n_fetch=3), Downpour(at_once=True)], ids=str
)
@pytest.mark.parametrize("steps", [1, 5, 6])
def test_no_pull_follows_the_last_gradient(method, steps):
    job = bowls([(1.0, 0.0)] * 2, lr=0.1)
    run = virtual(job, f"{member_text('sync', method)} ps", machines(2), steps=steps)
    assert run.summary["bytes_received"] == 2 * 8 * math.ceil(steps / method.n_fetch)


def test_servers_that_are_to_do_sgd_have_none_of_the_job_s_momentum():
    job = bowls([(1.0, 0.0)], lr=0.1, start=1.0)
    optimizer = "momentum:lr=0.1,nesterov=true"
    plain = virtual(job, "downpour:server=sgd ps", machines(1), steps=5, optimizer=optimizer)
    assert float(plain.params) == pytest.approx(0.9**5, rel=1e-6)
    rolling = virtual(job, "downpour:server=job ps", machines(1), steps=5, optimizer=optimizer)
    assert float(rolling.params) < 0.5


# ---- push and fetch in one call


@pytest.mark.parametrize("topology", ["ps", "ps:shards=3,split=layer", "ps fp16", "ps:colocated=true"])
def test_at_once_one_worker_makes_the_same_steps_with_half_the_messages(topology):
    apart, once = (
        virtual("digits-mlp", f"downpour{how} {topology}", machines(1), steps=20) for how in ("", ":at_once=true")
    )
    assert torch.equal(apart.params, once.params)
    assert apart.summary["bytes_sent"] == once.summary["bytes_sent"]
    assert apart.summary["bytes_received"] == once.summary["bytes_received"]
    assert once.summary["messages"] < 0.6 * apart.summary["messages"]


def test_at_once_a_step_takes_a_latency_there_and_one_back():
    """Rather than two of each: a gradient takes 10 ms, a message 5 ms."""
    cluster = machines(1).changed(link=Link(bandwidth=1e12, latency=5e-3))
    apart, once = (virtual("quadratic", f"downpour{how} ps", cluster, steps=50) for how in ("", ":at_once=true"))
    assert apart.seconds == pytest.approx(50 * 0.030, abs=0.05)
    assert once.seconds == pytest.approx(50 * 0.020, abs=0.05)


def test_at_once_what_comes_back_has_the_own_update_in_it():
    job = bowls([(1.0, 0.0)], lr=0.4, start=1.0)
    run = virtual(job, "downpour:at_once=true ps", machines(1), steps=12)
    assert float(run.params) == pytest.approx(0.6**12, rel=1e-12)


def test_for_real_at_once_every_gradient_counts(fork_server):
    run = local("digits-mlp", "downpour:at_once=true,warm_start=0.1 ps:shards=2", fork_server=fork_server, **REAL)
    assert run.outcome.totals.counts["updates_applied"] == 120
    assert run.outcome.history[-1]["accuracy"] > 0.7


@pytest.mark.parametrize("more", [{"n_push": 2}, {"n_fetch": 2}, {"local_lr": 0.1}, {"overlap": True}])
def test_at_once_is_after_every_step(more):
    with raising(ValueError, "at_once"):
        Downpour(at_once=True, **more)


# ---- parameters


@pytest.mark.parametrize("share", [-0.1, 1.0, math.nan])
def test_a_warm_start_is_a_share(share):
    with raising(ValueError, "warm_start"):
        Downpour(warm_start=share)
