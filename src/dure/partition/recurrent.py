"""Recurrent DNI: truncated back-propagation through time that predicts the gradient from beyond its window.

Jaderberg et al., "Decoupled Neural Interfaces using Synthetic Gradients", ICML 2017, section 2.2.

    for each window [a, a + T):   h(a) is the state before it, detached; L(tau) is the loss of step tau
        J <- L(a) + ... + L(a + T - 1) + S(h(a + T))^T h(a + T)             S's output is a constant here
        theta <- a step along dJ / dtheta
        S <- a step on || S(h(a)) - dJ / dh(a) ||^2                         the target is bootstrapped

The windows are half-open: no loss counts twice. S begins at zero, and while it is zero this is truncated
back-propagation with window T. It is a part of the user's own loop, in one process or under `dure.attach`:

    synthesizer = RecurrentSynthesizer(64)
    for inputs, targets in windows:
        state = synthesizer.begin(state)                # detached
        loss, state = window(model, state, inputs, targets)
        (loss + synthesizer.beyond(state)).backward()
        synthesizer.learn()
        optimizer.step()

Under `dure.attach` each rank has a synthesizer of its own, and the step is that of the attached model.

The loss is the mean over the rows of the state, which are samples. A state is a tensor or a tuple of tensors, as in an
LSTM. Prediction of later synthetic gradients, an auxiliary task of the paper, is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from dure.core.state import State
from dure.errors import UsageError
from dure.job.data.structure import tensors
from dure.job.optimizer import OptimizerSpec
from dure.partition.gradient_model import GradientModel

CoreState = TypeVar("CoreState", Tensor, tuple[Tensor, ...])


class RecurrentSynthesizer:
    """Predicts the gradient of all later losses in the state of a recurrent core, of `width` numbers for each sample.

    `width` counts all tensors of the state. The model is linear or has `hidden` layers; `optimizer` trains it.
    Predictions are multiplied by `scale` where they enter a loss; the paper used 0.1 in its recurrent experiments.
    """

    def __init__(
        self,
        width: int,
        *,
        hidden: int = 0,
        optimizer: OptimizerSpec | str = "sgd:lr=0.5",
        scale: float = 1.0,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        spec = OptimizerSpec.parse(optimizer) if isinstance(optimizer, str) else optimizer
        self.width = width
        self.scale = scale
        self._model = GradientModel([width] * (hidden + 2), spec, seed=seed, dtype=dtype, device=device)
        self._begun: Sequence[Tensor] | None = None

    def begin(self, state: CoreState) -> CoreState:
        """The state before a window, detached, so that the gradient of the window in it can be found."""
        self._begun = [each.detach().clone().requires_grad_() for each in tensors(state)]
        return self._begun[0] if isinstance(state, Tensor) else tuple(self._begun)

    def beyond(self, state: CoreState) -> Tensor:
        """The term that a window's loss needs for the losses beyond it; `state` is that after the window."""
        parts = tensors(state)
        predicted = self._model.predict(self._features(parts)) * self.scale
        return (predicted * torch.cat([each.flatten(1) for each in parts], dim=1)).sum()

    def learn(self) -> None:
        """Make a step towards the gradient in the state that `begin` gave; call it after the backward.

        Raises `UsageError` without a backward of a window that began there.
        """
        if self._begun is None or all(each.grad is None for each in self._begun):
            raise UsageError(
                "the synthesizer has no gradient to learn from. In each window call begin(state), run the window from "
                "what it returns, call backward() on loss + beyond(state), then learn()."
            )
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in self._begun]
        self._model.learn(self._features(self._begun), torch.cat([each.flatten(1) for each in gradients], dim=1))
        self._begun = None

    def state_dict(self) -> dict[str, Any]:
        """The values of the model and its optimizer; copies."""
        state = self._model.state().cloned()
        return {"tensors": state.tensors, "plain": state.plain}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. Raises `ValueError` where it belongs to a model of another size."""
        self._model.restore(State(dict(state["tensors"]), dict(state["plain"])))

    def _features(self, parts: Sequence[Tensor]) -> Tensor:
        found = torch.cat([each.detach().flatten(1) for each in parts], dim=1)
        if found.shape[1] != self.width:
            raise UsageError(
                f"a state has {found.shape[1]} numbers for each sample, and the synthesizer was made for {self.width}. "
                f"Write RecurrentSynthesizer({found.shape[1]})."
            )
        return found
