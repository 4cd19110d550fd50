"""Deterministic policy gradients with a critic, on returns of n steps: the DPG variant of Ape-X.

Horgan et al., "Distributed Prioritized Experience Replay", ICLR 2018; Lillicrap et al., "Continuous control with deep
reinforcement learning", ICLR 2016.

    act      pi(s) + sigma * half the range of actions * normal noise, within the bounds
    target   y = R + D q(s', pi(s'; target); target)
    critic   delta = y - q(s, a);  descend the mean of w * delta^2 / 2
    policy   ascend the mean of q(s, pi(s)) along clip(dq/da, -1, 1) * dpi/dphi, element by element of a

The clip bounds the gradient of the critic with respect to the action, before the policy's own derivative. Its unit is
the environment's action.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dure.rl.networks import PolicyAndCritic, check_hidden, policy_and_critic
from dure.rl.spaces import bounded, layout
from dure.rl.transitions import Column, Layout, check_returns

if TYPE_CHECKING:
    from gymnasium import Space


class Agent(Protocol):
    """The part of `PolicyAndCritic` that DPG uses; `low` and `high` bound the actions."""

    low: Tensor
    high: Tensor

    def policy(self, observations: Tensor) -> Tensor: ...

    def critic(self, observations: Tensor, actions: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Dpg:
    """DPG. `hidden` are the layers of the policy and of the critic.

    Raises:
        UsageError: a value is out of its range.
    """

    gamma: float = 0.99
    n_step: int = 5
    hidden: tuple[int, ...] = (300, 200)

    def __post_init__(self) -> None:
        check_returns(self.gamma, self.n_step)
        check_hidden(self.hidden)

    def layout(self, observation_space: Space[Any], action_space: Space[Any]) -> Layout:
        """The columns of a transition. Raises `UsageError` for spaces that DPG cannot use."""
        return layout(observation_space, Column("action", "float32", bounded(action_space).shape))

    def network(self, observation_space: Space[Any], action_space: Space[Any]) -> PolicyAndCritic:
        """A module with random initial values. Raises `UsageError` for spaces that DPG cannot use."""
        return policy_and_critic(observation_space, action_space, hidden=self.hidden)

    def act(self, module: Agent, observations: np.ndarray, noise: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """An action (float32) per row of `observations`. `noise` are the sigmas (count,)."""
        with torch.inference_mode():
            actions = module.policy(torch.from_numpy(observations)).numpy()
        low, high = module.low.numpy(), module.high.numpy()
        draws = rng.standard_normal(actions.shape, dtype=np.float32)
        scale = (noise[:, None] * (high - low) / 2).astype(np.float32)
        bounded_actions: np.ndarray = np.clip(actions + scale * draws, low, high)
        return bounded_actions

    @torch.no_grad()
    def targets(self, module: Agent, target: Agent, values: Mapping[str, Tensor]) -> Tensor:
        """The targets (count,): R + D * the target critic's value of the target policy's action."""
        following = values["next_observation"]
        return values["reward"] + values["discount"] * target.critic(following, target.policy(following))

    def loss(
        self, module: Agent, values: Mapping[str, Tensor], targets: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The loss of critic and policy, and the absolute error (count,) of the critic for each transition, detached.

        The gradient of the loss is that of both. Its value is that of the critic alone.
        """
        observations = values["observation"]
        delta = targets - module.critic(observations, values["action"])
        actions = module.policy(observations)
        slope = _slope(module, observations, actions.detach())
        ascent = (slope.clamp(-1, 1) * (actions - actions.detach())).sum(1).mean()  # 0, with the policy's gradient
        loss = (weights * delta.square() / 2).mean() - ascent
        return loss, delta.detach().abs()

    @torch.no_grad()
    def errors(self, module: Agent, values: Mapping[str, Tensor], targets: Tensor) -> Tensor:
        """The absolute error (count,) of the critic for each transition, without gradients."""
        return (targets - module.critic(values["observation"], values["action"])).abs()


def _slope(module: Agent, observations: Tensor, actions: Tensor) -> Tensor:
    """The derivative (count, a) of the critic with respect to `actions`. Parameters get no gradient."""
    actions.requires_grad_()
    (slope,) = torch.autograd.grad(module.critic(observations, actions).sum(), actions)
    return slope
