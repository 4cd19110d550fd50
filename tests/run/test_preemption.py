"""Workers that are warned of preemption leave at a step boundary, and the others go on; a replacement comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from runtime.launch.test_preemption import serving
from support.real_runs import JOBS, Trial, configured
from support.wording import raising

from dure.errors import UsageError
from dure.run.config import TrainConfig
from dure.run.failures import LIMIT
from dure.run.process import PROGRESS_SECONDS
from dure.run.resolve import resolve

STEPS = 300
SAMPLES = 960


class Warned:
    """Warns worker 1 by `give` after some steps, and takes the warning back by `end` once it has left.

    The warning comes between two reports, so that the worker has made steps of which the driver does not know.
    """

    def __init__(self, give, end=lambda: None, after=50):
        self.give, self.end, self.after = give, end, after
        self.others, self.pids = {}, []
        self.given_at = self.left_after = None

    def __call__(self, trial):
        driver, running = trial.driver, dict(trial.fork_server.processes)
        if "worker 1" in running and running["worker 1"] not in self.pids:
            self.pids.append(running["worker 1"])
        if self.given_at is None and driver.progress.steps("worker 1") >= self.after:
            self.others = {name: pid for name, pid in running.items() if name != "worker 1"}
            self.given_at = time.monotonic()
            threading.Timer(PROGRESS_SECONDS / 2, self.give).start()
        elif self.left_after is None and "worker 1" in driver.roster.failed:
            self.left_after = time.monotonic() - self.given_at
            assert self.others.items() <= running.items()
            self.end()


@pytest.fixture
def run(tmp_path, fork_server):
    def once(strategy, act, job="notes_samples", **options):
        plain = {"workers": 3, "steps": STEPS, "replace": True, "data": tmp_path}
        trial = Trial(configured(job, strategy, **plain | options))
        return trial, trial.run(act, fork_server=fork_server)

    return once


def used(folder: Path) -> int:
    return sum(len(path.read_text().split()) for path in folder.glob("samples *"))


@pytest.mark.parametrize(
    "strategy",
    [
        "downpour ps:shards=2",
        *(pytest.param(each, marks=pytest.mark.long) for each in ("ssp:bound=3 ps", "hogwild", "ad-psgd", "bsp ps")),
    ],
)
def test_a_worker_of_a_fixed_number_leaves_at_sigterm_and_another_goes_on(strategy, run, tmp_path):
    warned = Warned(lambda: os.kill(warned.pids[0], signal.SIGTERM))
    trial, outcome = run(strategy, warned)
    assert len(warned.pids) == 2
    assert warned.left_after < 5
    assert trial.driver.roster.finished.keys() == {"worker 0", "worker 1", "worker 2"}
    assert outcome.totals.failures_survived == 0
    assert outcome.notes["deaths"] == outcome.notes["unfinished"] == {}
    assert outcome.totals.counts["samples"] == used(tmp_path), "each step that was made counts once"
    if strategy.startswith(("downpour", "hogwild")):
        assert used(tmp_path) == 3 * STEPS * 4, "the newcomer goes on exactly where it has left"


@pytest.mark.parametrize("kind", ["file", pytest.param("url", marks=pytest.mark.long)])
def test_a_notice_is_answered_within_seconds_and_the_lease_goes_to_others(kind, run, tmp_path):
    asked = []

    def answer(request):
        asked.append(request.path)
        return (200, "TRUE") if notice.exists() and request.path.endswith("/1") else (404, "")

    notice = tmp_path / "preempted 1"
    warned = Warned(notice.touch, notice.unlink)
    with serving(answer) as url:
        source = f"file:{tmp_path}/preempted {{rank}}" if kind == "file" else f"{url}/{{rank}}"
        options = {"workers": "2..3", "steps": None, "epochs": 12.0, "preemption_notice": source}
        _, outcome = run("downpour ps", warned, **options)
    assert warned.left_after < 5
    assert len(warned.pids) >= 2
    assert used(tmp_path) == outcome.totals.counts["samples"] == 12 * SAMPLES
    assert outcome.totals.failures_survived == 0
    assert {path.rpartition("/")[2] for path in asked} >= ({"0", "1"} if kind == "url" else set())


@pytest.mark.long
def test_a_notice_that_stays_gives_its_worker_up(run, tmp_path, caplog):
    options = {"steps": 3000, "preemption_notice": f"file:{tmp_path}/preempted {{rank}}"}
    warned = Warned((tmp_path / "preempted 1").touch)
    trial, outcome = run("downpour ps", warned, **options)
    assert trial.driver.roster.incarnations["worker 1"] == LIMIT + 1
    assert outcome.notes["unfinished"] == {"worker 1": "warned of preemption"}
    assert f"worker 1 is not started again: it has ended {LIMIT + 1} times in a row without a step" in caplog.text


@pytest.mark.long
def test_the_notice_of_the_launchers_machine_ends_the_run_with_a_checkpoint(tmp_path):
    notice = tmp_path / "preempted"
    words = ["--workers", "2..3", "--epochs", "100", "--checkpoint-every", "100000", "--data", str(tmp_path)]
    command = [sys.executable, "-m", "dure", "train", f"{JOBS}:notes_samples", "--sync", "downpour", *words]
    launcher = subprocess.Popen(
        [*command, "--out", str(tmp_path / "run"), "--preemption-notice", f"file:{notice}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until = time.monotonic() + 60
        while used(tmp_path) < 100:
            assert launcher.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        notice.touch()
        _, said = launcher.communicate(timeout=30)
    finally:
        launcher.kill()
        launcher.wait(30)
    assert launcher.returncode == 143
    assert "warns that this machine will be taken away" in said
    assert f"resume with: dure train --resume {tmp_path / 'run'}" in said


@pytest.mark.parametrize("on", ["virtual", "torchrun"])
def test_runs_whose_processes_dure_does_not_start_hear_no_notice(on):
    with raising(UsageError, "preemption_notice"):
        resolve(TrainConfig(job="digits-mlp", strategy="downpour", on=on, preemption_notice="file:/run/preempted"))
