"""Workers that are killed and started again alone, by methods whose other workers go on."""

from __future__ import annotations

import signal
from collections import Counter

import pytest
from support.real_runs import Notes, Trial, configured

from dure.errors import DureError
from dure.run.failures import LIMIT
from dure.run.replacement import AGAIN_SECONDS, Replacements

STEPS = 300


class Kills:
    """Kills a worker each time it is ready and has made so many steps more than at its last start."""

    def __init__(self, *names, after=20, times=1):
        self.left = Counter(dict.fromkeys(names, times))
        self.after = after
        self.base = Counter()
        self.killed = {}
        self.pids = {name: [] for name in names}

    def __call__(self, trial):
        driver, running = trial.driver, trial.fork_server.processes
        ready = [name for name in self.left if name in driver.roster.ready and name in running]
        for name in ready:
            if running[name] not in self.pids[name]:
                self.pids[name].append(running[name])
                self.base[name] = driver.progress.steps(name)
        alive = [name for name in ready if self.killed.get(name) != running[name]]
        due = [name for name in alive if driver.progress.steps(name) >= self.base[name] + self.after]
        if len(due) == len(self.left):
            for name in due:
                if self.left[name]:
                    self.left[name] -= 1
                    self.killed[name] = running[name]
                    trial.kill(name)


@pytest.fixture
def run(fork_server):
    def once(job, strategy, act, **options):
        trial = Trial(configured(job, strategy, **{"workers": 3, "steps": STEPS, "replace": True} | options))
        return trial, trial.run(act, fork_server=fork_server)

    return once


@pytest.mark.parametrize(
    "strategy",
    [
        "downpour ps:shards=2",
        *(
            pytest.param(each, marks=pytest.mark.long)
            for each in (
                "bsp collective",
                "ssp:bound=3 ps:shards=2",
                "bsp ps",
                "hogwild",
                "ad-psgd",
                "easgd:period=4",
                "k-async:k=2 ps",
            )
        ),
    ],
)
def test_a_killed_worker_is_replaced_and_finishes(strategy, run):
    kills = Kills("worker 1", times=2)
    trial, outcome = run("waits_now_and_then", strategy, kills)
    assert not +kills.left
    assert len(kills.pids["worker 1"]) == 3
    assert trial.driver.roster.finished.keys() == {"worker 0", "worker 1", "worker 2"}
    assert outcome.totals.failures_survived == 2
    assert outcome.notes["deaths"] == {"worker 1": "killed by signal 9 (SIGKILL)"}
    assert outcome.notes["unfinished"] == {}


def test_downpour_repeats_no_steps_but_those_that_were_not_reported(tmp_path, run):
    kills = Kills("worker 1", times=3)
    trial, outcome = run("counted_slowly", "downpour ps:shards=2", kills, data=tmp_path)
    assert not +kills.left
    notes = Notes(tmp_path)
    for log in trial.driver.logs:
        assert len(set(log)) == len(log)
        assert notes.acknowledged <= set(log)
    done = Counter((worker, incarnation) for worker, incarnation, _ in trial.driver.logs[0])
    assert done[0, 0] == done[2, 0] == STEPS
    assert kills.base["worker 1"] >= 3 * 20
    assert done[1, 3] == STEPS - kills.base["worker 1"], "the last one goes on after the last report"
    assert outcome.params.equal(notes.replay(trial.setup, trial.driver.logs))


@pytest.mark.parametrize("after", [20, pytest.param(STEPS - 30, marks=pytest.mark.long)])
def test_a_newcomer_of_a_gossip_goes_on_after_the_last_report(after, run):
    kills = Kills("worker 1", after=after)
    trial, outcome = run("waits_now_and_then", "ad-psgd", kills)
    assert len(kills.pids["worker 1"]) == 2
    assert kills.base["worker 1"] >= after
    assert trial.driver.roster.finished["worker 1"]["done"] == STEPS - kills.base["worker 1"]
    assert outcome.totals.per_worker["worker 1"]["steps"] == STEPS


@pytest.mark.long
def test_a_worker_of_a_gossip_is_replaced_when_the_others_are_at_their_end(run):
    def kill_last(trial):
        driver, running = trial.driver, trial.fork_server.processes
        if not pids and driver.progress.steps("worker 1") >= 20:
            pids.append(running["worker 1"])
            trial.fork_server.signal("worker 1", signal.SIGSTOP)
        elif len(pids) == 1 and driver.roster.finished.keys() == {"worker 0", "worker 2"}:
            pids.append(None)
            trial.kill("worker 1")

    pids = []
    trial, outcome = run("waits_now_and_then", "ad-psgd", kill_last)
    assert len(pids) == 2
    assert trial.driver.roster.finished.keys() == {"worker 0", "worker 1", "worker 2"}
    assert outcome.totals.per_worker["worker 1"]["steps"] == STEPS


@pytest.mark.long
def test_a_dead_worker_of_a_checkpoint_goes_on_after_its_last_report(tmp_path, run):
    options = {"out": tmp_path / "run", "checkpoint_every": 100, "data": tmp_path}
    trial, outcome = run("waits_now_and_then", "downpour ps", Kills("worker 1"), **options, replace=False)
    assert outcome.notes["unfinished"].keys() == {"worker 1"}
    reported = trial.driver.progress.steps("worker 1")
    assert reported >= 20
    trial, outcome = run("waits_now_and_then", "downpour ps", lambda trial: None, **options, resume=tmp_path / "run")
    assert trial.driver.roster.finished["worker 1"]["done"] == STEPS - reported
    assert outcome.totals.per_worker["worker 1"]["steps"] == STEPS


def test_all_workers_are_replaced_where_servers_have_the_model(run):
    kills = Kills("worker 0", "worker 1", "worker 2")
    trial, outcome = run("waits_now_and_then", "downpour ps", kills)
    assert not +kills.left
    assert all(len(pids) == 2 for pids in kills.pids.values())
    assert len(trial.driver.roster.finished) == 3
    assert outcome.totals.failures_survived == 3


def test_a_gossip_run_ends_with_its_last_worker(run):
    with pytest.raises(DureError, match="all workers failed"):
        run("waits_now_and_then", "ad-psgd", Kills("worker 0", "worker 1", "worker 2"))


@pytest.mark.long
def test_a_worker_that_dies_without_a_step_is_given_up(run, caplog):
    def kill_at_once(trial):
        if "worker 1" in trial.fork_server.processes and trial.driver.progress.steps("worker 1") < 20:
            trial.fork_server.signal("worker 1", signal.SIGKILL)

    trial, outcome = run("waits_now_and_then", "downpour ps", kill_at_once, steps=4000)
    assert trial.driver.roster.incarnations["worker 1"] == LIMIT
    assert trial.driver.roster.finished.keys() == {"worker 0", "worker 2"}
    assert outcome.notes["unfinished"] == {"worker 1": "killed by signal 9 (SIGKILL)"}
    assert f"6 times in a row without a step in between, and {LIMIT} starts are the limit" in caplog.text


# ---- the rule


def test_progress_resets_the_back_off_and_an_exit_is_waited_for():
    steps = {"worker 0": 0}
    again = Replacements(steps.__getitem__)
    pauses = []
    for progress in (0, 0, 0, 5, 5):
        again.begin("worker 0")
        steps["worker 0"] += progress
        again.failed("worker 0", 100.0)
        assert list(again.awaited) == ["worker 0"]
        assert again.due(1000.0, {}) == []
        pauses.append(again._due["worker 0"] - 100.0)
        assert again.due(1000.0, {"worker 0": -9}) == ["worker 0"]
    assert pauses == pytest.approx([AGAIN_SECONDS * factor for factor in (1, 2, 4, 8, 1)])
    assert again.in_vain("worker 0") == 0


def test_a_process_that_fails_before_it_begins_has_made_no_progress():
    steps = {"worker 0": 0}
    again = Replacements(steps.__getitem__)
    again.begin("worker 0")
    steps["worker 0"] = 20
    for count in range(4):
        again.failed("worker 0", 100.0)
        assert again.due(1000.0, {"worker 0": -9}) == ["worker 0"]
        assert again.in_vain("worker 0") == count
