"""Q-learning with deep networks: DQN, double DQN and dueling networks, on returns of n steps.

Mnih et al., "Human-level control through deep reinforcement learning", Nature 2015; van Hasselt et al., "Deep
Reinforcement Learning with Double Q-learning", AAAI 2016; Horgan et al., "Distributed Prioritized Experience Replay",
ICLR 2018.

    act      with probability epsilon a random action, else argmax_a Q(s, a)
    target   y = R + D max_a Q(s', a; target)                                DQN
             y = R + D Q(s', argmax_a Q(s', a; module); target)              double DQN: the module chooses
    error    delta = y - Q(s, a; module)
    loss     mean of w * delta^2 / 2, or of w * huber(delta)                 w: the weights of the replay

R and D are the return and the discount of `NStep`. With `module` as its own target, as in an actor, both targets are
equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from dure.errors import UsageError
from dure.rl.networks import QNetwork, check_hidden, q_network
from dure.rl.spaces import choices, layout
from dure.rl.transitions import Column, Layout, check_returns

if TYPE_CHECKING:
    from gymnasium import Space


@dataclass(frozen=True, slots=True)
class Dqn:
    """DQN and its variants. `hidden` are the layers of networks for observations that are no images.

    Raises:
        UsageError: a value is out of its range.
    """

    gamma: float = 0.99
    n_step: int = 3
    double: bool = True
    dueling: bool = True
    loss_: Literal["squared", "huber"] = "squared"
    hidden: tuple[int, ...] = (128, 128)

    def __post_init__(self) -> None:
        check_returns(self.gamma, self.n_step)
        check_hidden(self.hidden)
        if self.loss_ not in _LOSSES:
            raise UsageError(f'dqn: loss must be "squared" or "huber", got {self.loss_!r}.')

    def layout(self, observation_space: Space[Any], action_space: Space[Any]) -> Layout:
        """The columns of a transition. Raises `UsageError` for spaces that DQN cannot use."""
        choices(action_space)
        return layout(observation_space, Column("action", "int64"))

    def network(self, observation_space: Space[Any], action_space: Space[Any]) -> QNetwork:
        """A network with random initial values. Raises `UsageError` for spaces that DQN cannot use."""
        return q_network(observation_space, choices(action_space), hidden=self.hidden, dueling=self.dueling)

    def act(
        self, module: nn.Module, observations: np.ndarray, noise: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        """An action (int64) per row of `observations`. `noise` are the probabilities of random actions (count,).

        Of equal values the first action is taken. A call draws the same number of random numbers, whatever it returns.
        """
        with torch.inference_mode():
            values = module(torch.from_numpy(observations)).numpy()
        count, actions = values.shape
        first, second = rng.random((2, count))
        chosen: np.ndarray = np.where(first < noise, (second * actions).astype(np.int64), values.argmax(1))
        return chosen

    @torch.no_grad()
    def targets(self, module: nn.Module, target: nn.Module, values: Mapping[str, Tensor]) -> Tensor:
        """The targets (count,): R + D * the target network's value of the next observation."""
        following = target(values["next_observation"])
        chooser = module(values["next_observation"]) if self.double and module is not target else following
        return values["reward"] + values["discount"] * _chosen(following, chooser.argmax(1))

    def loss(
        self, module: nn.Module, values: Mapping[str, Tensor], targets: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The weighted loss of a batch, and the absolute error (count,) of each of its transitions, detached."""
        chosen = _chosen(module(values["observation"]), values["action"])
        delta = targets - chosen
        loss = (weights * _LOSSES[self.loss_](delta)).mean()
        return loss, delta.detach().abs()

    @torch.no_grad()
    def errors(self, module: nn.Module, values: Mapping[str, Tensor], targets: Tensor) -> Tensor:
        """The absolute error (count,) of each transition, without gradients."""
        return (targets - _chosen(module(values["observation"]), values["action"])).abs()


def _chosen(values: Tensor, actions: Tensor) -> Tensor:
    """The values (count,) of `actions` (count,) among `values` (count, actions)."""
    return values.gather(1, actions.unsqueeze(1)).squeeze(1)


def _squared(delta: Tensor) -> Tensor:
    return delta.square() / 2


def _huber(delta: Tensor) -> Tensor:
    return functional.huber_loss(delta, torch.zeros_like(delta), reduction="none")


_LOSSES = {"squared": _squared, "huber": _huber}
