"""Jobs of reinforcement learning that processes of a run find by name, and small environments."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from torch import nn

from dure.job.job import Job
from dure.rl.jobs import dqn, gorila

LOCKSTEP = {
    "actors": 1,
    "alpha": 0.0,
    "ladder": 0.0,
    "epsilon": 0.1,
    "anneal": 0,
    "send": 1,
    "pull_every": 1,
    "prefetch": 0,
    "min_size": 50,
    "target_every": 20,
    "samples_per_insert": 32.0,
    "lockstep": True,
    "hidden": (32, 32),
    "loss": "squared",
    "episodes": 1,
    "update_seconds": 1e-3,
}
"""Alternate steps of an actor and of a worker: DQN in one process. An update takes longer than a pull."""


def short_cartpole() -> gymnasium.Env[Any, Any]:
    """CartPole with a time limit that most episodes reach or come near to, so that some of them are truncated."""
    return gymnasium.make("CartPole-v1", max_episode_steps=12)


def lockstep(**settings: Any) -> Job:
    return dqn(**{**LOCKSTEP, "env": short_cartpole, "capacity": 400, **settings})


def bundle(**settings: Any) -> Job:
    """Gorila with one bundle in lockstep."""
    return gorila(**{**LOCKSTEP, "env": short_cartpole, "capacity": 400, **settings})


class Signs(gymnasium.Env[Any, Any]):
    """20 observations of one number each, around 5. A step earns 1 by the right action: whether the number is above 5.

    With `continuous` actions the right one has the sign of the difference.
    """

    observation_space = gymnasium.spaces.Box(-100, 100, (1,), np.float32)

    def __init__(self, *, continuous: bool = False) -> None:
        self.action_space: Any = gymnasium.spaces.Discrete(2)
        if continuous:
            self.action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
        self.continuous = continuous

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = 20
        return self._drawn(), {}

    def _drawn(self) -> Any:
        self.above = self.np_random.normal()
        return np.array([5 + self.above], np.float32)

    def step(self, action: Any) -> Any:
        chosen = float(action[0]) > 0 if self.continuous else action == 1
        reward = float(chosen == (self.above > 0))
        self.left -= 1
        return self._drawn(), reward, self.left == 0, False, {}


def signs() -> gymnasium.Env[Any, Any]:
    return Signs()


def continuous_signs() -> gymnasium.Env[Any, Any]:
    return Signs(continuous=True)


def normed() -> nn.Module:
    """Values for `Signs` that are right with the right running statistics, in evaluation mode."""
    last = nn.Linear(1, 2)
    with torch.no_grad():
        last.weight.copy_(torch.tensor([[-1.0], [1.0]]))
        last.bias.zero_()
    return nn.Sequential(nn.BatchNorm1d(1), nn.Dropout(0.5), last)


def normed_lockstep(**settings: Any) -> Job:
    return lockstep(**{"env": signs, "network": normed, "alpha": 0.6, **settings})
