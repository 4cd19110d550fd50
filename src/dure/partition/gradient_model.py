"""Dense models that predict the gradient of a mean loss, one row of features for each sample, and their optimizers.

    S(h) = A h + b, or `hidden` layers with ReLU before it;  at first 0, since A and b are
    prediction for B samples:  S(h) / B, as the loss is a mean over them
    step on the gradient d:    the mean over the samples of || S(h) - B d ||^2 / (1 + the mean of || h ||^2)

The division keeps a linear model stable at any width and scale of h, by plain SGD with a rate below 1. It changes no
minimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from dure.core.state import State, under_prefix, with_prefix
from dure.job.isolated import Isolated
from dure.job.optimizer import FlatOptimizer, OptimizerSpec
from dure.job.replica import Replica


class GradientModel:
    """A dense model with layers of these `widths`, drawn from `seed`, and the `optimizer` that trains it.

    `values` are its parameters, flat.
    """

    def __init__(
        self,
        widths: Sequence[int],
        optimizer: OptimizerSpec,
        *,
        seed: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        place = torch.device(device)
        with Isolated(True, seed, place):
            self._module = dense(widths).to(place, dtype)
        self._replica = Replica(self._module)
        self.values = self._replica.params
        self._optimizer = FlatOptimizer(optimizer, self._replica.numel, dtype, device=place)

    def predict(self, features: Tensor) -> Tensor:
        """The predicted gradient of the mean loss, one row for each sample."""
        with torch.no_grad():
            found: Tensor = self._module(features) / len(features)
        return found

    def learn(self, features: Tensor, gradient: Tensor) -> None:
        """Make a step towards the `gradient` at these features."""
        wanted = gradient * len(features)
        with Isolated(True, None, features.device):
            loss = (self._module(features) - wanted).square().sum(dim=1).mean()
            scale = 1 + features.square().sum(dim=1).mean()
            found = torch.autograd.grad(loss / scale, self._replica.parameters)
        self._optimizer.apply(self.values, torch.cat([each.reshape(-1) for each in found]), self.values)

    def state(self) -> State:
        """The state that a checkpoint keeps; its tensors are not copies."""
        own = self._optimizer.state()
        return State({"values": self.values} | with_prefix("optimizer.", own.tensors), own.plain)

    def restore(self, state: State) -> None:
        """Go on from `state`. Raises `ValueError` where it belongs to a model of another size."""
        values = state.tensors["values"]
        if values.shape != self.values.shape:
            raise ValueError(f"{values.numel()} values in place of {self.values.numel()}: it is another model's")
        self._optimizer.restore(State(under_prefix("optimizer.", state.tensors), state.plain))
        self.values.copy_(values)


def dense(widths: Sequence[int]) -> nn.Sequential:
    """Dense layers with ReLU between them; the last is zero."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    last = layers[-2]
    assert isinstance(last, nn.Linear)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(*layers[:-1])
