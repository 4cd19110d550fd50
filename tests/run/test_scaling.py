"""Elastic runs: the number of workers changes, nobody else restarts, and each sample is used once per epoch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.real_runs import Trial, configured
from support.wording import raising

from dure.errors import DureError, UsageError
from dure.run import scaling
from dure.run.config import TrainConfig
from dure.run.prebuilt import Callbacks
from dure.run.resolve import resolve
from dure.run.scaling import REQUEST, STATE, ask, scale_of
from dure.runtime.launch.interruption import Interruption

RANGE = {"workers": "2..5", "epochs": 5.0}
SAMPLES = 960


def ask_without_waiting(folder: Path, workers: int) -> None:
    (folder / REQUEST).write_text(json.dumps({"workers": workers}))


class Plan:
    """Acts of a run, one after another: each as soon as its condition holds; `pids` are those of the workers then."""

    def __init__(self, *acts):
        self.acts = list(acts)
        self.pids = []

    def __call__(self, trial):
        if self.acts and self.acts[0][0](trial):
            self.pids.append(workers_of(trial))
            self.acts.pop(0)[1](trial)


def workers_of(trial):
    found = trial.fork_server.processes
    return {name: found[name] for name in trial.driver.roster.living() if name in found}


def used(folder: Path) -> Counter[int]:
    lines = [line for path in folder.glob("samples *") for line in path.read_text().splitlines()]
    return Counter(int(word) for line in lines for word in line.split())


def working(count, least_used=0):
    """Whether `count` workers are ready, and so many mini-batches have been used."""

    def holds(trial):
        driver = trial.driver
        ready = driver.roster.living() & driver.roster.ready
        total = driver.setup.steps * driver.setup.config.elastic.least
        return len(ready) == count and total - driver.leases.left >= least_used

    return holds


@contextmanager
def processors(number):
    """Lets this process and its children use `number` processors."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:number])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@pytest.fixture
def elastic(tmp_path, fork_server):
    def run(strategy, plan, callbacks=None, **options):
        out, data = tmp_path / "run", tmp_path / "data"
        out.mkdir()
        data.mkdir()
        trial = Trial(configured("notes_samples", strategy, data=data, out=out, **RANGE | options))
        with processors(2):
            return trial, trial.run(plan, fork_server=fork_server, callbacks=callbacks), used(data)

    return run


@pytest.mark.parametrize(
    "strategy",
    [
        "downpour ps:shards=2",
        *(
            pytest.param(each, marks=pytest.mark.long)
            for each in ("ssp:bound=3 ps", "bsp ps", "hogwild", "ad-psgd", "easgd:period=4")
        ),
    ],
)
def test_workers_come_and_go_and_each_sample_of_an_epoch_is_used_once(strategy, elastic):
    plan = Plan(
        (working(2, 100), lambda trial: ask_without_waiting(trial.config.out, 5)),
        (working(5, 400), lambda trial: ask_without_waiting(trial.config.out, 3)),
        (working(3, 700), lambda trial: None),
    )
    shown = []
    callbacks = Callbacks(progress=lambda step, steps, loss, samples: shown.append((step, steps)))
    trial, outcome, samples = elastic(strategy, plan, callbacks=callbacks)
    assert not plan.acts
    assert shown == sorted(shown), "a worker that begins has set back the progress of the run"
    assert shown[-1][0] <= shown[-1][1] == trial.setup.steps
    assert trial.setup.synchronous or outcome.history[-1]["step"] == trial.setup.steps
    two, five, three = plan.pids
    assert len(five) == 5
    assert two.items() <= five.items()
    assert three.items() <= five.items()
    assert three.keys() == {"worker 0", "worker 1", "worker 2"}
    assert samples == dict.fromkeys(range(SAMPLES), 5)
    assert outcome.totals.counts["samples"] == 5 * SAMPLES
    assert outcome.totals.failures_survived == 0
    assert sum(row["steps"] for row in outcome.totals.per_worker.values()) == 5 * SAMPLES // 4
    assert not (trial.config.out / STATE).exists()


@pytest.mark.long  # 11 s; a notice is answered in make test
def test_a_warned_worker_leaves_and_another_takes_its_place(elastic):
    plan = Plan(
        (working(2, 100), lambda trial: trial.fork_server.signal("worker 1", signal.SIGTERM)),
        (lambda trial: "worker 1" in trial.driver.roster.failed, lambda trial: None),
        (working(2), lambda trial: None),
    )
    _, outcome, samples = elastic("downpour ps:shards=2", plan)
    assert not plan.acts
    before, _, after = plan.pids
    assert outcome.notes["deaths"] == {}
    assert before["worker 0"] == after["worker 0"]
    assert len(after) == 2
    assert before["worker 1"] not in after.values()
    assert samples == dict.fromkeys(range(SAMPLES), 5)
    assert outcome.totals.failures_survived == 0


def test_the_lease_of_a_killed_worker_goes_to_others(elastic):
    plan = Plan((working(2, 100), lambda trial: trial.kill("worker 1")))
    _, outcome, samples = elastic("downpour ps:shards=2", plan)
    assert not plan.acts
    assert set(samples) == set(range(SAMPLES))
    assert min(samples.values()) == 5
    repeated = sum(samples.values()) - 5 * SAMPLES
    assert 0 <= repeated <= 3 * 4, "more than the mini-batches that were under way when the worker died"
    assert outcome.totals.failures_survived == 1


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
@pytest.mark.long
def test_a_run_that_nobody_scales_grows_to_one_worker_for_each_processor(elastic):
    sizes = []
    plan = Plan(
        (working(1, 20), lambda trial: sizes.append(scale_of(trial.config.out).target)),
        (working(2, 400), lambda trial: sizes.append(scale_of(trial.config.out).target)),
    )
    trial, _, samples = elastic("downpour ps", plan, workers="1..5")
    assert sizes == [1, 2]
    assert trial.driver.roster.incarnations.keys() == {"server 0", "worker 0", "worker 1"}
    assert samples == dict.fromkeys(range(SAMPLES), 5)


@pytest.mark.long
def test_workers_that_only_start_leave_at_once(elastic):
    def stopping(name):
        """Stop a worker as soon as its process is there: before the next one has started, it would be at work."""
        return (
            lambda trial: name in trial.fork_server.processes,
            lambda trial: trial.fork_server.signal(name, signal.SIGSTOP),
        )

    plan = Plan(
        (working(2, 100), lambda trial: ask_without_waiting(trial.config.out, 5)),
        *(stopping(f"worker {rank}") for rank in (2, 3, 4)),
        (lambda trial: True, lambda trial: ask_without_waiting(trial.config.out, 2)),
        (lambda trial: len(trial.driver.roster.living()) == 2, lambda trial: None),
    )
    _, outcome, samples = elastic("ssp ps:shards=2", plan)
    assert not plan.acts
    assert outcome.totals.per_worker.keys() == {"worker 0", "worker 1"}
    assert samples == dict.fromkeys(range(SAMPLES), 5)
    assert outcome.totals.failures_survived == 0


@pytest.mark.parametrize(
    ("content", "number"), [("8", 8), ("many", None), ('{"workers": 1}', 1), ('{"workers": 6}', 6)], ids=str
)
def test_a_wrong_request_changes_nothing(content, number, elastic):
    plan = Plan(
        (working(2, 10), lambda trial: (trial.config.out / REQUEST).write_text(content)),
        (lambda trial: not (trial.config.out / REQUEST).exists(), lambda trial: None),
    )
    trial, _, _ = elastic("downpour ps", plan, epochs=4.0)
    assert not plan.acts
    assert trial.driver.roster.finished.keys() == {"worker 0", "worker 1"}


# ---- the command


def test_the_command_asks_and_shows(tmp_path):
    command = [sys.executable, "-m", "dure"]
    options = ["--workers", "2..3", "--steps", "100000", "--out", str(tmp_path / "run"), "--sync", "downpour"]
    run = subprocess.Popen(
        [*command, "train", "digits-mlp", *options], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    try:
        until = time.monotonic() + 60
        while not (tmp_path / "run" / STATE).exists():
            assert run.poll() is None
            assert time.monotonic() < until
            time.sleep(0.1)
        assert scale_of(tmp_path / "run").target == 2
        with raising(UsageError, "5 workers"):
            ask(tmp_path / "run", 5, Interruption())
        done = subprocess.run([*command, "scale", str(tmp_path / "run"), "3", "--json"], capture_output=True, text=True)
        assert json.loads(done.stdout.splitlines()[-1])["target"] == 3, done.stderr
    finally:
        run.kill()
        run.wait(30)


def test_a_folder_without_an_elastic_run_is_refused(tmp_path):
    with raising(UsageError, "no elastic run"):
        ask(tmp_path, 3, Interruption())


@pytest.mark.parametrize("workers", [2, 3])
def test_a_driver_that_is_gone_is_said(workers, tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "ANSWER_SECONDS", 0.3)
    (tmp_path / STATE).write_text(json.dumps({"least": 2, "most": 5, "target": 2, "run": []}))
    with raising(DureError, "no driver"):
        ask(tmp_path, workers, Interruption())
    assert os.listdir(tmp_path) == [STATE]


# ---- runs that cannot be elastic


@pytest.mark.parametrize("workers", ["8..2", "0..3", "4..4", "2..", "2...4", "2..1000000"])
def test_a_wrong_range_is_refused(workers):
    with raising(UsageError, "workers"):
        TrainConfig(job="digits-mlp", workers=workers)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"strategy": "bsp"}, "needs every worker"),
        ({"strategy": "bsp ps", "partition": "gpipe:stages=2"}, "needs every worker"),
        ({"strategy": "downpour", "on": "virtual"}, "--on is virtual"),
        ({"strategy": "lbfgs"}, "chooses its samples"),
        ({"strategy": "downpour", "batch_sizes": (8, 8, 8, 8)}, "one size"),
        ({"strategy": "downpour", "split": "dirichlet:alpha=0.1"}, "ties them"),
    ],
)
def test_a_run_that_cannot_be_elastic_is_refused(options, said):
    with raising(UsageError, said):
        resolve(TrainConfig(**{"job": "digits-mlp", "workers": "2..4", "on": "local"} | options))
