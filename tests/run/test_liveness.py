"""Processes of real runs that are stopped by a signal, or work for long: the first are given up, the second are not."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.real_runs import JOBS, Trial, configured, is_running
from support.wording import raising

from dure.errors import DureError, UsageError
from dure.run.config import TrainConfig
from dure.run.prebuilt import Callbacks
from dure.run.process import FaultSettings
from dure.runtime.launch.fork_server import ForkServer

SOON = {"warn_after": 0.4, "frozen_after": 1.0}
LATEST = 12.0
"""Seconds within which a run with these limits has given a frozen process up, on a machine that does other things."""


class Stop:
    """Stops a process once all workers have made some steps; continues it once `until` holds."""

    def __init__(self, name, *, after=10, until=lambda trial: False):
        self.name, self.after, self.until = name, after, until
        self.at = self.continued = 0.0

    def __call__(self, trial):
        driver = trial.driver
        if not self.at and all(driver.steps(name) >= self.after for name in driver.roster.workers):
            self.at = time.monotonic()
            trial.fork_server.signal(self.name, signal.SIGSTOP)
        elif self.at and not self.continued and self.until(trial):
            self.continued = time.monotonic()
            trial.fork_server.signal(self.name, signal.SIGCONT)


def run(fork_server, strategy, act, *, job="waits_now_and_then", fault_settings=None, **options):
    """A run of two workers; its trial, its outcome, and the texts that the progress line has shown."""
    notices = []
    trial = Trial(configured(job, strategy, **{"workers": 2, "steps": 60, **SOON} | options), fault_settings)
    outcome = trial.run(act, fork_server=fork_server, callbacks=Callbacks(notice=notices.append))
    return trial, outcome, notices


# ---- frozen workers


SOAK = pytest.mark.soak


@pytest.mark.long
@pytest.mark.parametrize(
    "strategy",
    [
        "downpour ps",
        "hogwild",
        pytest.param("ad-psgd", marks=SOAK),
        pytest.param("easgd:period=2 ps", marks=SOAK),
        pytest.param("lbfgs ps", marks=SOAK),
    ],
)
def test_methods_that_can_go_on_evict_a_frozen_worker(strategy, fork_server, caplog):
    stop = Stop("worker 1", after=1 if "lbfgs" in strategy else 10)
    job = "quadratic" if "lbfgs" in strategy else "waits_now_and_then"
    _, outcome, notices = run(fork_server, strategy, stop, job=job, steps=400)
    assert stop.at, "nothing was stopped"
    assert time.monotonic() - stop.at < LATEST
    assert "worker 1 frozen" in notices
    assert "worker 1 is frozen: no heartbeat for 0.4 s" in caplog.text
    reason = "frozen: no heartbeat for 1 s"
    assert outcome.notes["unfinished"] == {"worker 1": reason}
    lost = "deaths" if strategy == "hogwild" else "evicted"
    assert outcome.notes[lost] == {"worker 1": reason}
    assert outcome.totals.failures_survived == 1


@pytest.mark.long
def test_checkpoints_go_on_while_a_neighbor_in_gossip_is_frozen(fork_server, tmp_path):
    """A worker that stops for a checkpoint waits for its averaging: not with a neighbor that has been given up."""
    stop = Stop("worker 1", after=30)
    options = {"workers": 3, "steps": 300, "out": tmp_path / "run", "checkpoint_every": 20}
    _, outcome, _ = run(fork_server, "ad-psgd gossip:graph=complete", stop, **options)
    assert stop.at
    assert time.monotonic() - stop.at < LATEST
    assert outcome.notes["evicted"] == {"worker 1": "frozen: no heartbeat for 1 s"}
    assert outcome.totals.counts["updates_applied"] >= 2 * 300


@SOAK
def test_a_worker_that_was_evicted_as_frozen_is_refused_and_joins_again(fork_server):
    stop = Stop("worker 1", until=lambda trial: "worker 1" in trial.driver.roster.evicted)
    trial, outcome, _ = run(fork_server, "downpour ps", stop, fault_settings=FaultSettings(log=True), steps=1500)
    assert stop.continued, "it was never evicted"
    assert outcome.notes["unfinished"] == outcome.notes["evicted"] == {}
    assert trial.driver.roster.finished["worker 1"]["steps"] == 1500
    mine = [incarnation for worker, incarnation, _ in trial.driver.logs[0] if worker == 1]
    assert mine == sorted(mine), "an update of the incarnation before was taken"
    assert set(mine) == {0, 1}


@pytest.mark.parametrize("strategy", ["one-shot", pytest.param("bsp collective:algorithm=ring", marks=SOAK)])
def test_a_frozen_rank_of_a_collective_ends_the_run_which_names_it(strategy, fork_server):
    stop = Stop("worker 1")
    with raising(DureError, "worker 1"):
        run(fork_server, strategy, stop, steps=100_000)
    assert time.monotonic() - stop.at < LATEST


@SOAK
def test_a_run_whose_only_worker_is_frozen_ends(fork_server):
    with pytest.raises(DureError, match=r"^no worker is left; the last of them, worker 0, is frozen"):
        run(fork_server, "downpour ps", Stop("worker 0"), workers=1, steps=100_000)


@SOAK
def test_a_frozen_holder_of_a_lock_is_killed_which_releases_it(fork_server):
    stop = Stop("worker 1", after=3)
    trial, outcome, _ = run(
        fork_server, "asysvrg:lock=write", stop, job="quadratic", steps=2000, fault_settings=FaultSettings()
    )
    assert outcome.notes["unfinished"] == {"worker 1": "frozen: no heartbeat for 1 s"}
    assert not is_running(trial.fork_server.pids["worker 1"])


# ---- frozen servers, and the fork server


def test_a_frozen_server_ends_the_run_which_names_it(fork_server):
    stop = Stop("server 1")
    with raising(DureError, "server 1"):
        run(fork_server, "ssp ps:shards=2", stop, steps=100_000)
    assert time.monotonic() - stop.at < LATEST


@SOAK
def test_a_frozen_server_is_started_again_from_the_last_checkpoint(fork_server, tmp_path):
    stop = Stop("server 1", after=120)
    options = {"out": tmp_path / "run", "checkpoint_every": 50, "steps": 300}
    trial, outcome, _ = run(fork_server, "downpour ps:shards=2", stop, **options)
    assert stop.at
    assert outcome.notes["deaths"] == {"server 1": "frozen: no heartbeat for 1 s"}
    assert outcome.notes["unfinished"] == {}
    assert len(trial.drivers) == 1


@SOAK
def test_a_fork_server_that_is_frozen_at_start_ends_the_run():
    with ForkServer() as own:
        os.kill(own._process.pid, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(DureError, match=r"^the process that starts the others is frozen: no heartbeat for 1 s"):
            run(own, "bsp", lambda trial: None)
        assert time.monotonic() - started < LATEST
        os.kill(own._process.pid, signal.SIGCONT)


@SOAK
def test_a_worker_that_is_frozen_at_start_is_not_waited_for(fork_server):
    def act(trial):
        if "worker 1" in trial.fork_server.pids and "worker 1" not in trial.driver.roster.ready:
            trial.fork_server.signal("worker 1", signal.SIGSTOP)

    trial = Trial(configured("small", "bsp ps", workers=3, steps=30, **SOON))
    outcome = trial.run(act, always=True, fork_server=fork_server)
    assert outcome.notes["unfinished"] == {"worker 1": "frozen: no heartbeat for 1 s"}
    assert len(trial.driver.roster.finished) == 2


# ---- what is slow, or stopped as a whole, is not frozen


CONTROLS = ["bsp", "downpour ps", "ad-psgd", "hogwild", pytest.param("bsp collective:algorithm=ring", marks=SOAK)]


@pytest.mark.long
@pytest.mark.parametrize("strategy", CONTROLS)
def test_one_long_step_is_slow_and_ends_nothing(strategy, fork_server, tmp_path):
    trial, outcome, notices = run(fork_server, strategy, lambda trial: None, job="one_sleeps", data=tmp_path, steps=60)
    check_long_step(tmp_path, trial, outcome, notices)


@SOAK
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["bsp", "bsp collective:algorithm=ring", "downpour ps", "ad-psgd", "hogwild"])
def test_a_step_of_90_seconds_is_slow_and_ends_nothing(strategy, fork_server, tmp_path):
    (tmp_path / "seconds").write_text("90")
    limits = {"warn_after": 10.0, "frozen_after": 30.0}
    job = {"job": "one_sleeps", "data": tmp_path, "steps": 60, **limits}
    check_long_step(tmp_path, *run(fork_server, strategy, lambda trial: None, **job))


@SOAK
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seconds", [1.6, 90])
@pytest.mark.parametrize(
    "strategy", ["bsp", "bsp collective:algorithm=ring", "bsp ps", "downpour ps", "ad-psgd", "hogwild"]
)
def test_a_long_evaluation_ends_nothing(strategy, seconds, fork_server, tmp_path):
    (tmp_path / "seconds").write_text(str(seconds))
    limits = SOON if seconds < 90 else {"warn_after": 10.0, "frozen_after": 30.0}
    job = {"job": "one_evaluation_sleeps", "data": tmp_path, "steps": 60, "eval_every": 10, **limits}
    trial, outcome, notices = run(fork_server, strategy, lambda trial: None, **job)
    assert (tmp_path / "struck").exists(), "no evaluation was long"
    assert not any("frozen" in text for text in notices)
    assert outcome.notes["unfinished"] == outcome.notes["deaths"] == outcome.notes["evicted"] == {}
    assert {said["done"] for said in trial.driver.roster.finished.values()} == {60}


def check_long_step(tmp_path, trial, outcome, notices):
    assert (tmp_path / "struck").exists(), "no step was long"
    assert any("slow" in text for text in notices)
    assert not any("frozen" in text for text in notices)
    assert outcome.notes["unfinished"] == outcome.notes["deaths"] == outcome.notes["evicted"] == {}
    assert {said["done"] for said in trial.driver.roster.finished.values()} == {60}


@SOAK
def test_native_code_that_keeps_the_interpreters_lock_is_not_frozen(fork_server, tmp_path):
    _, outcome, notices = run(fork_server, "downpour ps", lambda trial: None, job="one_computes_in_c", data=tmp_path)
    assert (tmp_path / "struck").exists()
    assert outcome.notes["unfinished"] == {}
    assert not any("frozen" in text for text in notices)


@SOAK
@pytest.mark.timeout(300)
def test_a_step_of_90_seconds_under_torchrun_is_slow_and_ends_nothing(tmp_path):
    (tmp_path / "seconds").write_text("90")
    program = ["-m", "dure", "train", f"{JOBS}:one_sleeps", "--data", str(tmp_path), "--steps", "60", "--json"]
    for strategy in ("bsp", "downpour ps"):
        (tmp_path / "struck").unlink(missing_ok=True)
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [sys.executable, *launch, *program, "--strategy", strategy, "--on", "torchrun"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[-3000:]
        assert json.loads(done.stdout)["unfinished"] == {}


def start_rank(rank: int, port: int, *arguments: str) -> subprocess.Popen[str]:
    """A rank of two, of `dure train --on torchrun`, without torchrun's agent: rank 0 holds the store."""
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "dure", "train", f"{JOBS}:waits_now_and_then", "--on", "torchrun", *arguments]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env={**os.environ, **place, **paths}, **output)


@SOAK
@pytest.mark.parametrize("strategy", ["bsp", "downpour ps"])
@pytest.mark.parametrize(("frozen", "named"), [(0, "rank 0"), (1, "worker 1")])
def test_a_frozen_rank_of_train_under_torchrun_ends_or_leaves_the_run(strategy, frozen, named, tmp_path):
    port = free_port()
    options = ["--strategy", strategy, "--steps", "2000", "--frozen-after", "3", "--out", str(tmp_path / "run")]
    ranks = [start_rank(rank, port, *options) for rank in (0, 1)]
    with ranks[0], ranks[1]:
        try:
            await_rows(tmp_path / "run" / "history.jsonl")
            ranks[frozen].send_signal(signal.SIGSTOP)
            _, errors = ranks[1 - frozen].communicate(timeout=60)
        finally:
            for each in ranks:
                each.kill()
    assert "is frozen" in errors, errors
    assert named in errors, errors
    goes_on = strategy == "downpour ps" and frozen == 1
    assert ranks[1 - frozen].returncode == (3 if goes_on else 1), errors
    assert "Traceback" not in errors


def await_rows(history: Path) -> None:
    """Until a run has recorded that it makes steps."""
    deadline = time.monotonic() + 60
    while not history.exists() or len(history.read_text(encoding="utf-8").splitlines()) < 3:
        assert time.monotonic() < deadline, "the run makes no steps"
        time.sleep(0.05)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@SOAK
def test_a_machine_that_sleeps_as_a_whole_loses_nobody(fork_server):
    asleep = []

    def act(trial):
        if not asleep and trial.driver.steps("worker 1") > 10:
            for pid in trial.pids():
                os.kill(pid, signal.SIGSTOP)
            asleep.append(time.monotonic())
            time.sleep(4.0)  # nothing of the run goes on, this launcher included
            for pid in trial.pids():
                os.kill(pid, signal.SIGCONT)

    _, outcome, notices = run(fork_server, "downpour ps", act, steps=400, warn_after=2.5, frozen_after=3.0)
    assert asleep
    assert outcome.notes["unfinished"] == {}
    assert notices[-1:] in ([], [""])


# ---- options


def test_a_process_is_named_before_it_is_given_up():
    with raising(UsageError, "warn_after=40"):
        TrainConfig(job="quadratic", warn_after=40.0)


def test_limits_are_recorded(tmp_path: Path):
    assert TrainConfig(job="quadratic", frozen_after=9.0).plain()["frozen_after"] == 9.0
