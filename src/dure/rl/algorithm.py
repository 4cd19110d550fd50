"""The interface of an algorithm of reinforcement learning: how actions are chosen, and what the loss is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from dure.rl.transitions import Layout


class RlAlgorithm(Protocol):
    """An algorithm without parameters of its own: modules are given to it, in the mode that they shall have.

    | call                                  | `module`         | `target`   |
    |---------------------------------------|------------------|------------|
    | `act`, `errors`, `targets`            | evaluation mode  | evaluation |
    | `loss`                                | training mode    |            |

    Dropout is off, and batch norm has its running statistics, wherever a value is used as it is: for an action, a
    priority, or a target. Lillicrap et al. (2016) act so; Stable-Baselines3 (DQN, TD3) has its target networks so, with
    the running statistics of the network that they are copied from.
    """

    @property
    def n_step(self) -> int: ...

    @property
    def gamma(self) -> float: ...

    def layout(self, observation_space: Any, action_space: Any) -> Layout:
        """The columns of its transitions. Raises `UsageError` for spaces that it cannot use."""
        ...

    def network(self, observation_space: Any, action_space: Any) -> nn.Module: ...

    def act(
        self, module: nn.Module, observations: np.ndarray, noise: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        """Choose an action for each of the `observations`, with its `noise` (count,)."""
        ...

    def targets(self, module: nn.Module, target: nn.Module, values: Mapping[str, Tensor]) -> Tensor:
        """The targets (count,) of a batch, without gradients."""
        ...

    def loss(
        self, module: nn.Module, values: Mapping[str, Tensor], targets: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The loss, whose gradient is that of the whole update, and the absolute TD errors (count,)."""
        ...

    def errors(self, module: nn.Module, values: Mapping[str, Tensor], targets: Tensor) -> Tensor:
        """The absolute TD errors (count,), without gradients."""
        ...
