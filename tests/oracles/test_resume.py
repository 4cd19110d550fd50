"""A run that was stopped after any of its checkpoints and resumed is the run that was not, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support import stage_jobs
from support.purposes import soaked
from support.runs import recorded, resume_local, virtual
from torch import nn
from torch.nn.functional import cross_entropy

import dure
from dure.job.data.loaders import load_digits
from dure.job.job import Job
from dure.job.models.mlp import top1
from dure.job.optimizer import OptimizerSpec
from dure.report.record import read_history
from dure.report.run import Run
from dure.run import checkpoint
from dure.run.config import TrainConfig
from dure.run.train import run
from dure.runtime.virtual.cluster import Cluster, Event, Machines
from dure.runtime.virtual.compute import Constant, LogNormal

STRATEGIES = [
    "bsp collective",
    "bsp ps:shards=2",
    "averaging:period=3 collective",
    "averaging:period=3 ps:shards=2,split=layer",
    "downpour ps:shards=2",
    "downpour:n_push=3,n_fetch=2,local_lr=0.05 ps",
    "ssp:bound=0 ps:shards=2",
    "ssp:bound=2 ps:shards=3,split=layer",
]
OVER_SERVERS = [strategy for strategy in STRATEGIES if "ps" in strategy]


def norm_and_dropout() -> Job:
    """Everything that a model can carry besides parameters: running statistics, and draws."""
    data = load_digits()

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 10)
        )  # fmt: skip

    return Job(
        model=model, loss=cross_entropy, train=data.train, test=data.test, batch_size=8, accuracy=top1, name="given",
        optimizer=OptimizerSpec("momentum", lr=0.05),
    )  # fmt: skip


@cache
def jobs() -> dict[str, str | Job]:
    return {"digits-mlp": "digits-mlp", "norm-and-dropout": norm_and_dropout()}


def cluster(*events: Event) -> Cluster:
    kinds = (Machines(count=4, compute=LogNormal(seconds=0.01, sigma=0.4)),)
    return Cluster(machines=kinds, events=events, unfairness=0.3)


def facts(run: Run) -> dict[str, Any]:
    return {key: value for key, value in run.summary().items() if key not in ("batching", "evaluation_seconds")}


def check_every_stop(job: str | Job, folder: Path, on: Cluster, **options: Any) -> None:
    """Train with three checkpoints; then, for each, be killed some time after it, and resume."""
    whole = dure.train(job, on=on, out=folder / "whole", checkpoint_every=5, eval_every=3, **options)
    steps = sorted(int(p.name.removeprefix("step-")) for p in (folder / "whole" / "checkpoints").glob("step-*"))
    assert steps == [5, 10, 15]
    for stop in steps:
        killed = folder / f"killed-{stop}"
        shutil.copytree(folder / "whole", killed)
        (killed / "summary.json").unlink()
        for later in steps:
            if later > stop:
                shutil.rmtree(killed / "checkpoints" / f"step-{later}")
        resumed = dure.train(job, on=on, resume=killed)
        assert facts(resumed) == facts(whole), f"stopped after {stop}"
        assert list(resumed.history) == list(whole.history)
        assert read_history(killed / "history.jsonl") == read_history(folder / "whole" / "history.jsonl")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("strategy", "optimizer"), [*zip(STRATEGIES, ["momentum", "adam"] * 4, strict=True)])
def test_resumed_is_uninterrupted(strategy, optimizer, tmp_path):
    check_every_stop("digits-mlp", tmp_path, cluster(), strategy=strategy, optimizer=optimizer, steps=18)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", STRATEGIES[::2])
def test_with_running_statistics_and_dropout(strategy, tmp_path):
    check_every_stop(jobs()["norm-and-dropout"], tmp_path, cluster(), strategy=strategy, steps=18)


PIPELINES = [
    "bsp collective pipedream:stages=4",
    "bsp collective gpipe:stages=2,micro=2,remat=true",
    "bsp collective 1f1b:stages=2,micro=4",
    "averaging:period=3 collective pipedream:stages=2",
    "bsp collective ddg:stages=2,weights=current",
    "bsp collective features-replay:stages=2",
]


@pytest.mark.parametrize("strategy", [PIPELINES[0], *soaked(*PIPELINES[1:])])
def test_pipelines_drain_at_each_checkpoint(strategy, tmp_path):
    check_every_stop(stage_jobs.normed(), tmp_path, cluster(), strategy=strategy, steps=18)


@pytest.mark.long
def test_a_checkpoint_changes_a_pipeline_without_a_flush_alone(tmp_path):
    """A drain is a flush. So the schedule of checkpoints belongs to the run."""
    for strategy, same in ((PIPELINES[2], True), (PIPELINES[0], False)):
        options: dict[str, Any] = {"strategy": strategy, "on": cluster(), "steps": 18}
        without, with_them = both(tmp_path / strategy, stage_jobs.normed(), **options)
        assert (with_them["params_sha256"] == without["params_sha256"]) is same, strategy


EVENTS = (
    Event(at=0.012, kind="slow", worker=2, factor=3, duration=0.1),
    Event(at=0.03, kind="crash", worker=1),
    Event(at=0.055, kind="pause", worker=0, duration=0.04),
    Event(at=0.12, kind="join", worker=1),
    Event(at=0.15, kind="slow", worker=3, factor=2),
    Event(at=0.3, kind="crash", worker=2),
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", OVER_SERVERS)
def test_with_workers_that_come_and_go(strategy, tmp_path):
    """Events before, between and after the checkpoints, some of which last beyond one."""
    check_every_stop("digits-mlp", tmp_path, cluster(*EVENTS), strategy=strategy, steps=18, optimizer="momentum")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["bsp", "averaging"])
def test_with_pauses_over_collectives(strategy, tmp_path):
    events = (EVENTS[0], EVENTS[2], EVENTS[4])
    check_every_stop("digits-mlp", tmp_path, cluster(*events), strategy=strategy, steps=18)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", STRATEGIES[3::2])
def test_timing_only(strategy, tmp_path):
    check_every_stop("digits-mlp", tmp_path, cluster(), strategy=strategy, steps=18, timing_only=True)


def test_an_event_after_a_checkpoint_does_not_delay_it(tmp_path):
    """A checkpoint waits for what is under way, not for what the future holds."""
    late = cluster(Event(at=0.8, kind="crash", worker=1))
    options: dict[str, Any] = {"strategy": "ssp ps", "steps": 18, "checkpoint_every": 5}
    calm = dure.train("digits-mlp", on=cluster(), out=tmp_path / "calm", **options)
    stormy = dure.train("digits-mlp", on=late, out=tmp_path / "stormy", **options)
    assert facts(calm) == facts(stormy)


def test_a_pause_that_began_at_the_boundary_goes_on_after_it(tmp_path):
    """Worker 0 has done its 5 steps of 10 ms and is paused while the other ends its step of 60 ms."""
    on = Cluster(
        machines=(Machines(compute=Constant(seconds=0.01)), Machines(compute=Constant(seconds=0.06))),
        events=(Event(at=0.055, kind="pause", worker=0, duration=0.1),),
    )
    options: dict[str, Any] = {"steps": 8, "checkpoint_every": 5, "trace": True}
    dure.train("digits-mlp", strategy="downpour ps", on=on, out=tmp_path / "run", **options)
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    short = [event for event in events if event["ph"] == "X" and event["cat"] == "compute" and event["dur"] < 30_000]
    starts = sorted(event["ts"] for event in short)
    assert starts[4] < 55_000
    assert starts[5] == pytest.approx(155_000)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["bsp collective", "ssp ps:shards=2"])
def test_a_finished_run_can_be_given_more_steps(strategy, tmp_path):
    """From its last checkpoint on, which is that of the longer run."""
    options: dict[str, Any] = {"strategy": strategy, "on": cluster(), "checkpoint_every": 5, "eval_every": 3}
    longer = dure.train("digits-mlp", out=tmp_path / "longer", steps=18, **options)
    dure.train("digits-mlp", out=tmp_path / "shorter", steps=11, **options)
    resumed = dure.train("digits-mlp", on=options["on"], resume=tmp_path / "shorter", steps=18)
    assert facts(resumed) == facts(longer)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["bsp collective", "ssp ps:shards=2", PIPELINES[0]])
def test_a_checkpoint_stands_at_the_last_step_where_one_is_due(strategy, tmp_path):
    """The run is reported again as it was, and extended to the run that was longer from the start."""
    options: dict[str, Any] = {"strategy": strategy, "on": cluster(), "checkpoint_every": 4, "eval_every": 3}
    job = stage_jobs.normed()
    longer = dure.train(job, out=tmp_path / "longer", steps=8, **options)
    short = dure.train(job, out=tmp_path / "run", steps=4, **options)
    for expected, steps in ((short, None), (longer, 8)):
        resumed = dure.train(job, on=options["on"], resume=tmp_path / "run", **({"steps": steps} if steps else {}))
        assert facts(resumed) == facts(expected)
        assert list(resumed.history) == list(expected.history)


# ---- what is carried over: a run without checkpoints, where stopping does not change the order of things


def both(folder: Path, job: str | Job, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run without checkpoints, and one with some."""
    without = dure.train(job, **options)
    return facts(without), facts(dure.train(job, out=folder / "run", checkpoint_every=5, **options))


@pytest.mark.parametrize("events", [(), (EVENTS[0], EVENTS[2], EVENTS[4])])
def test_over_collectives_checkpoints_change_nothing_at_all(events, tmp_path):
    """All stand at the boundary together anyway. What lasts beyond a checkpoint goes on: slowness, a pause, draws."""
    job = jobs()["norm-and-dropout"]
    without, with_them = both(tmp_path, job, strategy="bsp collective", on=cluster(*events), steps=18)
    for key in ("seconds", "time_share"):
        assert with_them.pop(key) == pytest.approx(without.pop(key), rel=1e-9)
    assert with_them.pop("events") == pytest.approx(without.pop("events"), rel=0.2)
    assert with_them == without


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["bsp ps:shards=2", "averaging:period=3 collective", "averaging:period=3 ps"])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_lockstep_checkpoints_do_not_change_the_result(strategy, optimizer, tmp_path):
    job = jobs()["norm-and-dropout"]
    without, with_them = both(tmp_path, job, strategy=strategy, on=cluster(), steps=18, optimizer=optimizer)
    for key in ("params_sha256", "loss", "samples", "staleness", "updates_applied"):
        assert with_them[key] == without[key]


def test_a_single_downpour_keeps_what_it_has_accrued(tmp_path):
    """Nothing is fetched after the first time, so that a checkpoint changes nothing, in the middle of accruing."""
    alone = Cluster(machines=(Machines(count=1),))
    without, with_them = both(tmp_path, "digits-mlp", strategy="downpour:n_push=4,n_fetch=100 ps", on=alone, steps=18)
    assert with_them["params_sha256"] == without["params_sha256"]


@pytest.mark.parametrize("strategy", OVER_SERVERS[::2])
def test_servers_remember_what_they_have_seen(strategy, tmp_path):
    dure.train("digits-mlp", strategy=strategy, on=cluster(), out=tmp_path / "run", checkpoint_every=5, steps=18)
    parts = checkpoint.load(tmp_path / "run" / "checkpoints").parts
    for worker, incarnation, last, holes in parts["shard-0"].plain["ledger"]:
        assert (incarnation, holes) == (0, [])
        assert last == parts[f"worker-{worker}"].plain["client"]["seq"] > 0


@pytest.mark.parametrize("strategy", ["downpour ps", "ssp ps"])
def test_elsewhere_checkpoints_do_change_a_run(strategy, tmp_path):
    """Which is why the schedule belongs to the configuration."""
    without, with_them = both(tmp_path, "digits-mlp", strategy=strategy, on=cluster(), steps=18)
    assert with_them["seconds"] != without["seconds"]


# ---- real runs


REAL = ["bsp collective", "bsp collective:algorithm=tree", "bsp ps:shards=2", "downpour:n_push=2 ps", "ssp:bound=1 ps"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", [*REAL[0::2], *soaked(*REAL[1::2])])
def test_a_real_run_is_resumed(strategy, tmp_path, fork_server):
    """From its first checkpoint, as if it had been killed before the next. BSP comes to the same end."""
    options: dict[str, Any] = {"workers": 2, "steps": 12, "dtype": "float64", "optimizer": "momentum"}
    record: dict[str, Any] = {"out": tmp_path / "run", "checkpoint_every": 5, "eval_every": 3}
    whole = recorded("digits-mlp", strategy, fork_server, **record, **options)
    places = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in places.glob("step-*")) == ["step-10", "step-5"]
    shutil.rmtree(places / "step-10")
    (tmp_path / "run" / "summary.json").unlink()
    resumed = resume_local(tmp_path / "run", fork_server)
    assert resumed.summary["samples"] == whole.summary()["samples"] == 2 * 12 * 32
    assert resumed.summary["updates_applied"] == whole.summary()["updates_applied"]
    assert [resumed.outcome.totals.per_worker[f"worker {rank}"]["steps"] for rank in range(2)] == [12, 12]
    for key in ("seconds", "step", "samples", "bytes"):
        values = [row[key] for row in resumed.outcome.history]
        assert values == sorted(values), key
    if "bsp" in strategy:
        assert resumed.summary.get("version_skew") == whole.summary().get("version_skew")
        exact = virtual("digits-mlp", strategy, **options)
        assert float((resumed.params - exact.params).abs().max()) < 1e-12
        for key in ("bytes_sent", "bytes_received", "messages"):
            introductions = 12 if key == "messages" else 0  # connections are made anew
            assert resumed.summary[key] == pytest.approx(whole.summary()[key], rel=0.1, abs=introductions), key


@pytest.mark.long
def test_the_run_of_a_killed_launcher_is_resumed(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(dure.__file__).parents[1])}
    command = [sys.executable, "-m", "dure", "train"]
    options = ["digits-mlp", "--strategy", "ssp ps", "--workers", "2", "--steps", "100000", "--checkpoint-every", "40"]
    launcher = subprocess.Popen(
        [*command, *options, "--out", str(tmp_path / "run")], env=environment, stderr=subprocess.DEVNULL
    )
    latest = tmp_path / "run" / "checkpoints" / "LATEST"
    deadline = time.monotonic() + 60
    while not latest.exists() and launcher.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    launcher.send_signal(signal.SIGKILL)
    assert launcher.wait(10) == -signal.SIGKILL
    reached = int(latest.read_text().removeprefix("step-"))
    again = [*command, "--resume", str(tmp_path / "run"), "--steps", str(reached + 60), "--json"]
    result = subprocess.run(again, env=environment, capture_output=True, text=True, timeout=90, check=False)
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["samples"] >= 2 * (reached + 60) * 32
    assert summary["samples"] <= 2 * (reached + 60) * 32 + 40 * 2 * 32
    assert summary["accuracy"] > 0.7


def test_the_cluster_is_remembered(tmp_path):
    """Who resumes need not describe the machines again."""
    options = {"sync": "ssp", "steps": 12, "checkpoint_every": 5, "eval_every": 4}
    whole = dure.train("digits-mlp", on=cluster(), out=tmp_path / "whole", **options)
    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    shutil.rmtree(tmp_path / "stopped" / "checkpoints" / "step-10")
    resumed = run(TrainConfig(resume=tmp_path / "stopped"))
    assert facts(resumed) == facts(whole)
