"""AD-PSGD: the mean of all models is what all have learned, whoever averages with whom, and nobody waits."""

from __future__ import annotations

import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from oracles.test_laws import one_slow
from support import gossip_jobs
from support.real_runs import Trial
from support.runs import bowls, local, virtual
from support.scattered import scattered
from support.wording import raising

import dure
from dure.core.mixing import pairwise_mixing
from dure.errors import StrategyError, UsageError
from dure.run.config import TrainConfig
from dure.run.process import FaultSettings
from dure.run.strategy import Strategy
from dure.runtime.virtual.cluster import Cluster, Event, Link, Machines
from dure.runtime.virtual.compute import Constant, LogNormal, ShiftedExponential, Trace
from dure.topology.gossip.choice import Gossip
from dure.topology.gossip.graph import build
from dure.topology.gossip.topology import GIVE_UP_STEPS, LEAVE_SECONDS, Peer

GRAPHS = ("ring", "exponential", "complete", "random-regular,degree=3")
STARTS = [8.0, -2.0, 1.0, 5.0, 0.0, 12.0]


def uneven(*events: Event, link: Link = Link()) -> Cluster:  # noqa: B008
    compute = LogNormal(seconds=0.01, sigma=0.5)
    return Cluster(machines=(Machines(count=6, compute=compute),), events=events, link=link)


@pytest.mark.long
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("cluster", [uneven(), uneven(link=Link(latency=0.02)), Cluster.uniform(6)])
def test_without_gradients_the_mean_stays_and_all_come_to_it(graph, cluster):
    """Also where a message takes longer than a step, and where all ask at the very same moment."""
    mean, models, segment = scattered(f"ad-psgd gossip:graph={graph}", STARTS, cluster, steps=150)
    assert mean == pytest.approx(4.0, abs=1e-12)
    assert models == pytest.approx([4.0] * 6, abs=0.05)
    peers = [worker.peer for worker in segment.workers.values()]
    assert min(peer.averaged for peer in peers) > 10
    assert not any(peer._met or peer.turn.asking is not None for peer in peers)


@pytest.mark.long
@pytest.mark.parametrize(("graph", "steps"), [("ring", 18), ("exponential", 5), ("random-regular", 8)])
def test_models_come_together_at_the_rate_of_the_gap(graph, steps):
    """From the slowest direction, the distance of 16 models from their mean shrinks like (1 - gap)^averagings.

    Were each averaging independent of those before, its square would keep between (1 - gap)^2k (Jensen) and
    (1 - gap)^k; that who has just been asked does not ask makes it a little faster. Within 25 %, and 3 standard errors.
    """
    values, vectors = np.linalg.eigh(pairwise_mixing(build(Gossip(graph), 16)))
    cluster = Cluster(machines=(Machines(count=16, compute=ShiftedExponential(seconds=0.01, shift=0.0)),))
    left, averagings = [], []
    for seed in range(8):
        starts = (vectors[:, -2] / np.std(vectors[:, -2])).tolist()
        _, models, segment = scattered(f"ad-psgd gossip:graph={graph}", starts, cluster, steps=steps, seed=seed)
        row = segment.whole.history[-1]
        assert row["consensus"] == pytest.approx(np.std(models), rel=1e-9)
        left.append(row["consensus"] ** 2)
        averagings.append(sum(worker.peer.averaged for worker in segment.workers.values()) / 2)
    error = 3 * np.std(left) / len(left) ** 0.5
    fast, slow = (values[-2] ** (2 * factor * np.mean(averagings)) for factor in (1.25, 0.75))
    assert fast - error < np.mean(left) < slow + error
    assert error < slow - fast, "so that it says something"


def test_each_gradient_moves_the_mean_by_its_share_and_by_nothing_else():
    """f = -b w has the gradient -b everywhere: the mean is start + lr x (sum over workers of steps x b) / K."""
    pushes = [8.0, -2.0, 1.0, 5.0]
    job = bowls([(0.0, push) for push in pushes], lr=0.25, start=1.0)
    for cluster in (Cluster.uniform(4), Cluster(machines=(Machines(count=4, compute=LogNormal(sigma=1.0)),))):
        run = virtual(job, "ad-psgd gossip:graph=ring", cluster, steps=40)
        assert float(run.params) == pytest.approx(1.0 + 0.25 * 40 * sum(pushes) / 4, rel=1e-12)


def test_on_processes_too(fork_server):
    """Whatever the real order of things: three processes, 300 steps, and nothing is lost or counted twice."""
    job, options = f"{gossip_jobs.__file__}:linear", {"workers": 3, "steps": 300}
    run = local(job, "ad-psgd gossip:graph=complete", fork_server=fork_server, **options)
    assert float(run.params) == pytest.approx(1.0 + 0.25 * 300 * sum(gossip_jobs.PUSHES) / 3, rel=1e-12)
    sent = [counted["bytes_sent"] for counted in run.outcome.totals.per_worker.values()]
    assert sum(sent) > 0, "on a busy machine one worker may finish before another has begun, but not each in its turn"


def test_a_worker_that_the_checkpoint_lacks_is_resumed_as_a_copy_of_its_neighbor(fork_server, tmp_path):
    config = TrainConfig(
        job=f"{gossip_jobs.__file__}:linear", strategy="ad-psgd gossip:graph=complete", workers=2, steps=150,
        checkpoint_every=100, on="local", out=tmp_path,
    )  # fmt: skip
    Trial(config, FaultSettings(absent=(1,))).run(fork_server=fork_server)
    outcome = Trial(replace(config, steps=300, resume=tmp_path)).run(fork_server=fork_server)
    assert [outcome.totals.per_worker[f"worker {rank}"]["steps"] for rank in range(2)] == [300, 200]
    assert float(outcome.params) == pytest.approx(1.0 + 0.25 * (100 * 8.0 + 200 * (8.0 - 2.0) / 2), rel=1e-12)


@pytest.mark.long
def test_a_process_that_is_stopped_for_a_while_holds_nobody_up(fork_server):
    """The others give up waiting for its answer; when it wakes, nothing has been averaged by half."""
    config = TrainConfig(
        job=f"{gossip_jobs.__file__}:linear",
        strategy="ad-psgd gossip:graph=complete",
        workers=3,
        steps=1500,
        on="local",
    )
    trial = Trial(config)
    happened: dict[str, Any] = {}

    def act(trial: Trial) -> None:
        driver, now = trial.driver, time.monotonic()
        if "stop" not in happened and driver.steps("worker 1") > 50:
            happened["stop"] = now
            trial.fork_server.signal("worker 1", signal.SIGSTOP)
        elif "go on" not in happened and min(driver.steps("worker 0"), driver.steps("worker 2")) == 1500:
            happened["go on"] = now
            trial.fork_server.signal("worker 1", signal.SIGCONT)

    outcome = trial.run(act, fork_server=fork_server)
    assert outcome.params is not None
    assert float(outcome.params) == pytest.approx(1.0 + 0.25 * 1500 * sum(gossip_jobs.PUSHES) / 3, rel=1e-12)
    assert happened["go on"] > happened["stop"], "the others have done their steps meanwhile"
    assert outcome.totals.failures_survived == 0


def test_snapshots_are_taken_on_the_way(fork_server):
    run = local("digits-mlp", "ad-psgd", fork_server=fork_server, workers=2, steps=120, eval_every=50)
    first, second, last = [row["step"] for row in run.outcome.history]  # of the slower
    assert first <= 50
    assert first <= second <= 100
    assert last == 120
    assert run.outcome.history[-1]["accuracy"] > 0.7


@pytest.mark.long
def test_averaging_is_what_keeps_them_together():
    """On bowls of different places each would come to its own; together they stay near the mean of all places."""
    job = bowls([(1.0, float(place)) for place in (8, -2, 1, 5)], lr=0.05)
    run = virtual(job, "ad-psgd gossip:graph=complete", workers=4, steps=400)
    assert float(run.params) == pytest.approx(3.0, abs=0.1)


def test_a_slow_worker_delays_nobody():
    cluster = one_slow()
    _, _, segment = scattered("ad-psgd gossip:graph=ring", STARTS[:4], cluster, steps=50, lr=0.01)
    alone = virtual("quadratic", "downpour ps", cluster, steps=50)
    assert segment.totals.seconds == pytest.approx(alone.seconds, rel=0.05)
    for rank in range(4):
        meter = segment.runtime.nodes[f"worker {rank}"].meter.seconds
        assert meter["wait"] == meter["communicate"] == 0.0


def test_a_model_travels_each_way_per_averaging():
    run = virtual("digits-mlp", "ad-psgd gossip:graph=complete", workers=4, steps=30)
    sent = [counted["bytes_sent"] for counted in run.outcome.totals.per_worker.values()]
    nbytes = run.setup.replica.numel * 4
    assert all(total % nbytes == 0 for total in sent)
    assert 0.8 * 4 * 30 <= sum(sent) / nbytes <= 2.5 * 4 * 30


# ---- who dies, stands still, comes late, is through


@pytest.mark.sampled(10)
@pytest.mark.parametrize("at", [0.0301 + 0.00007 * moment for moment in range(25)])
def test_a_death_at_any_moment_leaves_nobody_with_half_of_an_averaging(at):
    """With models of 1 and one of 0 that dies: what is not settled is taken back, so that powers of two are left."""
    cluster = Cluster(
        machines=(Machines(count=3, compute=Constant(seconds=0.01)),),
        events=(Event(at=at, kind="crash", worker=2),),
        link=Link(latency=2e-4),
    )
    _, models, segment = scattered("ad-psgd gossip:graph=complete", [1.0, 1.0, 0.0], cluster, steps=30)
    survivors = [segment.workers[rank] for rank in (0, 1)]
    assert not any(worker.peer._met or worker.peer.turn.asking is not None for worker in survivors)
    assert models[0] == pytest.approx(models[1], abs=1e-6)
    assert 0 < models[0] <= 1
    assert segment.steps[:2] == [30, 30]


def test_whoever_stands_still_is_left_alone_and_welcome_back():
    seconds = 0.01 * (GIVE_UP_STEPS + 60)
    cluster = Cluster(
        machines=(Machines(count=4, compute=Constant(seconds=0.01)),),
        events=(Event(at=0.105, kind="pause", worker=1, duration=seconds),),
    )
    steps = GIVE_UP_STEPS + 200
    mean, models, segment = scattered("ad-psgd gossip:graph=complete", STARTS[:4], cluster, steps=steps)
    assert mean == pytest.approx(3.0, abs=1e-12)
    assert models == pytest.approx([3.0] * 4, abs=1e-3)
    assert segment.totals.seconds == pytest.approx(0.01 * steps + seconds, rel=0.02)
    assert segment.runtime.nodes["worker 0"].meter.seconds["compute"] == pytest.approx(0.01 * steps)


def test_a_newcomer_begins_as_a_copy_of_a_neighbor_at_its_clock():
    cluster = Cluster(
        machines=(Machines(count=3, compute=Constant(seconds=0.01)),),
        events=(Event(at=0.3, kind="join", worker=2),),
    )
    _, models, segment = scattered("ad-psgd gossip:graph=ring", [4.0, 4.0, 4.0], cluster, steps=60)
    assert 28 <= segment.workers[2].joined_at <= 32
    assert segment.steps == [60, 60, 60 - segment.workers[2].joined_at]
    assert models == [4.0] * 3
    assert segment.workers[2].peer.averaged > 5


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(4))
def test_workers_that_come_and_go_all_the_time(seed):
    moments = torch.rand(12, generator=torch.Generator().manual_seed(seed)).sort().values.tolist()
    events, there = [], dict.fromkeys(range(6), True)
    for number, moment in enumerate(moments):
        worker = (number * 5 + seed) % 6
        events.append(Event(at=0.05 + moment, kind="crash" if there[worker] else "join", worker=worker))
        there[worker] = not there[worker]
    run = virtual("digits-mlp", "ad-psgd gossip:graph=ring", uneven(*events), steps=150, seed=seed)
    assert run.summary["accuracy"] > 0.9
    assert run.summary["failures_survived"] == sum(event.kind == "crash" for event in events)


def test_a_checkpoint_keeps_the_models_of_those_who_are_through(tmp_path):
    """The time is up for worker 0 when worker 1, whose last step is long, comes to the checkpoint."""
    quick = Trace(durations=(0.02, 0.02, 0.02, 0.02, 0.1, 0.02), start="first")
    cluster = Cluster(machines=(Machines(compute=Constant(seconds=0.03)), Machines(compute=quick)))
    options = {"strategy": "ad-psgd gossip:graph=ring", "on": cluster, "seconds": 0.1}
    whole = dure.train("digits-mlp", out=tmp_path / "whole", checkpoint_every=5, **options)
    assert (tmp_path / "whole" / "checkpoints" / "step-5" / "retired-0.json").exists()
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    again = dure.train("digits-mlp", on=cluster, resume=tmp_path / "again")
    alone = dure.train("digits-mlp", **options)
    assert again.summary()["params_sha256"] == whole.summary()["params_sha256"] == alone.summary()["params_sha256"]


# ---- what is refused


def test_where_it_does_not_run():
    with raising(StrategyError, "ad-psgd"):
        Strategy.parse("ad-psgd ps")
    with raising(StrategyError, "gossip"):
        Strategy.parse("ssp gossip")


@pytest.mark.long
def test_a_graph_may_be_an_object():
    """Also for real: its pairs travel as text."""
    star = nx.star_graph(["x", "a", "b"])  # in the order of their names x is the last
    run = dure.train("digits-mlp", sync="ad-psgd", topology=dure.Gossip(star), on="local", workers=3, steps=20)
    assert run.summary()["strategy"]["topology"] == "gossip:graph=0-2/1-2"
    assert run.summary()["graph"]["edges"] == [[0, 2], [1, 2]]
    assert run.summary()["graph"]["gap"] == pytest.approx(0.25)


def test_a_graph_that_does_not_fit_is_refused_before_anything_starts(tmp_path: Path):
    path = tmp_path / "five.edges"
    path.write_text("0 1\n1 2\n2 3\n3 4\n")
    with raising(UsageError, "has 5"):
        dure.train("digits-mlp", strategy=f"ad-psgd gossip:graph={path}", workers=4, on="virtual")
    run = dure.train("digits-mlp", strategy=f"ad-psgd gossip:graph={path}", workers=5, on="virtual", steps=20)
    assert run.summary()["samples"] == 5 * 20 * 32


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("frozen", [0.1905, 0.1915, 0.1925, 0.1935, 0.195])
def test_at_its_end_a_worker_does_not_wait_for_a_frozen_neighbor(frozen, worker, monkeypatch):
    """Of two, one stands still for ten minutes near the end of the other, whatever they are in the middle of."""
    left: dict[int, float] = {}
    leave = Peer.leave

    async def timed(peer: Peer) -> None:
        await leave(peer)
        left[peer.rank] = peer.node.now()

    monkeypatch.setattr(Peer, "leave", timed)
    cluster = Cluster(
        machines=(Machines(count=2, compute=Constant(seconds=0.01)),),
        link=Link(latency=1e-3),
        events=(Event(at=frozen, kind="pause", worker=worker, duration=600.0),),
    )
    virtual("quadratic", "ad-psgd gossip:graph=complete", cluster, steps=20)
    assert left[1 - worker] < 0.2 + 2 * LEAVE_SECONDS + 0.1
    assert left[worker] > 600
