"""Distributed runs in lockstep are DQN in one process, bit for bit."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import pytest
import torch
from support import rl_jobs
from support.nodes import World
from support.plain_dqn import PlainDqn
from support.runs import local, virtual
from torch import Tensor, nn

from dure.core.node import Reply
from dure.rl.actor import Actor
from dure.rl.jobs import apex

SEED = 3
RUN = {"workers": 1, "seed": SEED, "optimizer": "adam:lr=0.01,eps=1e-8", "eval_every": 10_000}
JOBS = Path(rl_jobs.__file__)


def network() -> nn.Module:
    """The model of the jobs, with the values of the run's seed."""
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


def plain(updates: int, **settings) -> Tensor:
    def adam(parameters):
        return torch.optim.Adam(parameters, lr=0.01, foreach=False)

    return PlainDqn(rl_jobs.short_cartpole, network, adam, SEED, capacity=400, **settings).run(updates)


@pytest.fixture(scope="module")
def alone() -> Tensor:
    """The parameters of DQN in one process after 200 updates."""
    return plain(200)


@pytest.mark.long
def test_dqn_with_actor_replay_and_learner_apart_is_dqn_in_one_process():
    """Oracle of 1,000 updates: episodes that terminate and that are truncated, evictions, 50 copies of the target."""
    found = virtual(rl_jobs.lockstep(), "bsp collective", steps=1000, **RUN)
    figures = found.summary["experience"]
    assert figures["replay"] == figures["replay"] | {"size": 400, "inserts": 1049, "samples": 32_000}
    assert torch.equal(found.params, plain(1000))


def test_apex_with_one_actor_and_uniform_draws_is_dqn_in_one_process(alone):
    settings = {**rl_jobs.LOCKSTEP, "n_step": 1, "double": False, "dueling": False, "soft": False}
    job = apex(**{**settings, "env": rl_jobs.short_cartpole, "capacity": 400})
    assert torch.equal(virtual(job, "bsp collective", steps=200, batch_size=32, **RUN).params, alone)


@pytest.mark.long
def test_actor_replay_and_learner_in_processes_of_their_own_are_dqn_in_one_process(alone):
    assert torch.equal(local(f"{JOBS}:lockstep", "bsp collective", steps=200, **RUN).params, alone)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shards", [1, 2, 5])
def test_gorila_of_one_bundle_is_dqn_in_one_process_however_many_servers_there_are(alone, shards):
    assert torch.equal(virtual(rl_jobs.bundle(), f"downpour ps:shards={shards}", steps=200, **RUN).params, alone)


@pytest.mark.parametrize(("pull_every", "updates"), [(1, 1), (4, 1), (5, 3)])
def test_parameters_of_an_actor_lag_by_the_updates_since_its_pull(pull_every, updates):
    """A replay of one transition has the newest one, so lags count from the actor's pull only.

    The actor is slow: the learner has made `updates` updates for each transition before the next one is inserted. A
    pull follows an insertion at once and precedes the updates for it.
    """
    acts = 12 * pull_every
    slow = {"act_seconds": 1.0, "update_seconds": 1e-3, "lockstep": False, "capacity": 1, "min_size": 1}
    job = rl_jobs.lockstep(**slow, pull_every=pull_every, samples_per_insert=float(updates), buffer=float(updates))
    found = virtual(job, "bsp collective", steps=acts * updates, batch_size=1, **RUN)
    pulled = [max(0, act - act % pull_every - 1) * updates for act in range(acts)]
    lags = [act * updates + more - pulled[act] for act in range(acts) for more in range(updates)]
    assert found.summary["experience"]["param_lag"] == {"mean": sum(lags) / len(lags), "max": max(lags)}


def test_an_actor_that_begins_again_waits_for_the_steps_that_the_replay_s_own_count_allows():
    """The count of its last report is from before its end, and too small."""
    world = World()
    actor = object.__new__(Actor)
    actor.steps_after, actor.stored = lambda inserts: inserts - 2, 0
    actor.count_on({"steps": 50, "sent": 40, "episodes": 1})
    actor._insertion = world.node("actor 0").promise("an insertion")
    actor._insertion.resolve(Reply({"inserts": 49}))
    world.run(actor._admitted())
    assert actor._awaited() == 47
    assert actor.sent == 40


def test_an_actor_of_a_checkpoint_waits_for_the_steps_that_were_allowed_then():
    """It pulls before its first insertion, whose answer would say how many."""
    saved, restored = object.__new__(Actor), object.__new__(Actor)
    saved.steps, saved.sent, saved.episodes, saved.stored, saved.returns = 50, 49, 3, 49, deque([9.0, 12.0])
    restored.steps_after, restored.stored, restored.returns = lambda inserts: inserts - 2, 0, deque()
    restored.restore(saved.state())
    assert restored._awaited() == 47
    assert (restored.steps, restored.sent, restored.episodes, restored.returns) == (50, 49, 3, deque([9.0, 12.0]))
