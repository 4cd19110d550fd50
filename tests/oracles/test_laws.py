"""Every method, whatever it is, in both runtimes: it learns, it is resumed bit for bit, it outlives its workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from laws import LAWS, representatives
from oracles.test_resume import check_every_stop
from support.real_runs import Trial, configured
from support.runs import local, virtual
from support.wording import raising

from dure.errors import DureError
from dure.run.strategy import REMEDY, catalogue
from dure.run.train import train
from dure.runtime.virtual.cluster import Cluster, Event, Machines
from dure.runtime.virtual.compute import LogNormal

SURVIVORS = [law for law in LAWS if law.survives]


DEPENDENTS = [law for law in LAWS if not law.survives]


def one_slow(*events: Event, workers: int = 4) -> Cluster:
    """Steps of 10 ms, and of 50 ms at the last worker."""
    compute = LogNormal(seconds=0.01, sigma=0.2)
    kinds = (Machines(count=workers - 1, compute=compute), Machines(compute=compute, speed=0.2))
    return Cluster(machines=kinds, events=events)


def steps_of(run: Any, rank: int) -> int:
    return int(run.outcome.totals.per_worker.get(f"worker {rank}", {}).get("steps", 0))


def test_every_method_has_a_law():
    tried = {law.method for law in LAWS if not law.method.endswith(".py")}
    assert tried == set(catalogue("sync"))
    assert {remedy for law in LAWS for remedy in law.remedies} == set(catalogue(REMEDY))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("law", representatives(LAWS), ids=str)
def test_it_learns_though_one_worker_is_slow(law):
    run = virtual("digits-mlp", law.strategy, one_slow(), steps=law.steps, **law.options)
    assert run.summary["accuracy"] >= law.accuracy
    assert run.summary["samples"] > 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("law", representatives(LAWS), ids=str)
def test_it_learns_on_processes(law, fork_server):
    run = local("digits-mlp", law.strategy, fork_server=fork_server, workers=2, steps=law.steps, **law.options)
    assert run.outcome.history[-1]["accuracy"] >= law.accuracy
    assert [steps_of(run, rank) > 0 for rank in range(2)] == [True, True]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("law", representatives(LAWS), ids=str)
def test_stopped_at_any_checkpoint_and_resumed_it_is_the_run_that_was_not(law, tmp_path):
    options = dict(law.options)
    check_every_stop("digits-mlp", tmp_path, one_slow(), strategy=law.strategy, steps=18, **options)


MOVED = {
    "ad-psgd", "asysvrg", "downpour", "eamsgd", "easgd", "hogbatch", "hogwild", "k-async", "k-batch-async",
    "k-batch-sync", "lbfgs",
}  # fmt: skip
"""Whose workers, if they survive each other, come to meet at other moments when one waits for a checkpoint."""


@pytest.mark.sampled(5)
@pytest.mark.parametrize("law", representatives([law for law in LAWS if "overlap=true" not in law.strategy]), ids=str)
def test_resumed_it_is_the_run_that_had_no_checkpoints(law, tmp_path):
    """What a checkpoint left out would be missing alike in two runs that both have it."""
    alone = law.survives and law.method in MOVED
    cluster = Cluster.uniform(1, compute=LogNormal(seconds=0.01, sigma=0.2)) if alone else one_slow()
    whole, options = virtual("digits-mlp", law.strategy, cluster, steps=18, **law.options), dict(law.options)
    folder = tmp_path / "run"
    train("digits-mlp", strategy=law.strategy, on=cluster, steps=13, checkpoint_every=6, out=folder, **options)
    resumed = train("digits-mlp", on=cluster, resume=folder, steps=18).summary()
    assert resumed["params_sha256"] == whole.summary["params_sha256"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("law", representatives([law for law in LAWS if not law.tensors]), ids=str)
def test_time_does_not_depend_on_the_values(law):
    """A timing-only run takes as long and sends as much as one with tensors."""
    options: dict[str, Any] = {"steps": 12, **law.options}
    with_values = virtual("digits-mlp", law.strategy, one_slow(), **options)
    without = virtual("digits-mlp", law.strategy, one_slow(), timing_only=True, **options)
    assert without.seconds == with_values.seconds
    for key in ("bytes_sent", "bytes_received", "messages", "updates_applied", "per_worker", "per_shard"):
        assert json.dumps(without.summary.get(key)) == json.dumps(with_values.summary.get(key)), key


# ---- workers that die, stand still, or come late


@pytest.mark.sampled(5)
@pytest.mark.parametrize("law", representatives(SURVIVORS), ids=str)
def test_in_virtual_time_workers_come_and_go(law):
    """One dies and comes back, one stands still for a while, one is there only from later on."""
    events = (
        Event(at=0.05, kind="crash", worker=1),
        Event(at=0.1, kind="pause", worker=0, duration=0.3),
        Event(at=0.2, kind="join", worker=1),
        Event(at=0.25, kind="join", worker=3),
    )
    run = virtual("digits-mlp", law.strategy, one_slow(*events), steps=60, **law.options)
    assert run.summary["failures_survived"] == 1
    assert steps_of(run, 0) > 5
    assert steps_of(run, 1) > 5
    assert steps_of(run, 2) > 20
    assert steps_of(run, 3) > 0, "the late one took no part"
    assert run.summary["loss"] < 2.5


@pytest.mark.parametrize("law", representatives(DEPENDENTS), ids=str)
def test_in_virtual_time_a_pause_is_waited_for_and_a_death_ends_the_run(law):
    pause = one_slow(Event(at=0.1, kind="pause", worker=0, duration=0.3))
    paused = virtual("digits-mlp", law.strategy, pause, steps=20, **law.options)
    assert [steps_of(paused, rank) for rank in range(4)] == [20] * 4
    crash = one_slow(Event(at=0.1, kind="crash", worker=1))
    with raising(DureError, "worker 1"):
        virtual("digits-mlp", law.strategy, crash, steps=60, **law.options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("law", representatives([law for law in LAWS if law.survives or law.re_forms]), ids=str)
def test_a_killed_process_is_outlived_and_a_newcomer_takes_part(law, fork_server, tmp_path):
    """Three processes: one is killed, and started again; the others hardly move until it has made a step."""
    trial = Trial(configured("digits_at_a_pace", law.strategy, workers=3, steps=200, data=tmp_path, **law.options))
    pace = tmp_path / "pace"
    pace.write_text("0.01")
    happened: list[str] = []

    def act(trial: Trial) -> None:
        driver = trial.driver
        if not happened and driver.steps("worker 1") > 20:
            happened.append("kill")
            swap(pace, "0.1")
            trial.kill("worker 1")
        elif happened == ["kill"] and "worker 1" in driver.roster.failed and "worker 1" in trial.fork_server.exited:
            happened.append("start")
            driver.start("worker 1")
        elif happened == ["kill", "start"] and driver.progress.reports.get("worker 1", {"done": 0})["done"]:
            happened.append("step")
            pace.unlink()

    outcome = trial.run(act, fork_server=fork_server)
    assert outcome.totals.failures_survived == 1
    assert {"worker 0", "worker 2"} <= trial.driver.roster.finished.keys()
    assert trial.driver.roster.finished["worker 1"]["done"] > 0, "the newcomer took no part"
    assert outcome.history[-1]["loss"] < 2.5


def swap(path: Path, text: str) -> None:
    """Write a file at one moment, whoever reads it."""
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.replace(path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("law", representatives([law for law in DEPENDENTS if not law.re_forms]), ids=str)
def test_a_killed_process_ends_a_run_that_needs_all_workers(law, fork_server):
    trial = Trial(configured("digits-mlp", law.strategy, workers=3, steps=100_000, **law.options))
    killed = []

    def act(trial: Trial) -> None:
        if not killed and trial.driver.steps("worker 1") > 20:
            killed.append("worker 1")
            trial.kill("worker 1")

    with raising(DureError, "--checkpoint-every"):
        trial.run(act, fork_server=fork_server)
