"""Real runs in which processes die, freeze, or come late."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from support.purposes import long, soaked
from support.real_runs import Killer, Notes, Trial, configured, descendants, descriptors, gone_within
from support.wording import raising

from dure.errors import DureError
from dure.run.process import FaultSettings

LATEST = 60.0
"""Seconds that anything here may take on a machine that does other things as well."""


@pytest.fixture
def run(fork_server):
    def once(job, strategy, act=lambda trial: None, fault_settings=None, *, own=False, **options):
        trial = Trial(configured(job, strategy, **options), fault_settings)
        return trial, trial.run(act, fork_server=None if own else fork_server)

    return once


def when(condition, action):
    """An act that happens once, as soon as `condition` holds."""
    happened = []

    def act(trial):
        if not happened and condition(trial):
            happened.append(time.monotonic())
            action(trial)

    act.happened = happened
    return act


def check_exactly_once(trial, notes, outcome, kills):
    """Every acknowledged update is in every log once; each death may have left one that nobody has heard of."""
    for log in trial.driver.logs:
        applied = set(log)
        assert len(applied) == len(log), "an update was applied twice"
        assert notes.acknowledged <= applied, "an acknowledged update is lost"
        assert len(applied - notes.acknowledged) <= kills
    assert outcome.params.equal(notes.replay(trial.setup, trial.driver.logs))


# ---- workers that die


@pytest.mark.parametrize(
    ("strategy", "kills"),
    [
        ("ssp:bound=3 ps:shards=3", 3),
        *long(("ssp:bound=3 ps:shards=3", 10), ("downpour:at_once=true ps", 10)),
        *soaked(("ssp:bound=3 ps", 10), ("downpour ps:shards=3", 10)),
    ],
)
def test_kills_in_the_middle_of_pushes_lose_nothing_and_repeat_nothing(strategy, kills, tmp_path, fork_server):
    trial = Trial(configured("counted", strategy, workers=4, steps=80 * kills, data=tmp_path))
    killer = Killer(kills, seed=3, pause=0.05)
    outcome = trial.run(killer, fork_server=fork_server)
    notes = Notes(tmp_path)
    assert len(killer.killed) == kills
    assert notes.cut_short, "no kill came while something was pushed: the fault did not fire"
    assert outcome.totals.failures_survived == kills
    check_exactly_once(trial, notes, outcome, kills=kills)
    if strategy == "ssp:bound=3 ps:shards=3":
        assert trial.driver.logs[0] == trial.driver.logs[1] == trial.driver.logs[2]
    assert trial.driver.roster.finished.keys() == {f"worker {rank}" for rank in range(4)}
    assert outcome.history[-1]["loss"] == 0.0  # the test data are zeros


@pytest.mark.long
def test_bsp_shrinks_when_a_worker_is_killed(run):
    kill = when(lambda trial: trial.driver.steps("worker 1") > 10, lambda trial: trial.kill("worker 1"))
    on = when(lambda trial: kill.happened and trial.driver.steps("worker 0") > 100, lambda trial: None)

    def act(trial):
        kill(trial)
        on(trial)

    trial, outcome = run("waits_now_and_then", "bsp ps:shards=2", act, workers=3, steps=300)
    assert on.happened[0] - kill.happened[0] < 4.9, "the others waited for the dead"
    assert outcome.totals.failures_survived == 1
    assert outcome.notes["deaths"] == {"worker 1": "killed by signal 9 (SIGKILL)"}
    assert [trial.driver.roster.finished[f"worker {rank}"]["steps"] for rank in (0, 2)] == [300, 300]
    log = trial.driver.logs[0]
    assert trial.driver.logs[1] == log
    done = sum(worker == 1 for worker, _, _ in log)
    assert 10 <= done < 300
    assert len(log) == 600 + done
    assert outcome.totals.counts["updates_applied"] == len(log)


def test_a_kill_under_collectives_ends_the_run_with_one_sentence(run):
    kill = when(lambda trial: trial.driver.steps("worker 1") > 10, lambda trial: trial.kill("worker 1"))
    with pytest.raises(DureError) as caught:
        run("waits_now_and_then", "bsp collective:algorithm=ring", kill, workers=3, steps=100_000)
    assert time.monotonic() - kill.happened[0] < 5
    assert str(caught.value).startswith("worker 1 failed: killed by signal 9 (SIGKILL); bsp collective")
    assert "--out with --checkpoint-every N writes one" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_server_that_dies_ends_the_run_with_one_sentence(run):
    kill = when(lambda trial: trial.driver.steps("worker 1") > 10, lambda trial: trial.kill("server 1"))
    with raising(DureError, "server 1"):
        run("waits_now_and_then", "ssp ps:shards=2", kill, workers=2, steps=100_000)
    assert time.monotonic() - kill.happened[0] < 5


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("job", "cause"),
    [
        ("one_raises", r"RuntimeError: the labels of this batch are upside down \(.*faulty_jobs\.py, line \d+\)"),
        ("one_exits", "it ended, with exit status 0, before its work was done"),
        ("one_crashes", r"killed by signal 11 \(SIGSEGV\)"),
    ],
)
def test_the_others_survive_whatever_ends_a_worker_and_its_cause_is_named(run, job, cause, tmp_path):
    trial, outcome = run(job, "bsp ps", workers=3, steps=60, data=tmp_path)
    assert outcome.totals.failures_survived == 1
    (said,) = outcome.notes["deaths"].values()
    assert re.fullmatch(cause, said)
    assert sorted(said["steps"] for said in trial.driver.roster.finished.values()) == [60, 60]


@pytest.mark.parametrize(
    ("job", "cause"),
    [("raises", "RuntimeError: the labels of this batch are upside down"), ("exits", "it ended, with exit status 0")],
)
def test_when_all_workers_die_the_error_names_the_cause(run, job, cause):
    with pytest.raises(DureError, match=f"^all workers failed; the first of them, worker [01]: {cause}"):
        run(job, "ssp ps", workers=2, steps=60)


def test_a_job_that_fails_under_collectives_says_what_failed_and_to_resume_only_from_a_checkpoint(run, tmp_path):
    failed = (
        r"^worker [01] failed: RuntimeError: the labels of this batch are upside down \(.*; .* do so in any group\."
    )
    with pytest.raises(DureError, match=f"{failed}$"):
        run("raises", "bsp", workers=2, steps=60)
    with pytest.raises(DureError, match=rf"{failed} Resume with: dure train --resume"):
        run("raises", "bsp", workers=2, steps=60, checkpoint_every=5, out=tmp_path)


@pytest.mark.long
def test_an_interrupted_worker_is_a_failed_worker(run):
    """A SIGINT to one process alone is no Ctrl-C: the run goes on, and no traceback is shown."""
    interrupt = when(
        lambda trial: trial.driver.steps("worker 1") > 5,
        lambda trial: trial.fork_server.signal("worker 1", signal.SIGINT),
    )
    _, outcome = run("waits_now_and_then", "ssp ps", interrupt, workers=2, steps=200)
    assert interrupt.happened
    assert outcome.notes["deaths"] == {"worker 1": "killed by signal 2 (SIGINT)"}


def test_a_worker_that_dies_before_it_has_joined_is_not_waited_for(fork_server):
    kill = when(lambda trial: "worker 1" in trial.fork_server.pids, lambda trial: trial.kill("worker 1"))
    trial = Trial(configured("small", "bsp ps", workers=3, steps=30))
    outcome = trial.run(kill, always=True, fork_server=fork_server)
    assert kill.happened
    assert outcome.totals.failures_survived == 1
    assert len(trial.driver.roster.finished) == 2


# ---- workers that come


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ssp:bound=2 ps:shards=2", "bsp ps:shards=2"])
def test_a_worker_that_comes_late_takes_part(run, strategy):
    come = when(lambda trial: trial.driver.steps("worker 0") > 20, lambda trial: trial.driver.start("worker 2"))
    fault_settings = FaultSettings(absent=(2,), log=True)
    trial, outcome = run("waits_now_and_then", strategy, come, fault_settings, workers=3, steps=300)
    done = sum(worker == 2 for worker, _, _ in trial.driver.logs[0])
    assert 0 < done < 280
    assert outcome.totals.per_worker["worker 2"]["steps"] == done
    assert trial.driver.roster.finished["worker 2"]["steps"] == 300  # it entered where the slowest was
    assert trial.driver.logs[0] == trial.driver.logs[1]
    assert outcome.totals.failures_survived == 0


# ---- workers that freeze


@pytest.mark.parametrize("strategy", ["bsp ps:shards=2", *soaked("ssp:bound=2 ps:shards=2")])
def test_a_frozen_worker_is_left_behind_refused_and_taken_in_again(run, strategy):
    noticed, back = [], []

    def act(trial):
        freeze(trial)
        if not noticed and "worker 1" in trial.driver.roster.evicted:
            noticed.append(time.monotonic())
            trial.steps_then = trial.driver.steps("worker 0")
        if noticed and not back and trial.driver.steps("worker 0") > trial.steps_then + 30:
            back.append(time.monotonic())
            trial.fork_server.signal("worker 1", signal.SIGCONT)

    freeze = when(
        lambda trial: trial.driver.steps("worker 1") > 20,
        lambda trial: trial.fork_server.signal("worker 1", signal.SIGSTOP),
    )
    trial, outcome = run(
        "waits_now_and_then", strategy, act, FaultSettings(evict_seconds=1.0, log=True), workers=3, steps=400
    )
    assert 0.9 < noticed[0] - freeze.happened[0] < 2.0
    assert outcome.totals.failures_survived == 1
    mine = [incarnation for worker, incarnation, _ in trial.driver.logs[0] if worker == 1]
    assert set(mine) == {0, 1}
    assert mine == sorted(mine), "an update of the incarnation before was taken"
    assert trial.driver.roster.finished["worker 1"]["steps"] == 400
    assert trial.driver.roster.finished["worker 1"]["done"] >= len(mine)
    assert [status["refused"] + trial.driver.results.clock["refused"] for status in trial.driver.statuses] <= [1, 1]
    assert trial.driver.logs[0] == trial.driver.logs[1]
    assert trial.driver.results.clock["lost"] == [1]


@pytest.mark.long
def test_a_worker_that_never_wakes_is_not_waited_for(run, tmp_path):
    fault_settings = FaultSettings(evict_seconds=1.0, log=True)
    trial, outcome = run(
        "one_holds_the_lock", "bsp ps", fault_settings=fault_settings, workers=3, steps=100, data=tmp_path
    )
    assert outcome.totals.failures_survived == 1
    assert len(trial.driver.roster.finished) == 2
    assert gone_within(trial.pids()[1:], 5)


# ---- nobody is left behind


def command(*options):
    """`dure train` as a process of its own, which hears SIGINT even if the tests run where it is ignored."""
    name = configured("waits_now_and_then", "bsp").job
    return started("train", name, "--on", "local", "--workers", "2", "--steps", "100000", *options)


def started(*arguments):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "dure", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    finally:
        signal.signal(signal.SIGINT, before)


def family(process, size):
    """The processes that `process` has started, once there are `size`."""
    deadline = time.monotonic() + LATEST
    while len(found := descendants(process.pid)) < size:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@pytest.mark.alone
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("number", "strategy", "size", "status", "last"),
    [
        (signal.SIGTERM, ("--sync", "bsp"), 3, 143, "dure: terminated"),
        (signal.SIGINT, ("--sync", "ssp"), 4, 130, "dure: interrupted"),
        (signal.SIGKILL, ("--sync", "ssp", "--topology", "ps:shards=2"), 5, -9, None),
    ],
)
def test_no_end_of_the_launcher_leaves_processes_behind(number, strategy, size, status, last):
    process = command(*strategy)
    processes = family(process, size)
    time.sleep(0.5)
    started = time.monotonic()
    process.send_signal(number)
    said = process.communicate(timeout=LATEST)[1]
    assert gone_within(processes, 5), f"{number.name} left somebody behind"
    assert time.monotonic() - started < 8
    assert process.returncode == status
    assert last is None or said.splitlines()[-1] == last  # a server may say that the launcher is gone
    assert "Traceback" not in said


@pytest.mark.long
def test_the_end_of_the_fork_server_ends_the_run_and_its_processes():
    kill = when(
        lambda trial: trial.driver.steps("worker 1") > 10, lambda trial: os.kill(trial.pids()[0], signal.SIGKILL)
    )
    trial = Trial(configured("waits_now_and_then", "ssp ps", workers=2, steps=100_000))
    with raising(DureError, "signal 9"):
        trial.run(kill)
    assert len(trial.pids()) == 4
    assert gone_within(trial.pids(), 5)


@pytest.mark.long
def test_a_kill_under_collectives_is_exit_status_1():
    process = command("--sync", "one-shot")
    time.sleep(0.5)
    family(process, 3)
    victims = [pid for pid in descendants(process.pid) if pid not in children_of(process.pid)]
    os.kill(victims[0], signal.SIGKILL)
    _, said = process.communicate(timeout=LATEST)
    assert process.returncode == 1
    assert said.splitlines()[-1].startswith("dure: worker")
    assert "killed by signal 9" in said.splitlines()[-1]
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "end",
    [
        "worker killed",
        *(pytest.param(end, marks=pytest.mark.soak) for end in ("done", "fork server killed", "launcher killed")),
    ],
)
def test_the_end_of_a_worker_ends_the_processes_that_its_code_has_started(end, tmp_path):
    options = {"workers": 2, "data": tmp_path, "steps": 100 if end == "done" else 100_000}
    if end == "launcher killed":
        name = configured("starts_processes", "ssp ps").job
        process = started("train", name, "--strategy", "ssp ps", "--workers", "2", "--data", str(tmp_path))
        numbers = noted(tmp_path)
        process.kill()
        process.communicate(timeout=LATEST)
        assert gone_within(numbers, 5)
        return
    trial = Trial(configured("starts_processes", "ssp ps", **options))

    def act(trial):
        if end == "done" or len([*tmp_path.glob("*.child")]) < 2 or hasattr(act, "numbers"):
            return
        act.numbers = noted(tmp_path)
        if end == "fork server killed":
            os.kill(trial.pids()[0], signal.SIGKILL)
        for name in ("worker 0", "worker 1"):
            trial.kill(name)

    if end == "done":
        trial.run(act)
        assert gone_within(noted(tmp_path), 5)
        return
    with pytest.raises(DureError):
        trial.run(act)
    assert gone_within(act.numbers, 5)


def noted(folder):
    """The processes that two workers have started, once both are there."""
    deadline = time.monotonic() + LATEST
    while len(found := [path.read_text() for path in folder.glob("*.child")]) < 2 or "" in found:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return [int(text) for text in found]


def children_of(pid):
    return descendants(pid)[:1]


@pytest.mark.long
def test_runs_leave_no_descriptors_threads_or_zombies_behind(run):
    for strategy in ("bsp", "ssp ps"):
        run("small", strategy, workers=2, steps=5)
    before = belongings()
    for strategy, own in (("bsp", True), ("ssp ps", True), ("bsp", False), ("downpour ps:shards=2", False)):
        run("small", strategy, own=own, workers=2, steps=5)
    with pytest.raises(DureError):
        run("raises", "ssp ps", workers=2, steps=60)
    after = belongings()
    assert {name for name in after if after[name] > before[name]} == set(), (before, after)


def belongings():
    """What this process has, once the fork server alone is left of what it has started."""
    deadline = time.monotonic() + 5
    while len(descendants(os.getpid())) > 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    return {
        "descriptors": descriptors(),
        "threads": threading.active_count(),
        "threads of native code": setups(),
        "children": len(descendants(os.getpid())),
    }


def setups():
    """Threads of this process, those of native code among them."""
    return len(os.listdir("/proc/self/task"))


# ---- other shapes and ends


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("strategy", "workers"),
    [("bsp", 1), ("ssp ps", 1), ("bsp ps:shards=4", 8), ("ssp ps:shards=2,colocated=true", 2)],
)
def test_runs_of_other_shapes(run, strategy, workers):
    trial, outcome = run("digits-mlp", strategy, workers=workers, steps=30)
    assert len(trial.driver.roster.finished) == workers
    assert outcome.totals.counts["samples"] == 30 * workers * 32
    assert outcome.history[-1]["accuracy"] > 0.8


@pytest.mark.parametrize("strategy", ["k-async:k=2 ps", "k-async:k=2 ps:shards=2"])
def test_a_worker_for_which_no_group_is_left_ends_in_order(run, strategy):
    trial, _ = run("digits-mlp", strategy, workers=3, steps=7)
    assert len(trial.driver.roster.finished) == 3
    assert not trial.driver.roster.failed


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["bsp", "averaging:period=7", "ssp ps"])
def test_a_run_ends_by_its_seconds(run, strategy):
    trial, outcome = run("waits_now_and_then", strategy, workers=3, seconds=1.5)
    assert 1.5 <= outcome.totals.seconds < 4.0
    steps = [said["steps"] for said in trial.driver.roster.finished.values()]
    assert len(steps) == 3
    assert min(steps) > 3
    if strategy != "ssp ps":
        assert len(set(steps)) == 1
