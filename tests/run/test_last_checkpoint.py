"""Real runs that SIGTERM ends with a checkpoint, and what comes of them when they are resumed."""

from __future__ import annotations

import signal
import time

import pytest
import torch
from support.real_runs import Trial, configured

from dure.core.regular_file import LATEST
from dure.run import checkpoint
from dure.runtime.launch.interruption import Interrupted, Interruption

FAR = 10**6
"""The step of a checkpoint that is never reached."""


class Terminate:
    """Sends SIGTERM to this process once all workers have made `after` steps, and again `then` seconds later."""

    def __init__(self, after=10, then=None):
        self.after, self.then = after, then
        self.at = 0.0

    def __call__(self, trial):
        driver = trial.driver
        if not self.at and all(driver.steps(name) >= self.after for name in driver.roster.workers):
            self.at = time.monotonic()
            signal.raise_signal(signal.SIGTERM)
        elif self.at and self.then is not None and time.monotonic() > self.at + self.then:
            signal.raise_signal(signal.SIGTERM)


def interrupted(fork_server, strategy, act, **options):
    """The trial of a run that `act` ends; how many seconds that took."""
    options = {"workers": 2, "steps": 100_000, "checkpoint_every": FAR} | options
    trial = Trial(configured("waits_now_and_then", strategy, **options))
    interruption = Interruption()
    with pytest.raises(Interrupted) as caught, interruption.heard():
        trial.run(act, fork_server=fork_server, interruption=interruption)
    assert caught.value.number == signal.SIGTERM
    assert act.at, "no signal was sent"
    return trial, time.monotonic() - act.at


@pytest.mark.parametrize(
    "strategy",
    [
        "bsp",
        "ssp ps",
        *(pytest.param(text, marks=pytest.mark.soak) for text in ("bsp ps:shards=2", "averaging:period=8", "ad-psgd")),
    ],
)
def test_sigterm_leaves_a_checkpoint_of_all_processes(strategy, fork_server, tmp_path):
    trial, seconds = interrupted(fork_server, strategy, Terminate(), out=tmp_path)
    assert seconds < 10
    left = checkpoint.load(tmp_path / "checkpoints")
    assert 10 <= left.step < FAR
    assert left.parts.keys() >= {"run", "worker-0", "worker-1"}
    clocks = {left.parts[f"worker-{rank}"].plain["clock"] for rank in range(2)}
    assert min(clocks) >= 10
    assert not trial.setup.lockstep or clocks == {left.step}


def test_sigterm_while_a_worker_is_started_again_leaves_a_checkpoint(fork_server, tmp_path, caplog):
    """That worker listens at no address yet, so it cannot be asked to stop."""

    class KillFirst(Terminate):
        def __call__(self, trial):
            roster = trial.driver.roster
            if all(trial.driver.steps(name) >= self.after for name in roster.workers) and not roster.failed:
                trial.kill("worker 1")
            if not self.at and roster.incarnations["worker 1"] and "worker 1" not in roster.ready:
                self.at = time.monotonic()
                signal.raise_signal(signal.SIGTERM)

    _, seconds = interrupted(fork_server, "bsp", KillFirst(), out=tmp_path, replace=True)
    assert seconds < 10
    assert "no checkpoint" not in caplog.text
    left = checkpoint.load(tmp_path / "checkpoints")
    assert left.parts.keys() >= {"run", "worker-0"}
    assert left.parts["worker-0"].plain["clock"] == left.step < FAR


@pytest.mark.long
@pytest.mark.alone  # a busy machine needs more steps to agree on one to stop at
def test_a_run_that_is_resumed_after_sigterm_ends_as_if_undisturbed(fork_server, tmp_path):
    options = {"workers": 2, "steps": 4000, "checkpoint_every": FAR}
    whole = Trial(configured("digits-mlp", "bsp", **options, out=tmp_path / "whole")).run(fork_server=fork_server)
    options["out"] = tmp_path / "parts"
    trial = Trial(configured("digits-mlp", "bsp", **options))
    interruption = Interruption()
    with pytest.raises(Interrupted), interruption.heard():
        trial.run(Terminate(), fork_server=fork_server, interruption=interruption)
    assert checkpoint.load(tmp_path / "parts" / "checkpoints").step < 4000
    rest = Trial(configured("digits-mlp", "bsp", **options, resume=tmp_path / "parts")).run(fork_server=fork_server)
    assert rest.totals.steps == 4000
    assert torch.equal(rest.params, whole.params)


@pytest.mark.soak
def test_a_second_sigterm_ends_the_run_without_a_checkpoint(fork_server, tmp_path):
    stopped = Terminate(then=1.2)

    def act(trial):
        if not stopped.at:
            stopped(trial)
            if stopped.at:
                trial.fork_server.signal("worker 1", signal.SIGSTOP)  # so that no checkpoint comes about
        else:
            stopped(trial)

    act.at = 1.0
    _, _ = interrupted(fork_server, "bsp", act, out=tmp_path, grace=60)
    assert 1.2 <= time.monotonic() - stopped.at < 10
    assert not (tmp_path / "checkpoints" / LATEST).exists()


def test_a_run_that_cannot_write_its_checkpoint_ends_after_the_grace(fork_server, tmp_path, caplog):
    stopped = Terminate()

    def act(trial):
        if not stopped.at:
            stopped(trial)
            if stopped.at:
                trial.fork_server.signal("worker 1", signal.SIGSTOP)

    act.at = 1.0
    interrupted(fork_server, "ssp ps", act, out=tmp_path, grace=1)
    assert 1 <= time.monotonic() - stopped.at < 10
    assert "no checkpoint was written within 1 s; --grace gives a run more time" in caplog.text


@pytest.mark.parametrize("options", [{}, pytest.param({"grace": 0}, marks=pytest.mark.soak)])
def test_sigterm_ends_a_run_without_checkpoints_at_once(options, fork_server, tmp_path):
    act = Terminate()
    given = {"out": tmp_path, "grace": 0} if options else {"out": None, "checkpoint_every": None}
    _, seconds = interrupted(fork_server, "bsp", act, **given)
    assert seconds < 5
