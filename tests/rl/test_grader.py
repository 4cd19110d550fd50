"""Evaluations by whole episodes."""

from __future__ import annotations

import gymnasium
import numpy as np
import torch

from dure.job.replica import Replica
from dure.rl import companions
from dure.rl.dqn import Dqn


class Endless(gymnasium.Env):
    """Each step has the reward 1, and none ends the episode."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 1.0, False, False, {}


def test_an_episode_without_end_is_cut(monkeypatch):
    monkeypatch.setattr(companions, "MOST_FRAMES", 50)
    network = Dqn(hidden=(4,)).network(Endless.observation_space, Endless.action_space)
    found = companions.EpisodeGrader(Dqn(), Endless, lambda seed: network, 3, epsilon=0.0, seed=0)
    assert found.grade(torch.zeros_like(Replica(network).params)).figures == {"mean_return": 50.0, "return_std": 0.0}
