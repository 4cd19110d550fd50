"""Grades a model by the returns of whole episodes, without noise on its actions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dure.job.gradient_engine import Isolated
from dure.job.metrics import Metrics
from dure.job.replica import Replica
from dure.rl.environments import Environments, frames_per_step

if TYPE_CHECKING:
    import gymnasium

    from dure.job.companions import Build
    from dure.rl.algorithm import RlAlgorithm
    from dure.rl.environments import Factory

STREAMS = 10
"""Environments that are stepped together, at most."""

MOST_FRAMES = 108_000
"""Frames of an episode, at most: half an hour of an Atari game. A policy without noise may go in circles for ever."""


class EpisodeGrader:
    """Plays at least `episodes` episodes, the same number in each of several environments.

    `epsilon` is the share of random actions. The environments have the same seeds for each grade.
    """

    def __init__(
        self, algorithm: RlAlgorithm, factory: Factory, build: Build, episodes: int, *, epsilon: float, seed: int
    ) -> None:
        self.algorithm, self.factory = algorithm, partial(_limited, factory)
        self.replica = Replica(build(seed))
        self.replica.module.eval()
        self.streams = min(episodes, STREAMS)
        self.each = math.ceil(episodes / self.streams)
        self.epsilon, self.seed = epsilon, seed

    def grade(self, values: torch.Tensor, buffers: torch.Tensor | None = None) -> Metrics:
        self.replica.load(values.to(self.replica.device))
        if buffers is not None:
            self.replica.load_buffers(buffers)
        with Isolated(False, self.seed, self.replica.device):  # a network may draw in evaluation mode, too
            found = self._returns()
        return Metrics(None, None, {"mean_return": float(np.mean(found)), "return_std": float(np.std(found))})

    def _returns(self) -> Sequence[float]:
        """The returns of the first episodes of each environment."""
        environments = Environments(self.factory, self.streams, self.seed)
        rng = np.random.default_rng(self.seed)
        noise = np.full(self.streams, self.epsilon)
        returns: list[list[float]] = [[] for _ in range(self.streams)]
        while min(map(len, returns)) < self.each:
            actions = self.algorithm.act(self.replica.module, environments.observations, noise, rng)
            for episode in environments.step(actions).ended:
                returns[episode.stream].append(episode.episode_return)
        environments.close()
        return [one for stream in returns for one in stream[: self.each]]


def _limited(factory: Factory) -> gymnasium.Env[Any, Any]:
    """An environment whose episodes end."""
    from gymnasium.wrappers import TimeLimit

    made = factory()
    return TimeLimit(made, MOST_FRAMES // frames_per_step(made))
