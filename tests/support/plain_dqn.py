"""DQN in one process, written from the paper, beside which the distributed runs of `dure.rl` are held.

Mnih et al., "Human-level control through deep reinforcement learning", Nature 2015, algorithm 1. The loop has
environments of Gymnasium, optimizers of PyTorch and lists for a replay; it uses nothing of `dure.rl` but the numbers
with which random streams begin: those of the environment, of exploration and of the replay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

ENVIRONMENT, NOISE, REPLAY = 11, 12, 13
"""The streams of random numbers of an actor's environment, of its exploration, and of a replay."""


def drawn(*stream: int) -> int:
    return int(np.random.SeedSequence(stream).generate_state(1)[0])


def flat(net: nn.Module) -> Tensor:
    return torch.cat([each.detach().reshape(-1) for each in net.parameters()])


@dataclass
class PlainDqn:
    """The settings of a run. The batch is drawn with one number in each of `batch` equal parts of the replay."""

    make: Callable[[], gymnasium.Env[Any, Any]]
    net: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    seed: int
    batch: int = 32
    gamma: float = 0.99
    epsilon: float = 0.1
    min_size: int = 50
    capacity: int = 100_000
    target_every: int = 20
    acts_before_target: bool = False
    truncation_ends: bool = False

    def run(self, updates: int) -> Tensor:
        """The parameters after so many updates, one after each step once the replay has `min_size` transitions."""
        net, target = self.net(), self.net()
        target.load_state_dict(net.state_dict())
        optimizer = self.optimizer(net.parameters())
        env = self.make()
        stream = np.random.SeedSequence(drawn(ENVIRONMENT, self.seed, 0, 0, 0)).spawn(1)[0]
        state, _ = env.reset(seed=int(stream.generate_state(1)[0]))
        exploration = np.random.default_rng((NOISE, self.seed, 0, 0, 0))
        sampling = np.random.default_rng(drawn(REPLAY, self.seed, 0))
        replay: list[tuple[Any, int, float, float, Any]] = []
        made = 0
        while made < updates:
            action = self._act(net, state, exploration)
            following, reward, terminated, truncated, _ = env.step(action)
            replay.append((state, action, float(reward), 0.0 if terminated else self.gamma, following))
            del replay[: -self.capacity]
            state = env.reset()[0] if terminated or truncated else following
            if len(replay) < self.min_size:
                continue
            self._learn(net, target, optimizer, self._sample(replay, sampling))
            made += 1
            if made % self.target_every == 0:
                target.load_state_dict(net.state_dict())
        return flat(net)

    def _act(self, net: nn.Module, state: Any, exploration: np.random.Generator) -> int:
        """Epsilon-greedy: one draw decides whether the action is random, another one which it would be."""
        with torch.no_grad():
            values = net(torch.from_numpy(state[None])).numpy()[0]
        explore, which = exploration.random(2)
        return int(which * len(values)) if explore < self.epsilon else int(np.argmax(values))

    def _sample(self, replay: list[Any], sampling: np.random.Generator) -> list[Any]:
        places = (np.arange(self.batch) + sampling.random(self.batch)) / self.batch * len(replay)
        return [replay[int(place)] for place in places]

    def _learn(self, net: nn.Module, target: nn.Module, optimizer: torch.optim.Optimizer, batch: list[Any]) -> None:
        states, actions, rewards, discounts, following = zip(*batch, strict=True)
        with torch.no_grad():
            best = target(torch.from_numpy(np.stack(following))).max(1).values
            wanted = torch.tensor(rewards) + torch.tensor(discounts) * best
        values = net(torch.from_numpy(np.stack(states)))[torch.arange(self.batch), torch.tensor(actions)]
        optimizer.zero_grad()
        ((wanted - values) ** 2 / 2).mean().backward()
        optimizer.step()
