"""A whole run in virtual time: the same bits twice, events, deadlocks, and what is counted."""

from __future__ import annotations

import gc
import json
import math
import weakref
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.runs import Finished, bowls, resolved, virtual
from support.wording import raising
from torch import nn

import dure
from dure.core.collective_cost import chunk_bytes
from dure.core.vectors import size
from dure.errors import DeadlockError, DivergedError, DureError, StrategyError, UsageError
from dure.job.job import Job, load_job
from dure.job.optimizer import OptimizerSpec
from dure.job.overlap import LEAST_NBYTES
from dure.planner.probe.short_runs import synthetic_job
from dure.run.config import TrainConfig
from dure.run.prebuilt import Callbacks
from dure.run.resolve import resolve
from dure.run.virtual import VirtualRun, VirtualSegment
from dure.runtime.virtual.cluster import Cluster, Event, Link, Machines, ServerMachines
from dure.runtime.virtual.compute import Constant, LogNormal, ShiftedExponential
from dure.sync import REMEDIES
from dure.topology.parameter_server.policies import Barrier
from dure.topology.parameter_server.topology import split

STRATEGIES = [
    "bsp collective",
    "bsp ps:shards=2",
    "averaging:period=3 collective",
    "averaging:period=3 ps:shards=2",
    "downpour:n_push=2,n_fetch=3 ps:shards=2",
    "ssp:bound=2 ps:shards=2,split=layer",
]
OVER_SERVERS = [strategy for strategy in STRATEGIES if "ps" in strategy]


def machines(workers: int, *events: Event, **kinds: Any) -> Cluster:
    """Steps of 10 ms and a fast network, so that times can be told in the head."""
    compute = kinds.pop("compute", Constant(seconds=0.01))
    return Cluster(
        machines=(Machines(count=workers, compute=compute, **kinds),),
        link=Link(bandwidth=1e11, latency=1e-6),
        alpha=0.0,
        beta=0.0,
        gamma=0.0,
        events=events,
    )


def steps_of(run: Finished) -> list[int]:
    table = run.outcome.totals.per_worker
    return [table.get(f"worker {rank}", {}).get("steps", 0) for rank in range(run.setup.workers)]


# ---- the same run, the same bits


@pytest.mark.long
def test_the_run_of_the_readme_twice():
    def train(seed: int, steps: int = 200) -> dict[str, Any]:
        options = {"topology": "ps:shards=2", "on": "virtual", "workers": 8, "steps": steps, "seed": seed}
        return dure.train("digits-mlp", sync="ssp:bound=3", **options).summary()

    first, second = train(0), train(0)
    measured = {"batching", "evaluation_seconds"}
    assert {key: first[key] for key in first.keys() - measured} == {
        key: second[key] for key in second.keys() - measured
    }
    assert first["accuracy"] >= 0.93
    assert train(0, steps=5)["params_sha256"] != train(1, steps=5)["params_sha256"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_random_compute_times_repeat(strategy):
    cluster = Cluster(machines=(Machines(count=5, compute=LogNormal(sigma=0.5)),))
    runs = [virtual("digits-mlp", strategy, cluster, steps=7, seed=seed, eval_every=2) for seed in (3, 3, 4)]
    same = [(run.summary["params_sha256"], run.seconds, run.rows, run.outcome.totals.events) for run in runs]
    assert same[0] == same[1]
    assert same[0] != same[2]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_unequal_shares_repeat(strategy):
    """The bits of a run follow from its seed, the shares of its messages too."""
    cluster = Cluster(machines=(Machines(count=5),), link=Link(bandwidth=1e7), unfairness=0.3)
    runs = [virtual("digits-mlp", strategy, cluster, steps=7, seed=seed, eval_every=2) for seed in (3, 3, 4)]
    same = [(run.summary["params_sha256"], run.seconds, run.rows, run.outcome.totals.events) for run in runs]
    assert same[0] == same[1]
    assert same[0] != same[2]


def test_unequal_shares_let_pushes_overlap_with_pulls():
    """Equal steps and equal shares keep two workers in phase: both push at half the rate, then both pull.

    With unequal shares they spread, and a push uses another direction of the server's card than a pull. The least that
    a step can take is its compute and a push and a pull at the full rate.
    """
    seconds = []
    push, compute, steps = 0.2, 0.1, 50
    for unfairness in (0.0, 0.3):
        link = Link(bandwidth=(1 << 20) / push, latency=0)
        kinds = (Machines(count=2, compute=Constant(seconds=compute)),)
        cluster = Cluster(machines=kinds, link=link, alpha=0, beta=0, gamma=0, unfairness=unfairness)
        run = virtual(synthetic_job([1 << 18], compute), "downpour ps", cluster, steps=steps, timing_only=True)
        seconds.append(run.seconds / steps)
    assert seconds[0] == pytest.approx(compute + 4 * push, rel=0.03)
    assert compute + 2 * push < seconds[1] < 0.9 * seconds[0]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_change_nothing_about_time(strategy):
    cluster = Cluster(machines=(Machines(count=6, compute=ShiftedExponential()),), link=Link(bandwidth=1e7))
    runs = [virtual("digits-mlp", strategy, cluster, steps=8, timing_only=timing) for timing in (False, True)]
    with_gradients, without = (run.outcome.totals.state() for run in runs)
    assert with_gradients == without


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "remedy", [*REMEDIES, "dc-asgd:mode=adaptive", "dc-asgd:mode=adaptive,squares=shared,clip=true"]
)
def test_remedies_without_gradients_take_the_same_time(remedy, tmp_path):
    def run(**options: Any) -> dict[str, Any]:
        given = {"on": machines(3, compute=LogNormal(sigma=0.5)), "steps": 12, **options}
        return dure.train("digits-mlp", strategy=f"downpour+{remedy} ps:shards=2", **given).summary()

    alike = ("seconds", "bytes_sent", "messages", "updates_applied", "staleness", "time_share", "per_worker")
    real, timed = run(), run(timing_only=True)
    assert {name: timed[name] for name in alike} == {name: real[name] for name in alike}
    saved = {"checkpoint_every": 5, "out": tmp_path / "run"}
    assert run(timing_only=True, **saved)["samples"] == real["samples"]


def normalized() -> Job:
    """Batch norm, whose running statistics are a fifth of its bytes."""

    def model() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(64, affine=False), nn.Linear(64, 10))

    return replace(load_job("digits-mlp"), model=model, name="normalized")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["averaging:period=3", "diloco:period=3", "bmuf:period=3,overlap=1", "one-shot"])
def test_buffers_without_values_have_their_size(strategy, tmp_path):
    def run(name: str, **options: Any) -> list[Any]:
        cluster = machines(3, compute=LogNormal(sigma=0.5))
        more = {"checkpoint_every": 6, "out": tmp_path / name}
        summary = dure.train(normalized(), strategy=strategy, on=cluster, steps=12, **more, **options).summary()
        return [summary[key] for key in ("seconds", "bytes_sent", "messages")]

    assert run("timed", timing_only=True) == run("real")


@pytest.mark.long
@pytest.mark.parametrize(("workers", "steps"), [(64, 10), (300, 2)])
def test_many_workers_without_gradients_take_the_same_time(workers, steps):
    job = load_job("digits-mlp", hidden=8)
    cluster = Cluster(machines=(Machines(count=workers, compute=LogNormal()),))
    runs = [
        virtual(job, "ssp:bound=2 ps:shards=4", cluster, steps=steps, batch_size=1, timing_only=timing, split="whole")
        for timing in (False, True)
    ]
    assert runs[0].outcome.totals.state() == runs[1].outcome.totals.state()
    assert runs[1].summary["params_sha256"] == ""


# ---- what happens to workers


@pytest.mark.parametrize("strategy", OVER_SERVERS)
def test_a_crash_is_survived(strategy):
    run = virtual("digits-mlp", strategy, machines(4, Event(at=0.105, kind="crash", worker=1)), steps=30)
    assert steps_of(run) == [30, 10, 30, 30]
    assert run.summary["failures_survived"] == 1
    waits = 0.0 if "downpour" in strategy else 0.05  # until the death is noticed
    assert 0.3 <= run.seconds < 0.3 + waits + 0.01
    assert run.summary["samples"] == 32 * 100


@pytest.mark.parametrize(
    ("strategy", "remedy", "mended"),
    [
        ("averaging collective", "take a method over servers, such as bsp with --topology ps", "bsp ps"),
        ("bsp hybrid", "take a method over servers, such as bsp with --topology ps", "bsp ps"),
        ("gpipe", "the partition, and take a method over servers, such as bsp with --topology ps", "bsp ps"),
        ("averaging ps gpipe", "Leave the event out, or the partition.", "averaging ps"),
    ],
)
def test_a_run_with_the_remedy_for_an_event_survives_it(strategy, remedy, mended):
    cluster = machines(4, Event(at=0.035, kind="crash", worker=1))
    with pytest.raises(UsageError, match="needs every worker all the time") as refused:
        virtual("digits-mlp", strategy, cluster, steps=6)
    assert remedy in str(refused.value)
    assert virtual("digits-mlp", mended, cluster, steps=6).summary["failures_survived"] == 1


@pytest.mark.parametrize("detection", [0.0, 0.3])
def test_a_crash_is_noticed_when_the_cluster_file_says(detection):
    """The others wait for the dead worker's gradient of step 11 from 0.11 s on, until 0.105 s and `detection`."""
    cluster = machines(3, Event(at=0.105, kind="crash", worker=1)).changed(detection=detection)
    run = virtual("quadratic", "bsp ps", cluster, steps=20)
    assert run.seconds == pytest.approx(max(0.11, 0.105 + detection) + 0.09, abs=1e-3)


def test_headers_and_plain_values_are_as_large_as_the_cluster_file_says():
    """One worker: all messages follow one another, so that each byte more takes its time of the link."""

    def seconds(**sizes: int) -> tuple[float, int]:
        link = Link(bandwidth=1e6, latency=0.0)
        run = virtual("quadratic", "downpour ps", machines(1).changed(link=link, **sizes), steps=5)
        return run.seconds, 2 * run.summary["messages"]  # each is answered

    (bare, messages), (headed, _) = seconds(header=0), seconds(header=100)
    assert headed - bare == pytest.approx(messages * 100 / 1e6)
    none, some, twice = (seconds(field=nbytes)[0] for nbytes in (0, 50, 100))
    assert twice - some == pytest.approx(some - none)
    assert some - none >= messages * 50 / 1e6, "each message has one plain value at least"


@pytest.mark.parametrize("strategy", OVER_SERVERS)
def test_a_crash_with_bytes_on_their_way(strategy):
    """A slow network: pushes take longer than a death takes to be noticed."""
    cluster = Cluster(
        machines=(Machines(count=3, compute=Constant(seconds=0.01)),),
        link=Link(bandwidth=1e5),
        events=tuple(Event(at=at, kind="crash", worker=w) for at, w in ((0.5, 1), (0.9, 2))),
    )
    run = virtual("digits-mlp", strategy, cluster, steps=4)
    assert steps_of(run)[0] == 4
    assert run.summary["failures_survived"] == 2


def test_a_push_under_way_is_lost_with_its_sender_and_frees_the_card_of_the_server():
    """Two pushes share the card of the server from 0.01 s on. After the crash the other one has all of it."""

    def pushed(count: int, *events: Event) -> Any:
        kind = Machines(count=count, compute=Constant(seconds=0.01))
        cluster = Cluster(machines=(kind,), link=Link(bandwidth=1e5, latency=0.0), events=events)
        return virtual("digits-mlp", "downpour ps", cluster, steps=1)

    alone = pushed(1)
    early, late = (pushed(2, Event(at=at, kind="crash", worker=1)) for at in (0.11, 0.31))
    assert late.seconds - early.seconds == pytest.approx((0.31 - 0.11) / 2)
    assert early.seconds - alone.seconds == pytest.approx((0.11 - 0.01) / 2, abs=0.005)  # the clock's messages, too
    for run in (early, late):
        for name in ("updates_applied", "bytes_sent", "bytes_received"):
            assert run.summary[name] == alone.summary[name]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("strategy", OVER_SERVERS)
@pytest.mark.parametrize("back", [0.11, 0.2])
def test_a_worker_comes_back(strategy, back):
    """Before its death was noticed (0.05 s), and after."""
    events = (Event(at=0.105, kind="crash", worker=1), Event(at=back, kind="join", worker=1))
    run = virtual("digits-mlp", strategy, machines(4, *events), steps=30)
    done = steps_of(run)
    assert done[0] == done[2] == done[3] == 30
    if "downpour" in strategy:
        assert done[1] == 30, "no clock: the newcomer goes on where the worker was"
    else:
        assert 15 < done[1] <= 32, "it may do over what its round had begun"
    assert run.summary["failures_survived"] == 1
    assert run.seconds < 0.55


@pytest.mark.parametrize("strategy", OVER_SERVERS)
def test_a_latecomer_takes_part(strategy):
    run = virtual("digits-mlp", strategy, machines(4, Event(at=0.1, kind="join", worker=3)), steps=30)
    done = steps_of(run)
    assert done[:3] == [30] * 3
    assert done[3] == 30 if "downpour" in strategy else 17 <= done[3] <= 22
    assert run.summary["failures_survived"] == 0


def test_who_would_join_after_the_end_does_not():
    run = virtual("digits-mlp", "ssp ps", machines(3, Event(at=9.0, kind="join", worker=2)), steps=10)
    assert steps_of(run) == [10, 10, 0]
    assert run.seconds < 0.2


def test_a_run_goes_on_when_somebody_joins_an_empty_cluster():
    events = [Event(at=0.055, kind="crash", worker=w) for w in range(2)] + [Event(at=1.0, kind="join", worker=0)]
    run = virtual("digits-mlp", "ssp ps", machines(2, *events), steps=10)
    assert steps_of(run) == [10, 5]
    assert 1.0 < run.seconds < 1.1


def test_nobody_is_left():
    events = [Event(at=0.055, kind="crash", worker=w) for w in range(2)]
    with raising(DureError, "0.055"):
        virtual("digits-mlp", "ssp ps", machines(2, *events), steps=10)


@pytest.mark.parametrize("strategy", ["bsp ps", "ssp ps:shards=2", "k-sync:k=4 ps", "backup:backups=0 ps"])
def test_word_of_a_death_does_not_overtake_what_the_dead_had_said(strategy):
    """Worker 2 has said that it is there and dies, and both are still on their way."""
    machines = Machines(count=4, compute=Constant(seconds=0.01))
    crash = Event(at=0.02, kind="crash", worker=2)
    cluster = Cluster(machines=(machines,), link=Link(latency=0.2), events=(crash,))
    run = virtual("quadratic", strategy, cluster, steps=4)
    assert run.summary["failures_survived"] == 1
    assert [row["steps"] for row in run.summary["per_worker"].values()] == [4, 4, 0, 4]


def test_the_last_crash_is_when_all_have_crashed():
    """Not when what was under way then has come to its end, nor what happens to the dead."""
    events = [Event(at=0.001 * at, kind="crash", worker=w) for at, w in ((1, 0), (2, 1))]
    with raising(DureError, "0.002"):
        virtual("digits-mlp", "downpour ps", machines(2, *events), steps=10)


@pytest.mark.parametrize(
    ("strategy", "seconds"),
    [("bsp", 0.4), ("bsp ps", 0.4), ("averaging:period=3", 0.4), ("ssp:bound=2 ps", 0.4), ("downpour ps", 0.4)],
)
def test_a_pause_costs_what_it_lasts(strategy, seconds):
    """Nobody is paused at the end, so that a pause of 0.1 s makes 0.3 s 0.4 s: everybody's, or its own."""
    run = virtual("digits-mlp", strategy, machines(3, Event(at=0.105, kind="pause", worker=1, duration=0.1)), steps=30)
    assert run.seconds == pytest.approx(seconds, abs=0.005)
    assert steps_of(run) == [30, 30, 30]
    compute = sum(node["compute"] for node in [run.outcome.totals.time])
    assert compute == pytest.approx(0.9 + 0.1, abs=0.005)


def test_a_pause_between_two_steps_holds_back_the_next():
    """The paused worker stands at a barrier: the round ends during the pause, its next step begins after it."""
    cluster = Cluster(
        machines=(Machines(count=2, compute=Constant(seconds=0.1), speed=(1.0, 0.5)),),
        events=(Event(at=0.15, kind="pause", worker=0, duration=0.25),),
    )
    for strategy in ("bsp", "bsp ps"):
        run = virtual("digits-mlp", strategy, cluster, steps=2)
        assert run.seconds == pytest.approx(0.5, abs=0.01), strategy


def test_a_slow_stretch_counts_as_far_as_it_lasts():
    """At half a step, ten times slower for 0.1 s: that stretch does a tenth of its work, 0.09 s are lost."""
    event = Event(at=0.105, kind="slow", worker=1, factor=10, duration=0.1)
    run = virtual("digits-mlp", "downpour ps", machines(2, event), steps=30)
    assert run.seconds == pytest.approx(0.39, abs=0.002)


def slow(at: float, factor: float, duration: float | None = None) -> Event:
    return Event(at=at, kind="slow", worker=1, factor=factor, duration=duration)


BACK = (Event(at=0.1, kind="crash", worker=1), Event(at=0.15, kind="join", worker=1))


@pytest.mark.parametrize("checkpoint_every", [None, 4])
@pytest.mark.parametrize(
    ("events", "seconds"),
    [
        ([slow(0.05, 10), slow(0.1, 2, 0.4)], 0.05 + 0.05 + 0.4 + (0.3 - 0.05 - 0.005 - 0.02) * 10),
        ([slow(0.05, 4, 0.4), slow(0.15, 5, 0.1)], 0.45 + (0.3 - 0.05 - 0.025 - 0.005 - 0.05)),
        ([slow(0.0, 2, 0.1), slow(0.05, 10)], 0.05 + 0.05 + (0.3 - 0.025 - 0.0025) * 10),
        (
            [slow(0.05, 10, 0.2), *BACK, slow(0.2, 5)],
            0.15 + 0.05 + (0.25 - 0.05) * 5,
        ),  # what was ends, what is does not
        ([slow(0.05, 10), *BACK], 0.15 + 0.25),
    ],
)
def test_what_slows_at_one_time_multiplies_and_ends_by_itself(events, seconds, checkpoint_every, tmp_path):
    """Worker 1 has 30 steps of 10 ms to do, from its return on the 25 that were left; with checkpoints as without."""
    more = {} if checkpoint_every is None else {"checkpoint_every": checkpoint_every, "out": tmp_path / "run"}
    run = virtual("digits-mlp", "downpour ps", machines(2, *events), steps=30, timing_only=True, **more)
    assert run.seconds == pytest.approx(seconds, abs=0.05)


@pytest.mark.parametrize("strategy", ["bsp", "averaging"])
@pytest.mark.parametrize("kind", ["crash", "join"])
def test_collectives_refuse_who_comes_and_goes(strategy, kind, tmp_path):
    cluster = machines(3, Event(at=1, kind=kind, worker=2))
    with pytest.raises(UsageError, match=f"worker 2 {kind} at 1 s.*collective.*--topology ps"):
        dure.train("digits-mlp", sync=strategy, topology="collective", on=cluster, steps=5, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# ---- nobody can go on


@dataclass(frozen=True)
class Forgetful:
    """Computes, and never pushes."""

    traits: ClassVar[dure.Traits] = dure.Traits(needs=("servers", "mean gradient"), lockstep=True)

    def server_rule(self, optimizer: Any) -> dure.ServerRule:
        return dure.ServerRule(optimizer, Barrier())

    async def work(self, worker: Any) -> None:
        await worker.server.admission()
        await worker.gradient()
        if worker.rank == 0:
            await worker.server.push(await worker.gradient())
            await worker.server.admission()
        else:
            await worker.node.recv("worker 0", worker.params, tag=worker.rank)


def test_a_deadlock_names_every_rank_and_what_it_waits_for():
    with pytest.raises(DeadlockError) as caught:
        dure.train("digits-mlp", sync=Forgetful(), topology="ps", on="virtual", workers=3, steps=10)
    message = str(caught.value)
    assert "worker 0 waits for ask of clock at server 0" in message
    assert "worker 1 waits for a message from worker 0" in message
    assert "worker 2 waits for a message from worker 0" in message


def test_a_loss_that_is_no_number_says_what_to_do():
    with raising(DivergedError, "learning"):
        virtual("quadratic", "bsp", workers=2, steps=300, lr=1e6)


# ---- when a run ends


@pytest.mark.sampled(5)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_ends_by_its_seconds(strategy):
    cluster = machines(4, compute=LogNormal(seconds=0.01, sigma=0.5))
    run = virtual("digits-mlp", strategy, cluster, seconds=0.25, eval_every=5)
    assert 0.25 <= run.seconds < 0.25 + 0.12
    assert min(steps_of(run)) >= 10
    assert (run.summary["steps"], run.rows[-1]["step"]) == (max(steps_of(run)), min(steps_of(run)))
    assert run.rows[-1]["seconds"] == run.seconds


# ---- what is recorded


@pytest.mark.parametrize(
    ("job", "strategy", "events", "options"),
    [
        ("quadratic", "bsp", (), {"steps": 20, "seconds": 0.105}),  # ends before its steps
        ("quadratic", "lbfgs ps", (), {"steps": 5}),  # an evaluation of all samples is more than 5 of its batches
        ("quadratic", "lbfgs:iterations=1 ps", (), {"steps": 500}),  # ends before its steps
        ("digits-mlp", "downpour ps", ("crash", "join"), {"steps": 16}),
    ],
)
def test_the_last_row_has_the_steps_of_the_slowest_worker(job, strategy, events, options):
    happening = (Event(at=0.1 + 0.01 * i, kind=kind, worker=1) for i, kind in enumerate(events))
    run = virtual(job, strategy, machines(2, *happening), eval_every=1, **options)
    steps = [row["step"] for row in run.rows]
    assert steps == sorted(steps)
    assert run.summary["steps"] == (16 if events else max(steps_of(run)))
    assert steps[-1] == (16 if events else min(steps_of(run)))
    assert (sum(steps_of(run)) == 2 * options["steps"]) == bool(events)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_history_is_in_order_and_ends_with_the_run(strategy):
    cluster = Cluster(machines=(Machines(count=4, compute=LogNormal(sigma=0.5)),))
    run = virtual("digits-mlp", strategy, cluster, steps=20, batch_sizes=(8, 16, 8, 4), eval_every=4)
    for key in ("seconds", "step", "samples", "bytes"):
        values = [row[key] for row in run.rows]
        assert values == sorted(values), key
    last, totals = run.rows[-1], run.outcome.totals
    assert len(run.rows) >= 5
    assert last["seconds"] == totals.seconds
    assert last["samples"] == totals.counts["samples"] == 20 * (8 + 16 + 8 + 4)
    assert last["bytes"] == totals.counts["bytes_sent"] == sum(n["bytes_sent"] for n in totals.per_worker.values())
    assert run.summary["time_share"]["compute"] + run.summary["time_share"]["wait"] <= 1
    assert math.isclose(sum(run.summary["time_share"].values()), 1.0)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_trace_shows_everybody_and_nothing_twice(strategy, tmp_path):
    cluster = Cluster(machines=(Machines(count=3, compute=LogNormal(sigma=0.5)),))
    run = dure.train("digits-mlp", strategy=strategy, on=cluster, steps=9, trace=True, out=tmp_path / "run")
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())
    events = trace["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    spans: dict[str, list[tuple[float, float, str]]] = {}
    for event in events:
        if event["ph"] == "X":
            spans.setdefault(f"{event['pid']}/{event['tid']}", []).append((event["ts"], event["dur"], event["cat"]))
    end = run.summary()["seconds"] * 1e6
    assert len(names) >= 3
    computing = 0
    for row in spans.values():
        row.sort()
        computing += sum(kind == "compute" for _, _, kind in row)
        assert row[0][0] >= 0
        assert all(ts + duration <= end + 1e-3 for ts, duration, _ in row)
        assert all(a[0] + a[1] <= b[0] + 1e-3 for a, b in pairwise(row)), "spans overlap"
    assert computing == 27


# ---- the optimizer that is asked for


@pytest.mark.parametrize("topology", ["collective", "ps"])
def test_sgd_on_a_job_with_momentum_is_sgd_without_it(topology):
    """Two steps of w^2 / 2 with decay: the rate and the weight decay stay the job's, the momentum goes."""
    job = replace(
        bowls([(1.0, 0.0)], lr=0.1, start=1.0),
        optimizer=OptimizerSpec("momentum", lr=0.1, momentum=0.5, nesterov=True, weight_decay=0.25),
    )

    def after(optimizer: str | None) -> float:
        return float(virtual(job, f"bsp {topology}", workers=1, steps=2, optimizer=optimizer).params)

    assert after("sgd") == pytest.approx((1 - 0.1 * 1.25) ** 2, rel=1e-12)
    assert after("sgd:lr=0.2,weight_decay=0") == pytest.approx(0.8**2, rel=1e-12)
    kept = after("sgd:momentum=0.5")  # v = g, then g + v / 2
    assert kept == pytest.approx(0.875 - 0.1 * (0.875 * 1.25 + 0.5 * 1.25), rel=1e-12)
    assert len({after(None), after("momentum"), after("sgd"), kept}) == 3, "what names no other momentum has the job's"


# ---- bytes: what a model twice as large adds, since headers do not grow with it

SIZES = (1000, 1600)


def added(strategy: str, table: str, key: str, **options: Any) -> dict[str, int]:
    """How many bytes more each node sends or receives when the model has 600 elements of 4 bytes more."""
    small, large = (
        virtual(load_job("quadratic", dim=dim), strategy, timing_only=True, **options).outcome.totals for dim in SIZES
    )
    before, after = getattr(small, table), getattr(large, table)
    return {node: after[node][key] - before[node][key] for node in after}


MORE = (SIZES[1] - SIZES[0]) * 4


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize(("sync", "pulls"), [("bsp", 11), ("ssp", 11), ("downpour", 10)])
def test_servers_take_one_model_up_and_one_down_per_step(sync, pulls, shards):
    """A method that waits for admission to each step pulls once more, for the step that the end of the work forbids."""
    options = {"workers": 3, "steps": 10}
    strategy = f"{sync} ps:shards={shards}"
    assert set(added(strategy, "per_worker", "bytes_sent", **options).values()) == {10 * MORE}
    assert set(added(strategy, "per_worker", "bytes_received", **options).values()) == {pulls * MORE}
    per_shard = [size(small) - size(large) for large, small in zip(*(split([], n, shards) for n in SIZES), strict=True)]
    received = added(strategy, "per_shard", "bytes_received", **options)
    assert [received[f"server {s}"] for s in range(shards)] == [3 * 10 * 4 * elements for elements in per_shard]


def test_downpour_sends_as_often_as_it_pushes_and_receives_as_often_as_it_fetches():
    strategy, options = "downpour:n_push=5,n_fetch=3 ps", {"workers": 2, "steps": 13}
    assert set(added(strategy, "per_worker", "bytes_sent", **options).values()) == {4 * MORE}  # at 1, 6, 11 and the end
    assert set(added(strategy, "per_worker", "bytes_received", **options).values()) == {5 * MORE}  # at 0, 3, ..., 12


def test_averaging_over_servers_travels_once_per_period():
    strategy, options = "averaging:period=5 ps", {"workers": 2, "steps": 12}
    for key in ("bytes_sent", "bytes_received"):
        assert set(added(strategy, "per_worker", key, **options).values()) == {3 * MORE}  # at 5, 10 and the end


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("strategy", "times"), [("bsp", 12), ("averaging:period=5", 3)])
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_a_ring_sends_two_models_less_two_chunks(workers, strategy, times, dtype):
    """2 (K - 1) / K n b each, but for chunks of unequal size: 1001 elements do not divide."""
    job = load_job("quadratic", dim=1001, dtype=dtype)
    run = virtual(job, f"{strategy} collective", workers=workers, steps=12)
    chunks = chunk_bytes(1001, workers, 4 if dtype == "float32" else 8)
    for rank in range(workers):
        left_out = chunks[(rank + 1) % workers] + chunks[(rank + 2) % workers]
        sent = run.outcome.totals.per_worker[f"worker {rank}"]["bytes_sent"]
        assert sent == (times * (2 * sum(chunks) - left_out) if workers > 1 else 0)
    assert run.summary["bytes_sent"] == run.summary["bytes_received"] == times * 2 * (workers - 1) * sum(chunks)


# ---- what is sent while it is computed

LEAST = LEAST_NBYTES // 4
"""Elements of four bytes in the smallest slice."""


@pytest.mark.parametrize(
    ("layers", "ways", "expected"),
    [
        ((0.5, 0.25), 2.0, 1 + 1.5),  # in one slice, once all of it is there
        ((8,), 0.1, 1 + 0.8),
        ((2, 1), 0.1, 1 + 0.2),  # the last layer's is gone before the first's is there
        ((2, 1), 1.0, 1 / 3 + 2 / 9 + 3),  # it is at its third of backward, and then the wire is busy
        ((1, 2), 1.0, 1 / 3 + 4 / 9 + 3),
        ((1, 1, 1, 1), 0.1, 1 + 0.1),
        ((1, 1, 1, 1), 1.0, 1 / 2 + 4),
    ],
)
@pytest.mark.parametrize("slower", [1.0, 3.0])
def test_slices_of_a_gradient_leave_as_backward_completes_them(layers, ways, expected, slower):
    """In units of a step of the slower; the smallest slice takes `ways` of it: two ranks send all of it once."""
    job = synthetic_job([round(layer * LEAST) for layer in layers], 0.001)  # this process sleeps so long
    kinds = [Machines(count=1, compute=Constant(seconds=seconds)) for seconds in (1.0, 1.0 / slower)]
    link = Link(bandwidth=4 * LEAST / ways, latency=0.0)
    cluster = Cluster(machines=tuple(kinds), link=link, alpha=0.0, beta=0.0, gamma=0.0)
    run = virtual(job, "bsp", cluster, steps=3, timing_only=True)
    assert run.seconds == pytest.approx(3 * expected)


# ---- looked at while it is under way


def test_averaging_is_graded_as_the_mean_of_whole_models():
    """Also where some workers have given their share to the others and wait: row 4 falls on an averaging."""
    run = virtual("digits-mlp", "averaging:period=8 collective", machines(4), steps=80, eval_every=10, lr=0.4)
    losses = [row["loss"] for row in run.rows]
    assert all(later < 1.1 * earlier for earlier, later in pairwise(losses))
    assert losses[-1] < 0.2


# ---- memory


@pytest.mark.parametrize("strategy", ["bsp", "ssp ps:shards=2", "hogwild", "ad-psgd", "lbfgs:batch=64 ps"])
def test_a_run_that_is_over_holds_no_data(strategy):
    """Nodes and services refer to each other, and to the job; nobody but the run itself looks for such circles soon."""
    gc.disable()
    try:
        run = virtual("digits-mlp", strategy, machines(3), steps=12)
        setup = weakref.ref(run.setup)
        del run
        assert setup() is None
    finally:
        gc.enable()


def test_a_run_that_is_over_frees_its_nodes_while_its_owner_keeps_it():
    def segments():
        return sum(type(each) is VirtualSegment for each in gc.get_objects())

    setup, cluster = resolve(TrainConfig(job="digits-mlp", on="virtual", workers=2, steps=3, timing_only=True))
    before, run = segments(), VirtualRun(setup, cluster, Callbacks())
    seconds = run.run().totals.seconds
    assert segments() <= before
    assert run.now == pytest.approx(seconds)


# ---- learning rates


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("strategy", "factor"),
    [("bsp collective", 4), ("bsp ps", 4), ("averaging", 4), ("downpour", 1), ("ssp:bound=1", 1)],
)
def test_scaled_rates_count_each_sample_alike(strategy, factor):
    """One step from the same start: where K gradients are averaged, the model moves K times as far."""
    plain = virtual("digits-mlp", strategy, machines(4), steps=1)
    scaled = virtual("digits-mlp", strategy, machines(4), steps=1, scale_lr=True)
    start = plain.setup.model.params
    assert scaled.summary["lr"] == factor * plain.summary["lr"]
    torch.testing.assert_close(scaled.params - start, factor * (plain.params - start), rtol=1e-3, atol=1e-6)


def test_more_servers_than_parameters_are_refused():
    with raising(StrategyError, "500"):
        dure.train("quadratic", topology="ps:shards=500", on="virtual", steps=1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["bsp", "ssp ps:shards=2", "averaging"])
def test_steps_leave_nothing_to_the_collector_of_cycles(strategy):
    """What a step has made is free at once, and its memory used again: with many workers, caches hold it then."""
    steps = 200
    config = TrainConfig(job="digits-mlp", strategy=strategy, on="virtual", workers=4, steps=steps, timing_only=True)
    setup, cluster = resolve(config)
    # The first run imports what it needs, and imports leave cycles.
    first, segment = (VirtualSegment(VirtualRun(setup, cluster, Callbacks()), None) for _ in range(2))
    first.run()
    gc.collect()
    gc.disable()
    try:
        segment.run()
        assert gc.collect() < steps  # other threads of the process leave some
    finally:
        gc.enable()


@pytest.mark.parametrize("per_host", [1, 2, 4])
def test_workers_of_a_host_share_its_card_to_a_fast_server(per_host: int) -> None:
    """Their pushes leave through one card; their pulls, one more for the initial model, come in through it."""
    numel, rate, steps = 2_000_000, 1e8, 5
    cluster = Cluster(
        machines=[Machines(count=4 // per_host, workers=per_host, compute=Constant(seconds=0.01))],
        servers=ServerMachines(link=Link(bandwidth=1e12, latency=0)),
        link=Link(bandwidth=rate, latency=0),
        alpha=0.0,
        beta=0.0,
        gamma=0.0,
    )
    run = dure.train(synthetic_job([numel], 0.01), strategy="bsp ps", on=cluster, steps=steps, timing_only=True)
    assert run.figures["seconds"] == pytest.approx(
        steps * 0.01 + (2 * steps + 1) * per_host * 4 * numel / rate, rel=1e-3
    )


def test_servers_beside_workers_are_on_the_workers_hosts() -> None:
    """Two hosts of two workers, four servers: of the four messages of a worker to servers, two leave its host."""
    cluster = Cluster(machines=[Machines(count=2, workers=2)])
    setup, _ = resolved("digits-mlp", "bsp ps:shards=4,colocated=true", cluster, on="virtual", steps=2)
    segment = VirtualSegment(VirtualRun(setup, cluster, Callbacks()), None)
    segment.run()
    for rank in range(4):
        counters = segment.runtime.network.counters(f"worker {rank}")
        assert counters.bytes_sent > 0
        assert counters.bytes_local == pytest.approx(counters.bytes_sent, rel=0.1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "workers", "strategy"),
    [
        ("two_gpus_per_host", 8, "bsp ps:shards=4"),
        ("two_gpus_per_host", 8, "bsp collective:algorithm=hierarchical"),
        ("two_and_four_gpus", 6, "bsp collective:algorithm=hierarchical"),
        ("two_and_four_gpus", 6, "averaging:period=2"),
    ],
)
def test_the_example_hosts_train(name: str, workers: int, strategy: str) -> None:
    path = Path(__file__).parents[2] / "examples" / "clusters" / f"{name}.yaml"
    options = {"strategy": strategy, "steps": 4, "eval_every": 4}
    run, apart = (dure.train("digits-mlp", on=on, **options) for on in (str(path), Cluster.uniform(workers)))
    assert run.figures["workers"] == workers
    assert run.figures["loss"] == pytest.approx(apart.figures["loss"], rel=1e-5)  # sums are in another order
