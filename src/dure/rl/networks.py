"""Networks of agents: action values for DQN, a policy and its critic for DPG.

| observations                       | trunk                                                                     |
|------------------------------------|---------------------------------------------------------------------------|
| bytes (channels, height, width)    | the convolutions of Mnih et al. (2015), on values divided by 255          |
| any others, flattened              | layers of `hidden` units                                                  |

Dueling networks (Wang et al., 2016) have two streams after the trunk, the value of the state and the advantages of
actions: Q = V + A - mean A. With convolutions, each stream has a hidden layer of 512 units of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dure.errors import UsageError
from dure.rl.spaces import arrays, bounded, is_image

if TYPE_CHECKING:
    from gymnasium import Space

CONVOLUTIONS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
"""Channels, width and stride of each convolution."""

HEAD = 512
"""Units of the hidden layer after the convolutions."""

SMALLEST = 36
"""Pixels along an axis of the smallest image that the convolutions can take."""


def check_hidden(hidden: Sequence[int]) -> None:
    """Raises `UsageError` for hidden layers without units, or no hidden layer."""
    if min(hidden, default=0) < 1:
        raise UsageError(f"each hidden layer has at least one unit, got hidden={tuple(hidden)}. Write hidden=64/64.")


class _Floats(nn.Module):
    """Observations as flat vectors of numbers."""

    def forward(self, observations: Tensor) -> Tensor:
        return observations.flatten(1).float()


class _Pixels(nn.Module):
    """Bytes as numbers from 0 to 1."""

    def forward(self, observations: Tensor) -> Tensor:
        return observations.float().div(255)


class QNetwork(nn.Module):
    """Action values (count, actions) of observations (count, ...)."""

    def __init__(self, trunk: nn.Module, advantages: nn.Module, value: nn.Module | None) -> None:
        super().__init__()
        self.trunk = trunk
        self.advantages = advantages
        self.value = value

    def forward(self, observations: Tensor) -> Tensor:
        features = self.trunk(observations)
        advantages: Tensor = self.advantages(features)
        return advantages if self.value is None else dueling(self.value(features), advantages)


def dueling(value: Tensor, advantages: Tensor) -> Tensor:
    """Action values of states with this `value` (count, 1) and these `advantages` (count, actions).

    >>> dueling(torch.tensor([[2.0]]), torch.tensor([[1.0, 2.0, 6.0]])).tolist()
    [[0.0, 1.0, 5.0]]
    """
    return value + (advantages - advantages.mean(1, keepdim=True))


def q_network(
    observation_space: Space[Any], actions: int, *, hidden: Sequence[int] = (128, 128), dueling: bool = True
) -> QNetwork:
    """A network of action values. `hidden` are the layers for observations that are no images."""
    trunk, width, head = _trunk(observation_space, hidden)
    value = nn.Sequential(*_layers((width, *head, 1))) if dueling else None
    return QNetwork(nn.Sequential(*trunk), nn.Sequential(*_layers((width, *head, actions))), value)


def _trunk(observation_space: Space[Any], hidden: Sequence[int]) -> tuple[list[nn.Module], int, tuple[int, ...]]:
    """Layers that read observations, the number of their outputs, and the hidden layers that belong after them."""
    space = arrays(observation_space)
    if not is_image(space):
        return [_Floats(), *_layers((math.prod(space.shape), *hidden)), nn.ReLU()], hidden[-1], ()
    channels, *sides = space.shape
    if min(sides) < SMALLEST:
        raise UsageError(
            f"images need {SMALLEST} x {SMALLEST} pixels or more, channels first, and observations are {space.shape}. "
            "Resize them, move the channels to the front, or wrap the environment in "
            "gymnasium.wrappers.FlattenObservation."
        )
    layers: list[nn.Module] = [_Pixels()]
    for outputs, width, stride in CONVOLUTIONS:
        layers += [nn.Conv2d(channels, outputs, width, stride), nn.ReLU()]
        channels, sides = outputs, [(side - width) // stride + 1 for side in sides]
    return [*layers, nn.Flatten()], channels * math.prod(sides), (HEAD,)


def _layers(widths: Sequence[int]) -> list[nn.Module]:
    """Dense layers of these widths, with ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.ReLU(), nn.Linear(inputs, outputs)]
    return layers[1:]


class PolicyAndCritic(nn.Module):
    """A policy of continuous actions within bounds, and the critic of its actions; they share no parameters."""

    low: Tensor
    high: Tensor
    center: Tensor
    half_range: Tensor

    def __init__(self, policy: nn.Module, critic: nn.Module, low: Tensor, high: Tensor) -> None:
        super().__init__()
        self.policy_layers = policy
        self.critic_layers = critic
        bounds = {"low": low, "high": high, "center": (low + high) / 2, "half_range": (high - low) / 2}
        for name, values in bounds.items():
            self.register_buffer(name, values, persistent=False)

    def forward(self, observations: Tensor) -> Tensor:
        """The values (count,) of the policy's actions: all parameters have a part in it, as in an update."""
        return self.critic(observations, self.policy(observations))

    def policy(self, observations: Tensor) -> Tensor:
        """Actions (count, a) for observations (count, ...)."""
        return torch.addcmul(self.center, self.half_range, torch.tanh(self.policy_layers(observations)))

    def critic(self, observations: Tensor, actions: Tensor) -> Tensor:
        """The values (count,) of actions (count, a)."""
        values: Tensor = self.critic_layers(torch.cat([observations.flatten(1).float(), actions], 1)).squeeze(1)
        return values


def policy_and_critic(
    observation_space: Space[Any], action_space: Space[Any], *, hidden: Sequence[int] = (300, 200)
) -> PolicyAndCritic:
    """A policy and a critic with `hidden` layers each. Raises `UsageError` for images."""
    space, actions = arrays(observation_space), bounded(action_space)
    if is_image(space):
        raise UsageError(
            f"DPG learns from vectors, and observations are images {space.shape}. Give features, or choose an "
            "environment with discrete actions and DQN."
        )
    inputs, outputs = math.prod(space.shape), actions.shape[0]
    policy = nn.Sequential(_Floats(), *_layers((inputs, *hidden, outputs)))
    critic = nn.Sequential(*_layers((inputs + outputs, *hidden, 1)))
    low, high = (torch.as_tensor(bound, dtype=torch.float32) for bound in (actions.low, actions.high))
    return PolicyAndCritic(policy, critic, low, high)
