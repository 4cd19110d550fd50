"""Runs of several actors and learners in virtual time: repeated, stopped and resumed, and with failures."""

from __future__ import annotations

import shutil
from typing import Any

import gymnasium
import pytest
import torch
from support.runs import Finished, virtual

import dure
from dure.job.job import Job
from dure.rl.jobs import apex, gorila
from dure.runtime.virtual.cluster import Cluster, Event, Machines

SMALL = {"min_size": 40, "hidden": (16, 16), "episodes": 1, "act_seconds": 1e-3, "update_seconds": 1e-3}


def many_actors(**settings: Any) -> Job:
    return apex(**{**SMALL, "actors": 8, "send": 5, "pull_every": 10, "target_every": 10, **settings})


def bundles(**settings: Any) -> Job:
    return gorila(**{**SMALL, "actors": 3, "target_every": 10, **settings})


def ran(job: Job, strategy: str = "bsp collective", *events: Event, **options: Any) -> Finished:
    companions = job.companions
    assert companions is not None
    machines = Machines(count=options.setdefault("workers", 1) + companions.machines)
    cluster = Cluster(machines=(machines,), events=events)
    return virtual(job, strategy, cluster, **{"steps": 40, "seed": 1, "batch_size": 16, "lr": 0.01} | options)


def experience(run: Finished) -> dict[str, Any]:
    found: dict[str, Any] = run.summary["experience"]
    return found


# ---- random streams


def test_the_same_seed_gives_the_same_run_and_another_seed_another():
    first, again, other = (ran(many_actors(), seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.params, again.params)
    assert first.rows == again.rows
    assert experience(first) == experience(again)
    assert not torch.equal(first.params, other.params)


class Recorded(gymnasium.Wrapper):
    """Keeps all observations of an environment."""

    def __init__(self, environment: gymnasium.Env[Any, Any]) -> None:
        super().__init__(environment)
        self.seen: list[list[float]] = []

    def reset(self, **options: Any) -> Any:
        observation, info = super().reset(**options)
        self.seen.append(observation.tolist())
        return observation, info

    def step(self, action: Any) -> Any:
        made = super().step(action)
        self.seen.append(made[0].tolist())
        return made


def recorded(**options: Any) -> list[list[list[float]]]:
    """What each environment of the actors of a run has shown."""
    made: list[Recorded] = []

    def environment() -> Recorded:
        made.append(Recorded(gymnasium.make("CartPole-v1")))
        return made[-1]

    ran(many_actors(env=environment, actors=3, environments=2, ladder=0.0, min_size=120), **options)
    return [each.seen for each in made if len(each.seen) > 1][:6]


def test_every_environment_of_every_actor_has_episodes_of_its_own():
    seen = recorded(steps=1)
    assert len({str(each[:10]) for each in seen}) == 6
    assert len({str(each[0]) for each in seen}) == 6, "they begin differently"
    assert recorded(steps=1) == seen
    assert all(one != other for one, other in zip(recorded(steps=1, seed=2), seen, strict=True))


# ---- learners


def test_bundles_that_agree_in_every_step_make_one_update_of_all_their_gradients():
    run = ran(bundles(), "bsp ps:shards=2", workers=3)
    assert run.summary["updates_applied"] == 3 * 40
    assert run.summary["staleness"]["max"] == 0
    assert experience(run)["replay"]["samples"] == 3 * (40 + 1) * 16, "one batch of each is on its way"
    assert torch.equal(run.params, ran(bundles(), "bsp ps:shards=2", workers=3).params)


def test_bundles_on_schedules_of_their_own_make_an_update_of_each_gradient():
    run = ran(bundles(), "downpour ps:shards=2", workers=3)
    assert run.summary["updates_applied"] == 3 * 40
    assert run.summary["staleness"]["histogram"] == {"0": 40, "1": 40, "2": 40}, "they pull together, and push in turn"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("strategy", "most"), [("downpour ps:shards=2", 3 * 40), ("bsp ps", 40)])
def test_the_lag_of_parameters_counts_the_updates_of_all_learners(strategy, most):
    """The first transitions are of version 0, and the last batches have some of them."""
    run = ran(bundles(), strategy, workers=3)
    assert most - 8 <= experience(run)["param_lag"]["max"] <= most


def test_the_servers_of_bundles_refuse_gradients_that_are_too_stale():
    slow = Event(at=0.0, kind="slow", worker=2, factor=8.0)
    run = ran(bundles(), "downpour:max_delay=6 ps", slow, workers=3)
    assert run.summary["updates_refused"] > 0
    assert run.summary["updates_applied"] + run.summary["updates_refused"] == 3 * 40
    assert run.summary["staleness"]["max"] <= 6


# ---- failures


def test_an_actor_that_crashes_is_missed_by_no_other():
    crash = Event(at=0.03, kind="crash", worker=2)
    lost, whole = ran(many_actors(actors=3), "bsp collective", crash), ran(many_actors(actors=3))
    assert lost.summary["failures_survived"] == 1
    assert lost.summary["steps"] == 40
    assert experience(lost)["frames"] < experience(whole)["frames"]


def test_learners_in_agreement_end_their_work_together_where_one_batch_is_left():
    run = ran(many_actors(actors=1, frames=100, samples_per_insert=8.0), workers=2, steps=1_000)
    assert [each["steps"] for each in run.summary["per_worker"].values()] == [19, 19]


def test_learners_in_agreement_end_their_work_with_the_last_frames():
    """A replay of two actors is full before that of one, whose frames count too."""
    job = many_actors(actors=3, replays=2, frames=300, samples_per_insert=8.0)
    slow = Event(at=0.0, kind="slow", worker=1, factor=3.0)
    run = ran(job, "bsp collective", slow, workers=2, steps=1_000)
    assert experience(run)["frames"] == 300
    assert len({each["steps"] for each in run.summary["per_worker"].values()}) == 1
    assert 40 <= run.summary["steps"] <= 55, "of 110 batches that 300 frames allow, some are not drawn any more"


def test_continuous_actions_are_learnt():
    run = ran(apex(**{**SMALL, "env": "Pendulum-v1", "actors": 3, "target_every": 10}))
    assert run.summary["steps"] == 40
    assert experience(run)["replay"]["samples"] >= 40 * 16


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{}, {"checkpoint_every": 30, "out": "unused"}], ids=["", "checkpoints"])
def test_the_frames_of_an_actor_that_crashed_for_ever_are_not_awaited(options):
    job = many_actors(actors=3, frames=300, samples_per_insert=8.0)
    run = ran(job, "bsp collective", Event(at=0.03, kind="crash", worker=2), steps=1_000, **options)
    assert 200 < experience(run)["frames"] < 250
    assert 60 < run.summary["steps"] < 120


def test_an_actor_that_crashed_joins_again_and_one_that_was_absent_comes():
    crash, again = Event(at=0.02, kind="crash", worker=2), Event(at=0.04, kind="join", worker=2)
    late = Event(at=0.03, kind="join", worker=3)
    frames = [
        experience(ran(many_actors(actors=3), "bsp collective", *events))["frames"]
        for events in ([crash, again, late], [crash, late], [crash, Event(at=9.0, kind="join", worker=3)])
    ]
    assert frames == sorted(frames, reverse=True)
    assert len(set(frames)) == 3


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "acting"), [("crash", 2), ("join", 3)])
def test_an_actor_stays_lost_or_there_after_a_checkpoint(kind, acting):
    """Each acting actor makes a step in a millisecond, and waits a little for parameters and insertions."""
    event = Event(at=0.01, kind=kind, worker=2)
    run = ran(many_actors(actors=3), "bsp collective", event, checkpoint_every=8, out="unused")
    assert acting - 0.8 < experience(run)["frames"] / (run.seconds / 1e-3) < acting + 0.2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("worker", [1, 2])
def test_a_bundle_whose_learner_crashes_is_missed_by_no_other(worker):
    run = ran(bundles(), "downpour ps", Event(at=0.08, kind="crash", worker=worker), workers=3)
    assert run.summary["failures_survived"] == 1
    steps = [each["steps"] for each in run.summary["per_worker"].values()]
    assert steps.pop(worker) < 40
    assert steps == [40, 40]


def test_the_servers_go_on_for_two_bundles_in_agreement_where_the_third_crashes():
    run = ran(bundles(), "bsp ps", Event(at=0.08, kind="crash", worker=1), workers=3)
    assert run.summary["steps"] == 40
    assert 2 * 40 < run.summary["updates_applied"] < 3 * 40


def test_a_bundle_whose_learner_joins_later_learns():
    run = ran(bundles(), "downpour ps", Event(at=0.08, kind="join", worker=1), workers=3)
    assert all(each["steps"] == 40 for each in run.summary["per_worker"].values())


# ---- checkpoints


@pytest.mark.long
@pytest.mark.parametrize(
    ("job", "strategy", "workers"),
    [
        ("apex:env=CartPole-v1,actors=3,environments=2,soft=true,capacity=200,trim_every=10", "bsp collective", 1),
        ("dqn:env=CartPole-v1,samples_per_insert=32", "bsp collective", 1),
        ("gorila:env=CartPole-v1,actors=2,outlier=2", "downpour ps:shards=2", 2),
    ],
)
def test_a_run_that_is_resumed_at_a_checkpoint_ends_as_the_one_that_was_not_stopped(tmp_path, job, strategy, workers):
    text = f"{job},min_size=40,target_every=10,episodes=1,act_seconds=0.001,update_seconds=0.001,hidden=16/16"
    options = {"on": "virtual", "workers": workers, "strategy": strategy, "batch_size": 16, "checkpoint_every": 12}
    whole = dure.train(text, steps=40, eval_every=20, seed=1, out=tmp_path / "whole", **options)
    checkpoints = tmp_path / "whole" / "checkpoints"
    for later in ("step-24", "step-36"):
        shutil.rmtree(checkpoints / later)
    (checkpoints / "LATEST").write_text("step-12")
    resumed = dure.train(text, resume=tmp_path / "whole")
    assert resumed.summary()["params_sha256"] == whole.summary()["params_sha256"]
    assert resumed.summary()["experience"] == whole.summary()["experience"]
    assert resumed.history == whole.history


def test_continuous_actions_are_learnt_in_a_whole_run():
    run = ran(apex(**SMALL, env="Pendulum-v1", actors=2))
    assert experience(run)["mean_return"] < 0
    assert run.summary["updates_applied"] == 40
