"""Agents that learn in small worlds, beside their exact values."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from support.runs import virtual
from torch import nn

from dure.rl.jobs import apex, dqn, gorila

GAMMA = 0.9
STATES = 5
LEFT, RIGHT = 0, 1


class Chain(gymnasium.Env):
    """States in a row: a step to the right of the last one gives 1 and ends the episode; others give nothing."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (STATES,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.state = int(self.np_random.integers(STATES))
        return self.shown(), {}

    def step(self, action: Any) -> Any:
        self.state += 1 if action == RIGHT else -1
        end = self.state == STATES
        self.state = min(max(self.state, 0), STATES - 1)
        return self.shown(), float(end), end, False, {}

    def shown(self) -> np.ndarray:
        return np.eye(STATES, dtype=np.float32)[self.state]


def truth() -> np.ndarray:
    """The values of the chain, by value iteration."""
    values = np.zeros((STATES, 2))
    for _ in range(200):
        best = values.max(1)
        right = [1.0 if state == STATES - 1 else GAMMA * best[state + 1] for state in range(STATES)]
        left = [GAMMA * best[max(state - 1, 0)] for state in range(STATES)]
        values = np.stack([left, right], 1)
    return values


def table() -> nn.Module:
    """A linear network without biases: one value for each state and action."""
    return nn.Linear(STATES, 2, bias=False)


LEARNING = {
    "env": Chain,
    "loss": "squared",
    "network": table,
    "gamma": GAMMA,
    "episodes": 1,
    "min_size": 100,
    "target_every": 10,
}
EXPLORING = {"epsilon": 1.0, "ladder": 0.0, "anneal": 0, "update_seconds": 1e-3, "act_seconds": 1e-3}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("job", "strategy", "workers"),
    [
        (dqn(**LEARNING, **EXPLORING, samples_per_insert=32), "bsp collective", 1),
        (apex(**LEARNING, **EXPLORING, actors=4, n_step=1, dueling=False, send=5, pull_every=5), "bsp collective", 1),
        (gorila(**LEARNING, **EXPLORING, actors=3), "downpour ps:shards=2", 3),
        (gorila(**LEARNING, **EXPLORING, actors=2), "bsp ps:shards=2", 2),
    ],
    ids=["dqn", "apex", "gorila", "synchronous gorila"],
)
def test_learned_values_of_a_chain_are_those_of_value_iteration(job, strategy, workers):
    options = {"batch_size": 32, "optimizer": "sgd:lr=1.0", "seed": 1, "eval_every": 10_000}
    found = virtual(job, strategy, workers=workers, steps=400, **options)
    values = found.params.reshape(2, STATES).T.numpy()
    assert np.abs(values - truth()).max() < 0.05


class Clock(gymnasium.Env):
    """One state with one action, which gives 1."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(1)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.ones(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.ones(1, np.float32), 1.0, False, False, {}


class Ended(gymnasium.Wrapper):
    """Tells of a time limit as of an end of the task."""

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated or truncated, False, info


LIMIT = 5


def limited() -> gymnasium.Env[Any, Any]:
    return gymnasium.wrappers.TimeLimit(Clock(), LIMIT)


def short_lived() -> gymnasium.Env[Any, Any]:
    return Ended(limited())


@pytest.mark.long
@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize(
    ("env", "chance"), [(limited, 0.0), (short_lived, 1 / LIMIT)], ids=["a limit of time", "an end of the task"]
)
def test_a_time_limit_does_not_lower_values_and_an_end_does(n_step, env, chance):
    """All times look alike in one state: the value solves Q = E[R] + E[D] Q over the times of an episode."""
    lengths = [min(n_step, LIMIT - time) for time in range(LIMIT)]
    reward = np.mean([sum(GAMMA**step for step in range(length)) for length in lengths])
    ends = [time + length == LIMIT and chance > 0 for time, length in enumerate(lengths)]
    discount = np.mean([0.0 if end else GAMMA**length for length, end in zip(lengths, ends, strict=True)])
    settings = LEARNING | EXPLORING | {"env": env, "network": lambda: nn.Linear(1, 1, bias=False), "target_every": 3}
    job = dqn(**settings, n_step=n_step, samples_per_insert=64, capacity=100)
    found = virtual(job, "bsp collective", workers=1, steps=300, batch_size=100, optimizer="sgd:lr=0.5", seed=1)
    wanted = reward / (1 - discount)
    assert found.params.numpy() == pytest.approx(wanted, abs=0.01)
    assert chance or wanted == pytest.approx(1 / (1 - GAMMA))
