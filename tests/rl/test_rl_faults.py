"""Real runs of reinforcement learning in which actors, replays and learners fail, freeze, or come late."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest
from support import faulty_environments
from support.purposes import soaked
from support.real_runs import Terminate, Trial, gone_within

from dure.errors import DureError
from dure.run import checkpoint
from dure.run.config import TrainConfig
from dure.run.train import train
from dure.runtime.launch.interruption import Interrupted, Interruption

ACTORS = 3
FILE = Path(faulty_environments.__file__)
PACE = "min_size=100,target_every=50,pull_every=20,send=10,samples_per_insert=16"


def trial(environment="slow", settings="", **options):
    job = f"apex:env={FILE}@{environment},actors={ACTORS},{PACE}{settings}"
    options = {"on": "local", "workers": 1, "eval_every": 100_000, "batch_size": 32, **options}
    return Trial(TrainConfig(job=job, optimizer="adam:lr=0.001", **options))


class KillActors:
    """Kills `count` actors at random moments, the next once the last failure is known. No count may fall meanwhile."""

    def __init__(self, count, seed=0, pause=0.3):
        self.count, self.pause = count, pause
        self.random = random.Random(seed)
        self.killed, self.due = [], 0.0
        self.largest = {}

    def __call__(self, trial):
        """Interfere once; whether all kills are done and known."""
        driver = trial.driver
        for name, found in driver.companions.figures().items():
            assert found.get("frames", 0) >= self.largest.get(name, 0)
            self.largest[name] = found.get("frames", 0)
        if driver.progress.totals.failures_survived < len(self.killed):
            return False
        actors = sorted(name for name in driver.roster.ready - driver.roster.failed.keys() if name.startswith("actor"))
        if len(self.killed) < self.count and actors and driver.steps("worker 0") and time.monotonic() >= self.due:
            self.killed.append(self.random.choice(actors))
            trial.kill(self.killed[-1])
            self.due = time.monotonic() + self.random.uniform(0, self.pause)
            return False
        return len(self.killed) == self.count


class SeenEnoughError(Exception):
    """Ends a run from within."""


def test_actors_that_are_killed_freeze_or_come_late_take_part(fork_server):
    one = trial(settings=",late=1,late_seconds=1.0", steps=1_000_000, frozen_after=1.5)
    kill, frozen = KillActors(4), {}

    def act(trial):
        driver = trial.driver
        if not frozen and kill(trial) and "actor 0" in driver.roster.ready - driver.roster.failed.keys():
            frozen["pid"] = trial.fork_server.pids["actor 0"]
            trial.fork_server.signal("actor 0", signal.SIGSTOP)
        elif frozen and driver.progress.totals.failures_survived == 5:
            frozen.setdefault("step", driver.steps("worker 0"))
            frozen.setdefault("figures", driver.companions.figures())
            figures = driver.companions.figures()
            grown = all(figures[name]["frames"] > frozen["figures"][name]["frames"] for name in ("actor 0", "actor 2"))
            if grown and driver.steps("worker 0") > frozen["step"] + 50:
                raise SeenEnoughError

    with pytest.raises(SeenEnoughError):
        one.run(act, fork_server=fork_server)
    assert one.driver.failures.causes["actor 0"].startswith("frozen: no heartbeat")
    assert one.driver.progress.totals.failures_survived == 5
    assert gone_within([frozen["pid"], *one.fork_server.pids.values()], 5)


def kill_once(name, after):
    """Kills a process once the learner has made `after` steps; notes the steps."""

    def act(trial):
        if not act.steps and trial.driver.steps("worker 0") >= after:
            act.steps = trial.driver.steps("worker 0")
            trial.kill(name)

    act.steps = 0
    return act


@pytest.mark.long
@pytest.mark.parametrize("victim", ["replay 0", *soaked("worker 0")])
def test_a_run_goes_back_to_its_checkpoint_with_the_replay_of_that_time(fork_server, victim, tmp_path, caplog):
    one = trial("walk", steps=300, checkpoint_every=100, out=tmp_path)
    kill = kill_once(victim, 150)
    outcome = one.run(kill, fork_server=fork_server)
    assert len(one.drivers) == 2
    assert outcome.totals.failures_survived == 1
    assert outcome.history[-1]["step"] == 300
    assert f"because of {victim}" in caplog.text
    saved = checkpoint.load(tmp_path / "checkpoints").parts
    replay, figures = saved["replay-0"].plain, one.driver.companions.figures()["replay 0"]
    assert figures["inserts"] >= replay["replay"]["inserted"] >= 100 + 200 * 2 - 50
    assert figures["samples"] >= 300 * 32
    assert figures["samples"] < (300 + 30) * 32, "samples since the checkpoint were counted twice"


@pytest.mark.long
def test_a_run_that_was_interrupted_goes_on_with_its_replay(fork_server, tmp_path):
    options = {"steps": 250, "checkpoint_every": 1000, "out": tmp_path}
    interruption = Interruption()
    with interruption.heard(), pytest.raises(Interrupted):
        trial("walk", **options).run(Terminate(100), fork_server=fork_server, interruption=interruption)
    saved = checkpoint.load(tmp_path / "checkpoints")
    held = saved.parts["replay-0"].plain["replay"]
    assert held["inserted"] >= 100 + 100 * 2 - 50
    one = trial("walk", resume=tmp_path, **options)
    outcome = one.run(fork_server=fork_server)
    figures = one.driver.companions.figures()
    assert outcome.history[-1]["step"] == 250 > saved.step
    assert held["sampled"] + (250 - saved.step) * 32 <= figures["replay 0"]["samples"] < (250 + 30) * 32
    assert figures["replay 0"]["inserts"] >= held["inserted"]
    actors = saved.parts["run"].plain["companions"]
    assert all(figures[name]["frames"] >= actors[name]["frames"] > 0 for name in ("actor 0", "actor 1", "actor 2"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("victim", ["replay 0", "worker 0"])
def test_without_a_checkpoint_the_loss_of_a_replay_or_of_the_learner_ends_the_run(fork_server, victim):
    one = trial("walk", steps=100_000)
    lost = "its transitions are gone" if victim == "replay 0" else "its model is gone"
    with pytest.raises(DureError, match=rf"^{victim} failed: killed by signal 9 \(SIGKILL\); ({lost})") as caught:
        one.run(kill_once(victim, 20), fork_server=fork_server)
    assert "--out with --checkpoint-every N" in str(caught.value)
    assert gone_within(list(one.fork_server.pids.values()), 5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ("raises", r"RuntimeError: the emulator lost its socket \(\S+, line \d+\); it has failed 6 times in a row"),
        ("is_no_number", "the environment gave an observation with NaN or infinity after 1 steps"),
        *soaked(("crashes", "killed by signal 11"), ("exits", "it ended, with exit status 0")),
    ],
)
def test_an_environment_that_always_fails_ends_the_run_with_its_cause(fork_server, environment, says):
    one = trial(environment, steps=100_000)
    with pytest.raises(DureError, match=rf"^actor \d.*{says}"):
        one.run(fork_server=fork_server)
    assert gone_within(list(one.fork_server.pids.values()), 5)


@pytest.mark.long
def test_an_actor_joins_late_in_virtual_time_too(tmp_path):
    job = f"apex:env={FILE}@walk,actors=3,{PACE},late=1,late_seconds=0.1,act_seconds=0.001,update_seconds=0.001"
    options = {"on": "virtual", "workers": 1, "steps": 160, "eval_every": 100_000, "batch_size": 32, "seed": 0}
    train(job, optimizer="adam:lr=0.001", checkpoint_every=50, out=tmp_path / "run", **options)
    saved = checkpoint.load(tmp_path / "run" / "checkpoints").parts
    steps = [saved[f"actor-{rank}"].plain["steps"] for rank in range(3)]
    assert 0 < steps[2] < min(steps[:2])
