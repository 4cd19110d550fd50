"""Jobs of reinforcement learning that processes of a run find by name, and small environments."""

from __future__ import annotations

from typing import Any

import gymnasium

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
