"""The rows of a run's history: a loss that tells which gradients are in the graded model, for every method."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from support import telling_jobs
from support.runs import Finished, local, resolved, virtual
from support.telling_jobs import gradients_by_worker, square, tally

from dure.job.evaluation import Evaluator
from dure.run.prebuilt import Callbacks
from dure.run.virtual import VirtualRun
from dure.runtime.launch.fork_server import ForkServer
from dure.runtime.virtual.cluster import Cluster, Event, Link, Machines
from dure.runtime.virtual.compute import Constant

WORKERS, STEPS = 3, 8

SYNCHRONOUS = (
    "bsp collective",
    "bsp collective:algorithm=ring",
    "bsp collective fp16",
    "bsp ps",
    "averaging:period=4 collective",
    "averaging:period=3 ps",
    "averaging:period=4,schedule=decay,interval=4 ps",
    "one-shot collective",
    "one-shot ps",
    "bmuf:period=4,momentum=0 collective",
    "bmuf:period=3,momentum=0 ps",
    "bmuf:period=4,momentum=0,overlap=1,fragments=2 collective",
    "backup:backups=1 ps",
    "k-sync:k=2 ps",
)
"""Methods whose row of step t holds every worker's gradients 1..t and none later."""

ONE_BY_ONE = {
    "ssp:bound=2 ps": 1,
    "ssp:bound=2,form=rmw ps": 1,
    "downpour ps": 1,
    "downpour:at_once=true ps": 1,
    "k-async:k=1 ps": 1,
    "k-batch-async:k=1 ps": 1,
    "k-batch-async:k=2 ps": 2,
    "ad-psgd": WORKERS,
    "hogwild": 1,
    "hogwild shared:mode=atomic": 1,
}
"""Methods that give away each gradient by itself, and how many make a mean."""

SEVERAL = {"downpour:n_push=3,n_fetch=2 ps": 1, "hogbatch:batch=3,scale=sum": 1}
"""Methods that give away sums of gradients."""

OTHERS = ("k-batch-sync:k=2 ps", "easgd collective", "easgd ps", "eamsgd ps", "asysvrg", "lbfgs ps")


def uneven(*events: Event, workers: int = WORKERS) -> Cluster:
    """Every worker has its own speed; the last is five times slower than the first."""
    paces = [0.01, 0.017, 0.05][:workers]
    machines = tuple(Machines(count=1, compute=Constant(seconds=pace)) for pace in paces)
    return Cluster(machines=machines, link=Link(bandwidth=1e9, latency=1e-4), events=events)


def told(step: int) -> float:
    """The loss of `square` after so many steps."""
    return 0.5 ** (2 * step + 1)


def members(strategy: str) -> int:
    """How many gradients an update has."""
    return 2 if strategy.startswith(("backup", "k-sync")) else WORKERS


def loss_of(run: Finished) -> float:
    return Evaluator(run.setup.job).grade(run.params, None).loss


def triples(run: Finished) -> list[tuple[int, int, float]]:
    return [(row["step"], row["updates"], row["loss"]) for row in run.rows]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("strategy", SYNCHRONOUS)
def test_a_row_of_a_synchronous_method_holds_all_gradients_up_to_its_step(strategy):
    for every in (2, 3):
        run = virtual(square(), strategy, uneven(), steps=STEPS, eval_every=every)
        expected = [*range(every, STEPS, every), STEPS]
        assert triples(run) == [(step, members(strategy) * step, told(step)) for step in expected]
        assert run.summary["loss"] == loss_of(run) == told(STEPS)


@pytest.mark.parametrize("strategy", ["bsp collective", "bsp ps:shards=2", "averaging:period=3", "one-shot ps"])
def test_and_none_of_any_worker_that_is_later(strategy):
    run = virtual(tally(), strategy, uneven(), steps=STEPS, eval_every=2)
    found = [gradients_by_worker(row["loss"], WORKERS, WORKERS) for row in run.rows]
    assert found == [[row["step"]] * WORKERS for row in run.rows]
    assert [row["step"] for row in run.rows] == [2, 4, 6, 8]


@pytest.mark.parametrize(
    "strategy",
    ["bmuf:period=2 collective", "bmuf:period=2 ps", "diloco:period=2", "averaging:period=2,weights=loss ps"],
)
def test_where_workers_meet_a_row_is_of_what_the_run_would_deliver(strategy):
    """With momentum, workers go on from elsewhere (lookahead): that is not the model."""
    job = square()
    job.train.inputs[:, 1] = torch.tensor([0.5, -0.25, 2.0])
    job.optimizer = type(job.optimizer)(lr=0.125)
    run = virtual(job, strategy, uneven(), steps=STEPS, eval_every=2)
    for row in run.rows:
        short = virtual(job, strategy, uneven(), steps=row["step"])
        assert row["loss"] == pytest.approx(loss_of(short), rel=1e-12)


@pytest.mark.parametrize("strategy", [s for s in SYNCHRONOUS if " ps" in s and not s.startswith("one-shot")])
def test_a_crash_leaves_rows_what_they_say(strategy):
    crash = Event(at=0.12, kind="crash", worker=2)
    run = virtual(square(), strategy, uneven(crash), steps=STEPS, eval_every=2)
    assert run.outcome.totals.failures_survived == 1
    assert [(row["step"], row["loss"]) for row in run.rows] == [(step, told(step)) for step in (2, 4, 6, 8)]
    assert all(2 * row["step"] <= row["updates"] <= members(strategy) * row["step"] for row in run.rows)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("strategy", [*SYNCHRONOUS, *ONE_BY_ONE, *SEVERAL])
def test_a_resumed_run_has_the_rows_of_the_whole_one(strategy, tmp_path):
    options: dict[str, Any] = {"steps": STEPS, "eval_every": 2, "checkpoint_every": 6, "out": tmp_path}
    setup, cluster = resolved(square(), strategy, uneven(), on="virtual", **options)
    states: list[Any] = []
    whole = VirtualRun(setup, cluster, Callbacks(checkpoint=lambda _, state: states.append(deepcopy(state)))).run()
    assert len(states) == 1
    assert len(states[0]["run"].plain["history"]) < len(whole.history)
    assert VirtualRun(setup, cluster, Callbacks()).run(states[0]).history == whole.history
    if strategy in SYNCHRONOUS:
        assert [(row["step"], row["loss"]) for row in whole.history] == [(step, told(step)) for step in (2, 4, 6, 8)]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("strategy", [*ONE_BY_ONE, *SEVERAL])
def test_elsewhere_updates_counts_the_gradients_in_the_model(strategy):
    divisor = (ONE_BY_ONE | SEVERAL)[strategy]
    run = virtual(tally(), strategy, uneven(), steps=STEPS, eval_every=1)
    assert len(run.rows) > 4
    for row in run.rows:
        found = gradients_by_worker(row["loss"], WORKERS, divisor)
        assert row["updates"] == sum(found)
        if strategy in ONE_BY_ONE and not strategy.startswith("k-batch"):
            assert row["step"] <= min(found) <= row["step"] + 1
    assert (run.rows[-1]["step"], run.rows[-1]["updates"]) == (STEPS, WORKERS * STEPS)
    steps = [row["step"] for row in run.rows]
    assert steps == sorted(steps)
    assert run.summary["loss"] == loss_of(run)


def test_elastic_averaging_counts_what_has_come_to_the_center():
    around, through = (virtual(square(1), s, uneven(workers=1), steps=9, eval_every=2) for s in ("easgd", "easgd ps"))
    assert [(row["step"], row["updates"]) for row in through.rows] == [(2, 0), (4, 0), (6, 4), (8, 4), (9, 8)]
    assert triples(virtual(square(1), "easgd collective", steps=9, eval_every=2, workers=1)) == triples(through)
    assert triples(around) == triples(through)


@pytest.mark.parametrize("strategy", OTHERS)
def test_a_summary_is_of_the_model_that_is_delivered(strategy):
    for every in (3, STEPS):
        run = virtual(square(), strategy, uneven(), steps=STEPS, eval_every=every)
        assert run.summary["loss"] == run.rows[-1]["loss"] == loss_of(run)


def test_one_slow_worker_and_any_rhythm_of_evaluation_give_one_summary():
    cluster = Cluster(machines=(Machines(count=3), Machines(count=1, speed=0.2)))
    summaries = []
    for every in (1, 4, 7, 30, 1000):
        summary = virtual("digits-mlp", "ad-psgd", cluster, steps=30, eval_every=every).summary
        summaries.append({name: summary[name] for name in ("loss", "accuracy", "params_sha256", "seconds", "steps")})
    assert all(each == summaries[0] for each in summaries)


# ---- on processes


def real(job: str, strategy: str, fork_server: ForkServer) -> Finished:
    name = f"{Path(telling_jobs.__file__)}:{job}"
    return local(name, strategy, fork_server=fork_server, workers=2, steps=STEPS, eval_every=2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "strategy",
    [
        "bsp collective",
        "bsp ps",
        "averaging:period=4 ps",
        "one-shot collective",
        "bmuf:period=4,overlap=1,momentum=0",
        "backup:backups=0",
    ],
)
def test_rows_of_processes_are_those_of_virtual_time(strategy, fork_server):
    run = real("square_of_two", strategy, fork_server)
    assert triples(run) == [(step, 2 * step, told(step)) for step in (2, 4, 6, 8)]
    assert triples(run) == triples(virtual(square(2), strategy, uneven(workers=2), steps=STEPS, eval_every=2))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("strategy", "divisor"),
    [
        ("downpour:n_push=3 ps", 1),
        ("k-async:k=1", 1),
        ("ad-psgd", 2),
        ("hogbatch:batch=3,scale=sum shared:mode=atomic", 1),
    ],
)
def test_updates_on_processes_are_the_gradients_in_the_model(strategy, divisor, fork_server):
    run = real("tally_of_two", strategy, fork_server)
    # Of these two, a row is read while models are averaged, or between the writing and the counting of an update.
    rows = run.rows[-1:] if strategy.startswith(("ad-psgd", "hogbatch")) else run.rows
    for row in rows:
        found = gradients_by_worker(row["loss"], 2, divisor)
        assert row["updates"] == sum(found)
        if "batch" not in strategy and "n_push" not in strategy:
            assert row["step"] <= min(found)
    assert (run.rows[-1]["step"], run.rows[-1]["updates"]) == (STEPS, 2 * STEPS)
