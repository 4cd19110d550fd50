"""Networks whose outputs depend on their mode: they act, are prioritised and are graded in evaluation mode."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import rl_jobs
from support.runs import local, resolved, virtual
from torch import Tensor, nn

from dure.job.job import Job
from dure.job.replica import Replica
from dure.rl.jobs import apex, dqn, gorila
from dure.rl.source import TARGET, TARGET_BUFFERS
from dure.run.checkpoint import Parts
from dure.run.prebuilt import Callbacks
from dure.run.virtual import VirtualRun

JOBS = Path(rl_jobs.__file__)
ALL = 20.0
"""The return of the right action in each step of `Signs`."""

SMALL: dict[str, Any] = {"min_size": 20, "epsilon": 0.0, "anneal": 0, "act_seconds": 1e-3, "episodes": 2}
SMALL |= {"update_seconds": 1e-3, "samples_per_insert": 16.0}
STILL = {"steps": 40, "batch_size": 16, "optimizer": "sgd", "lr": 0.0}
LEARNING = {"steps": 30, "batch_size": 16, "optimizer": "sgd", "lr": 0.05, "eval_every": 15}


def right() -> nn.Module:
    """The values of both actions are right, and dropout would let one observation in ten pass."""
    last = nn.Linear(1, 2)
    with torch.no_grad():
        last.weight.copy_(torch.tensor([[-1.0], [1.0]]))
        last.bias.copy_(torch.tensor([5.0, -5.0]))
    return nn.Sequential(nn.Dropout(0.9), last)


class RightAgent(nn.Module):
    """A policy that is right, and a critic, with dropout before both."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.9)
        self.layers, self.values = nn.Linear(1, 1), nn.Linear(2, 1)
        self.low, self.high = torch.tensor([-1.0]), torch.tensor([1.0])
        with torch.no_grad():
            self.layers.weight.fill_(1.0)
            self.layers.bias.fill_(-5.0)

    def policy(self, observations: Tensor) -> Tensor:
        return self.layers(self.dropout(observations)).tanh()

    def critic(self, observations: Tensor, actions: Tensor) -> Tensor:
        return self.values(self.dropout(torch.cat([observations, actions], 1))).squeeze(1)

    def forward(self, observations: Tensor) -> Tensor:
        return self.critic(observations, self.policy(observations))


DROPPING: dict[str, tuple[Job, str, int]] = {
    "ape-x": (apex(env=rl_jobs.signs, network=right, actors=2, **SMALL), "bsp collective", 1),
    "gorila": (gorila(env=rl_jobs.signs, network=right, **SMALL), "downpour ps:shards=1", 2),
    "dqn": (dqn(env=rl_jobs.signs, network=right, **SMALL), "bsp collective", 1),
    "dpg": (apex(env=rl_jobs.continuous_signs, network=RightAgent, sigma=0.0, actors=2, **SMALL), "bsp collective", 1),
}  # fmt: skip


@pytest.mark.parametrize("name", DROPPING)
def test_a_right_policy_behind_dropout_earns_all_that_there_is(name):
    job, strategy, workers = DROPPING[name]
    rows = virtual(job, strategy, workers=workers, seed=1, **STILL).rows
    assert rows[-1]["mean_return"] == ALL
    assert rows[-1]["recent_return"] == ALL  # of the actors, whose noise is zero


@pytest.mark.parametrize("name", DROPPING)
def test_draws_of_dropout_belong_to_the_seed(name):
    job, strategy, workers = DROPPING[name]
    found = []
    for seed, others in ((1, 5), (1, 6), (2, 7)):
        torch.manual_seed(others)  # the program's own generator has no part in a run
        found.append(virtual(job, strategy, workers=workers, seed=seed, **LEARNING | {"steps": 10}))
    assert torch.equal(found[0].params, found[1].params)
    assert found[0].rows == found[1].rows
    assert not torch.equal(found[0].params, found[2].params)


# ---- buffers travel with the parameters


def normed_run(workers: int) -> tuple[list[dict[str, Any]], Parts]:
    """The rows of a run of a network with batch norm, and the checkpoint at its last step."""
    make = dqn if workers == 1 else gorila
    job = make(env=rl_jobs.signs, network=rl_jobs.normed, target_every=10, alpha=0.6, **SMALL)
    strategy = "bsp collective" if workers == 1 else "bsp ps:shards=1"
    options = {
        **LEARNING,
        "lr": 1e-3,
        "workers": workers,
        "seed": 1,
        "checkpoint_every": LEARNING["steps"],
        "out": Path("/"),
    }
    setup, cluster = resolved(job, strategy, on="virtual", **options)
    rows: list[dict[str, Any]] = []
    saved: list[Parts] = []
    callbacks = Callbacks(row=rows.append, checkpoint=lambda _, parts: saved.append(deepcopy(parts)))
    VirtualRun(setup, cluster, callbacks).run()
    return rows, saved[-1]


def played(module: nn.Module, seed: int) -> float:
    """The mean return of `module` in the episodes of an evaluation."""
    from dure.rl.environments import Environments

    environments, returns = Environments(rl_jobs.signs, 2, seed), []
    while len(returns) < 2:
        with torch.no_grad():
            actions = module(torch.from_numpy(environments.observations)).argmax(1).numpy()
        returns += [each.episode_return for each in environments.step(actions).ended]
    return float(np.mean(returns))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_network_with_batch_norm_is_graded_with_its_running_statistics(workers):
    from dure.rl.companions import GRADER_STREAM, _drawn

    rows, parts = normed_run(workers)
    replica = Replica(rl_jobs.normed())
    models = [parts[f"worker-{rank}"].tensors for rank in range(workers)]
    buffers = torch.stack([model["buffers"] for model in models])
    replica.load(parts["shard-0"].tensors["values"] if workers > 1 else models[0]["params"])
    replica.load_buffers(torch.cat([buffers[:, :-1].mean(0), buffers[:, -1].amax(0, keepdim=True)]))
    state = replica.module.state_dict()
    assert state["0.num_batches_tracked"] == LEARNING["steps"]
    module = rl_jobs.normed()
    module.load_state_dict(state)
    seed = _drawn(GRADER_STREAM, 1)
    assert rows[-1]["mean_return"] == played(module.eval(), seed)
    module[0].reset_running_stats()
    assert rows[-1]["mean_return"] != played(module.eval(), seed)


def test_the_target_and_the_actors_have_the_running_statistics_of_their_model(monkeypatch):
    from dure.rl.actor import Actor

    pulled: list[Tensor] = []
    pull = Actor._pull

    async def noted(actor: Actor) -> None:
        await pull(actor)
        pulled.append(actor.replica.buffers_flat())

    monkeypatch.setattr(Actor, "_pull", noted)
    _, parts = normed_run(1)
    kept = parts["worker-0"].part("kept")
    assert kept.plain[TARGET] == 2  # copied after 20 updates
    assert kept.tensors[TARGET_BUFFERS][-1] == 20
    assert not torch.equal(kept.tensors[TARGET_BUFFERS][:-1], parts["worker-0"].tensors["buffers"][:-1])
    assert max(int(each[-1]) for each in pulled) > 20


@pytest.mark.soak
def test_in_processes_a_network_with_batch_norm_and_dropout_learns_the_same():
    run = {"workers": 1, "seed": 3, "optimizer": "adam:lr=0.01,eps=1e-8", "eval_every": 10_000, "steps": 40}
    here = virtual(rl_jobs.normed_lockstep(), "bsp collective", **run)
    there = local(f"{JOBS}:normed_lockstep", "bsp collective", **run)
    assert torch.equal(here.params, there.params)
    assert here.rows[-1]["mean_return"] == there.rows[-1]["mean_return"]
