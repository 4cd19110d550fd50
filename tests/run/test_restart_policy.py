"""Servers of real runs that are killed, and started again from the last checkpoint."""

from __future__ import annotations

import random
import signal
import threading
from pathlib import Path

import pytest
from support.purposes import soaked
from support.real_runs import Killer, Notes, Trial, configured
from support.runs import resolved, virtual
from support.stage_jobs import job_text
from support.wording import raising

from dure.core.state import State
from dure.errors import DureError
from dure.run import checkpoint, failures
from dure.run.config import TrainConfig
from dure.run.prebuilt import Callbacks


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(failures, "BACK_OFF_SECONDS", 0.05)


def applied_of(part: State) -> list[tuple[int, int, int]]:
    return [tuple(entry) for entry in part.plain["log"]]


class ServerKiller:
    """Kills servers, one after another, each some steps after a checkpoint of its own; keeps what that had."""

    def __init__(self, victims: list[str], folder: Path, seed: int = 5, pause: float = 0.0) -> None:
        self.pause = pause  # seconds before the cause of a failure is known
        self.victims = victims
        self.folder = folder
        self.killed: list[str] = []
        self.snapshots: list[checkpoint.Checkpoint] = []
        self.random = random.Random(seed)
        self.after = self.random.randint(5, 15)

    def __call__(self, trial: Trial) -> None:
        driver, done = trial.driver, len(self.killed)
        if (
            done == len(self.victims)
            or driver.checkpoints.round is not None
            or driver.restarts.awaited
            or not driver.roster.ready >= set(driver.roster.servers)
        ):
            return
        due = driver.checkpoints.due - trial.config.checkpoint_every
        if (
            due
            and min(map(driver.steps, driver.roster.workers)) >= due + self.after
            and driver.progress.totals.failures_survived == done
        ):
            self.snapshots.append(checkpoint.load(self.folder))
            self.after = self.random.randint(5, 15)
            self.killed.append(self.victims[done])
            trial.kill(self.victims[done])
            if self.pause:
                trial.fork_server._process.send_signal(signal.SIGSTOP)
                threading.Timer(self.pause, trial.fork_server._process.send_signal, [signal.SIGCONT]).start()


def in_order(log: list[tuple[int, int, int]], worker: int) -> list[int]:
    return [seq for who, _, seq in log if who == worker]


@pytest.mark.long
def test_servers_that_apply_on_arrival_come_back_alone_and_apply_nothing_twice(tmp_path, fork_server):
    out, notes_folder = tmp_path / "run", tmp_path / "notes"
    notes_folder.mkdir()
    options = {"workers": 3, "steps": 300, "data": notes_folder, "out": out, "checkpoint_every": 50}
    trial = Trial(configured("counted_slowly", "downpour ps:shards=3", **options))
    killer = ServerKiller(["server 1", "server 2", "server 1"], out / "checkpoints")
    outcome = trial.run(killer, fork_server=fork_server)
    assert killer.killed == ["server 1", "server 2", "server 1"], "a fault did not fire"
    assert outcome.totals.failures_survived == 3
    assert outcome.notes["deaths"] == dict.fromkeys(("server 1", "server 2"), "killed by signal 9 (SIGKILL)")
    assert len(trial.drivers) == 1, "the others were not left alone"
    assert {said["done"] for said in trial.driver.roster.finished.values()} == {300}
    notes, logs = Notes(notes_folder), trial.driver.logs
    for log in logs:
        assert len(set(log)) == len(log), "an update was applied twice"
        assert all(in_order(log, worker) == sorted(in_order(log, worker)) for worker in range(3))
    assert len(logs[0]) == len(notes.acknowledged) == 900
    assert all(notes.acknowledged - set(log) for log in logs[1:]), "nothing was lost: was anybody killed?"
    assert outcome.params.equal(notes.replay(trial.setup, logs)), "a slice is not what its updates make"
    epochs = [status["epoch"] for status in trial.driver.statuses]
    assert epochs[0] == 0
    assert epochs[1] > epochs[2] >= 1
    for victim, snapshot in zip(killer.killed, killer.snapshots, strict=True):
        number = int(victim.split()[1])
        had = applied_of(snapshot.parts[f"shard-{number}"])
        assert logs[number][: len(had)] == had, "what the snapshot had is gone"


@pytest.mark.parametrize(
    ("strategy", "victim", "pause"),
    [("bsp ps:shards=2", "server 0", 0.0), *soaked(("bsp ps:shards=2", "server 1", 0.0), ("bsp ps", "server 0", 1.5))],
)
def test_where_order_counts_everybody_goes_back_and_the_result_is_that_of_no_kill(
    strategy, victim, pause, tmp_path, fork_server
):
    options = {"workers": 2, "steps": 180, "checkpoint_every": 60, "eval_every": 20}
    calm = Trial(configured("waits_now_and_then", strategy, **options, out=tmp_path / "calm"))
    expected = calm.run(fork_server=fork_server)
    trial = Trial(configured("waits_now_and_then", strategy, **options, out=tmp_path / "run"))
    killer = ServerKiller([victim], tmp_path / "run" / "checkpoints", pause=pause)
    rewound: list[int] = []
    outcome = trial.run(killer, fork_server=fork_server, callbacks=Callbacks(rewind=rewound.append))
    assert killer.killed == [victim]
    assert len(trial.drivers) == 2
    assert outcome.totals.failures_survived == 1
    assert outcome.notes["deaths"] == {victim: "killed by signal 9 (SIGKILL)"}
    assert outcome.params.equal(expected.params)
    assert trial.driver.logs == calm.driver.logs
    assert rewound == [checkpoint.rows(killer.snapshots[0])]
    steps = [row["step"] for row in outcome.history]
    assert steps == sorted(set(steps))
    assert outcome.totals.counts["updates_applied"] == 360


@pytest.mark.long
@pytest.mark.parametrize(("victim", "lives"), [("server 1", 2), ("worker 1", 1)])
def test_workers_follow_verdicts_after_a_server_or_a_worker_was_killed(victim, lives, tmp_path, fork_server):
    """Each life that starts late pulls model and velocity, and goes on by verdicts; all models are the servers'."""
    notes = tmp_path / "notes"
    notes.mkdir()
    options = {"optimizer": "momentum:lr=0.01,momentum=0.9", "checkpoint_every": 25, "data": notes}
    options |= {"workers": 2, "steps": 75, "out": tmp_path / "run"}
    trial = Trial(configured("follows_verdicts", "bsp ps:shards=2 sign", **options))
    killer = ServerKiller([victim], tmp_path / "run" / "checkpoints") if "server" in victim else Killer(1, seed=1)

    def act(trial: Trial) -> None:
        if max(map(trial.driver.steps, ("worker 0", "worker 1"))) > 10:
            killer(trial)

    outcome = trial.run(act, fork_server=fork_server)
    assert len(killer.killed) == outcome.totals.failures_survived == 1
    models = [[line.split() for line in path.read_text().splitlines()] for path in notes.iterdir()]
    assert {same for lines in models for _, same in lines} == {"same"}
    late = [[brought for brought, _ in lines] for lines in models if ["model", "same"] in lines]
    assert len(late) == lives
    assert all(brought[0] == "model" and set(brought[2:]) == {"verdict"} for brought in late)


@pytest.mark.long
@pytest.mark.alone  # beside other tests the kill may come in the last steps
@pytest.mark.parametrize("partition", ["pipedream:stages=2", *soaked("1f1b:stages=2,micro=2")])
def test_a_worker_of_a_pipeline_takes_everybody_back(partition, tmp_path, fork_server):
    """The result is that of the run without a kill, and with the same checkpoints."""
    options = {"workers": 4, "steps": 90, "checkpoint_every": 30, "eval_every": 10, "optimizer": "momentum"}
    strategy = f"bsp collective {partition}"
    config = TrainConfig(job=job_text("slow"), strategy=strategy, on="local", out=tmp_path / "run", **options)
    trial, killer = Trial(config), ServerKiller(["worker 3"], tmp_path / "run" / "checkpoints")
    rewound: list[int] = []
    outcome = trial.run(killer, fork_server=fork_server, callbacks=Callbacks(rewind=rewound.append))
    assert killer.killed == ["worker 3"]
    assert len(trial.drivers) == 2
    assert outcome.totals.failures_survived == 1
    assert outcome.notes["deaths"]["worker 3"] == "killed by signal 9 (SIGKILL)"
    calm = virtual(job_text("slow"), strategy, out=tmp_path / "calm", **options)
    assert outcome.params.equal(calm.params)
    assert rewound == [checkpoint.rows(killer.snapshots[0])]
    for name in ("step", "updates", "loss"):
        assert [row[name] for row in outcome.history] == [row[name] for row in calm.rows], name
    assert outcome.totals.counts["samples"] == calm.outcome.totals.counts["samples"]


@pytest.mark.long
def test_an_error_of_a_worker_of_a_pipeline_takes_nobody_back(tmp_path, fork_server):
    """It would be raised again."""
    options = {"workers": 2, "steps": 90, "checkpoint_every": 5, "out": tmp_path}
    config = TrainConfig(
        job=job_text("fails"), strategy="bsp collective gpipe:stages=2,micro=2", on="local", **options
    )  # fmt: skip
    trial = Trial(config)
    with raising(DureError, "worker 1"):
        trial.run(fork_server=fork_server)
    assert len(trial.drivers) == 1


@pytest.mark.long
def test_the_clock_of_updates_on_arrival_takes_everybody_back(tmp_path, fork_server):
    options = {"workers": 2, "steps": 320, "checkpoint_every": 80, "out": tmp_path / "run"}
    trial = Trial(configured("waits_now_and_then", "downpour ps:shards=2", **options))
    killer = ServerKiller(["server 0"], tmp_path / "run" / "checkpoints")
    outcome = trial.run(killer, fork_server=fork_server)
    assert killer.killed == ["server 0"]
    assert len(trial.drivers) == 2
    assert [len(set(log)) for log in trial.driver.logs] == [len(log) for log in trial.driver.logs] == [640, 640]
    assert outcome.totals.failures_survived == 1


def test_a_server_that_dies_again_and_again_is_given_up(tmp_path, fork_server, monkeypatch):
    monkeypatch.setattr(failures, "BACK_OFF_SECONDS", 0.01)
    options = {"workers": 2, "steps": 100_000, "checkpoint_every": 20, "out": tmp_path / "run"}
    trial = Trial(configured("waits_now_and_then", "downpour ps:shards=2", **options))
    began = []

    def act(trial: Trial) -> None:
        if (tmp_path / "run" / "checkpoints" / "LATEST").exists() and trial.driver.roster.ready >= {"server 1"}:
            began.append(trial.fork_server.pids.get("server 1"))
            trial.kill("server 1")

    with raising(DureError, "server 1"):
        trial.run(act, fork_server=fork_server)
    assert len(set(began)) == 1 + failures.LIMIT


def test_without_a_checkpoint_yet_the_run_ends(tmp_path, fork_server):
    options = {"workers": 2, "steps": 100_000, "checkpoint_every": 50_000, "out": tmp_path / "run"}
    trial = Trial(configured("waits_now_and_then", "downpour ps:shards=2", **options))

    def act(trial: Trial) -> None:
        if trial.driver.steps("worker 0") > 10:
            trial.kill("server 1")

    with raising(DureError, "server 1"):
        trial.run(act, fork_server=fork_server)


def test_the_pause_before_a_restart_doubles_each_time(tmp_path):
    (tmp_path / "LATEST").touch()
    options = {"workers": 2, "checkpoint_every": 10, "out": tmp_path}
    setup, _ = resolved("quadratic", "bsp ps:shards=2", on="local", **options)
    policy = failures.RestartPolicy(setup, tmp_path)
    pauses = [policy.together(["server 1"], []) for _ in range(failures.LIMIT + 1)]
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, None]
