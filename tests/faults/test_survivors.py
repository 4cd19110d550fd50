"""The workers of bsp over collectives go on without one that is killed, exits or freezes."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from support import survivor_jobs
from support.real_runs import Trial
from support.survivor_jobs import MISSED
from support.survivors import Kills, members, reference, reference_of_rounds

from dure.run.checkpoint import load
from dure.run.config import TrainConfig

STEPS = 400


def run(tmp_path, fork_server, kills, strategy="bsp collective", job="noted", **options):
    given = {"workers": 4, "steps": STEPS, "data": tmp_path, "frozen_after": 2.0, "eval_every": 1000} | options
    plain = {"job": f"{survivor_jobs.__file__}:{job}", "strategy": strategy, "on": "local", "replace": False}
    trial = Trial(TrainConfig(**plain | given))
    return trial, trial.run(kills, fork_server=fork_server)


def check(trial, outcome, kills, folder, steps=STEPS):
    """All survivors have one model: that of a plain loop with the same members at each step."""
    generations = check_survivors(trial, outcome, kills, steps)
    found = next(iter(trial.driver.results.delivered.values())).values
    assert torch.equal(found, reference(trial, members(generations, steps), folder))


def check_survivors(trial, outcome, kills, steps):
    """All survivors have made all steps and have one model; return the generations."""
    assert not kills.left, "a kill was left out"
    left = sorted(set(range(trial.setup.workers)) - kills.gone)
    assert sorted(trial.driver.roster.finished) == [f"worker {rank}" for rank in left]
    assert {report["steps"] for report in trial.driver.roster.finished.values()} == {steps}
    generations = outcome.notes["generations"]
    assert generations[-1]["ranks"] == left
    assert kills.again or set(trial.driver.roster.incarnations.values()) == {0}, "a process was started again"
    models = [each.values for each in trial.driver.results.delivered.values()]
    assert all(torch.equal(models[0], each) for each in models)
    return generations


@pytest.mark.parametrize("way", ["kill", pytest.param("exit", marks=pytest.mark.long)])
def test_the_others_go_on_without_a_worker_that_ends(way, tmp_path, fork_server):
    kills = Kills(1, seed=1, ways=[way])
    trial, outcome = run(tmp_path, fork_server, kills)
    check(trial, outcome, kills, tmp_path)
    assert outcome.totals.failures_survived == 1


def test_a_worker_that_is_a_step_behind_gets_the_step_of_the_others(tmp_path):
    kills = Kills(0, seed=0)
    own = None  # a fork server of its own, whose copy of dure the job changes
    trial, outcome = run(tmp_path, own, kills, job="one_misses_a_step", steps=100)
    check(trial, outcome, kills, tmp_path, 100)
    assert [each["step"] for each in outcome.notes["generations"]] == [0, MISSED + 1]
    assert outcome.totals.counts["updates_applied"] == 4 * 100


ROUNDS = "averaging:period=5 collective", "bmuf:period=5,momentum=0.5 collective"


@pytest.mark.parametrize("strategy", [ROUNDS[0], pytest.param(ROUNDS[1], marks=pytest.mark.long)])
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 25))])
def test_an_average_is_made_again_without_a_worker_that_ends(strategy, seed, tmp_path, fork_server):
    kills, steps = Kills(1, seed, ways=["kill", "exit"]), 203  # the last round is shorter
    trial, outcome = run(tmp_path, fork_server, kills, strategy=strategy, steps=steps)
    generations = check_survivors(trial, outcome, kills, steps)
    found = next(iter(trial.driver.results.delivered.values())).values
    assert torch.equal(found, reference_of_rounds(trial, generations, steps, tmp_path))
    assert outcome.totals.counts["updates_applied"] == 4 * steps - (steps - generations[1]["step"])


@pytest.mark.long
@pytest.mark.parametrize("strategy", ROUNDS)
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 25))])
def test_a_worker_that_joins_again_gets_the_state_of_another_in_its_round(strategy, seed, tmp_path, fork_server):
    kills = Kills(3, seed, burst=2, again=True)
    trial, outcome = run(tmp_path, fork_server, kills, strategy=strategy, steps=2 * STEPS, eval_every=7)
    generations = check_survivors(trial, outcome, kills, 2 * STEPS)
    found = next(iter(trial.driver.results.delivered.values())).values
    assert torch.equal(found, reference_of_rounds(trial, generations, 2 * STEPS, tmp_path))
    assert any(each["copies"] for each in generations)
    updates = [row["updates"] for row in outcome.history]
    of_a_round = 4 * 5  # those of failed workers in their last round are gone
    assert all(after >= before - of_a_round for before, after in itertools.pairwise(updates))
    steps = [row["step"] for row in outcome.history]
    assert steps == sorted(set(steps))


@pytest.mark.long
def test_the_others_go_on_without_a_frozen_worker_which_is_killed(tmp_path, fork_server):
    kills = Kills(1, seed=1, ways=["stop"])
    trial, outcome = run(tmp_path, fork_server, kills)
    check(trial, outcome, kills, tmp_path)
    (rank,) = (rank for _, rank, _ in kills.ended)
    assert outcome.notes["deaths"] == {f"worker {rank}": "frozen: no heartbeat for 2 s"}


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 40))])
def test_the_last_of_four_goes_on_when_the_others_are_killed_while_the_group_is_formed(seed, tmp_path, fork_server):
    kills = Kills(3, seed, ways=["kill", "exit"], burst=3)
    trial, outcome = run(tmp_path, fork_server, kills, steps=STEPS // 2)
    check(trial, outcome, kills, tmp_path, STEPS // 2)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(50))
def test_fifty_workers_end_in_any_way_at_any_time(seed, tmp_path, fork_server):
    kills = Kills(1, seed, ways=["kill", "exit", "stop"])
    trial, outcome = run(tmp_path, fork_server, kills, steps=250)
    check(trial, outcome, kills, tmp_path, 250)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 20))])
def test_checkpoints_and_rows_go_on_without_a_killed_worker(seed, tmp_path, fork_server):
    kills = Kills(1, seed, until=0.8)
    saving = {"out": tmp_path / "run", "checkpoint_every": 7, "eval_every": 11}
    trial, outcome = run(tmp_path, fork_server, kills, **saving)
    check(trial, outcome, kills, tmp_path)
    last = load(tmp_path / "run" / "checkpoints")
    assert last.parts["run"].plain["checkpoint"] == STEPS // 7 * 7
    assert [row["step"] for row in outcome.history if row["step"] % 11 == 0] == list(range(11, STEPS, 11))
    made = members(outcome.notes["generations"], STEPS)
    for row in outcome.history:
        assert row["updates"] == sum(map(len, made[: row["step"]]))
    assert outcome.totals.counts["updates_applied"] == sum(map(len, made))


@pytest.mark.long
def test_a_run_that_lost_a_worker_is_resumed_with_all_of_them(tmp_path, fork_server):
    """The worker that the checkpoint lacks gets the model from another, and goes on at its place in the samples."""
    folder, kills = tmp_path / "run", Kills(1, seed=3)
    saving = {"out": folder, "checkpoint_every": 10}
    run(tmp_path, fork_server, kills, steps=100, **saving)
    trial, outcome = run(tmp_path, fork_server, Kills(0, seed=0), **saving, resume=folder)
    check(trial, outcome, Kills(0, seed=0), tmp_path)
    assert [each["ranks"] for each in outcome.notes["generations"]][-2:] == [
        [rank for rank in range(4) if rank != kills.ended[0][1]],
        [0, 1, 2, 3],
    ]
    assert outcome.notes["generations"][-1]["step"] == 100


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 30))])
def test_a_worker_that_is_started_again_gets_the_model_and_the_place_in_its_samples(seed, tmp_path, fork_server):
    kills = Kills(3, seed, burst=2, again=True)
    trial, outcome = run(tmp_path, fork_server, kills, steps=4 * STEPS)
    check(trial, outcome, kills, tmp_path, 4 * STEPS)
    (joined, *_) = (each for each in outcome.notes["generations"][1:] if len(each["ranks"]) == 4)
    assert 0 < joined["step"] < 4 * STEPS


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 20))])
def test_killed_and_frozen_workers_are_replaced_and_all_end_with_one_model(seed, tmp_path, fork_server):
    kills = Kills(2, seed, ways=["kill", "stop"])
    trial, outcome = run(tmp_path, fork_server, kills, steps=4 * STEPS, replace=True)
    kills.gone.clear()
    kills.again = True
    check(trial, outcome, kills, tmp_path, 4 * STEPS)
    assert sum(trial.driver.roster.incarnations.values()) == 2
    assert outcome.notes["unfinished"] == {}


@pytest.mark.long
def test_connections_and_threads_of_a_generation_that_is_over_are_closed(tmp_path, fork_server):
    """Those of worker 0 are as many each time that worker 3 has been killed and has joined again."""
    kills, held = Kills(3, seed=5, again=True), []

    def act(trial):
        generations = trial.driver.generations
        if generations.runs() and len(generations.history[-1]["ranks"]) == 4 and trial.driver.steps("worker 0") > 10:
            pid, number = trial.fork_server.pids["worker 0"], len(generations.history)
            if number > 1 and (not held or held[-1][0] != number):
                held.append((number, len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))))
        kills.only = {3}
        kills(trial)

    run(tmp_path, fork_server, act, steps=4 * STEPS)
    assert len(held) >= 3
    _, *first = held[0]
    _, *last = held[-1]
    assert last == first
