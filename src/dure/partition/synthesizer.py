"""Synthesizers: models that predict the gradient of a stage's outputs from the outputs, and from the labels.

`RecurrentSynthesizer` predicts the gradient from beyond the window of truncated back-propagation through time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from dure.core.state import State, under_prefix, with_prefix
from dure.errors import UsageError
from dure.job.data.dataset import described, tensors
from dure.job.gradient_engine import Isolated
from dure.job.optimizer import FlatOptimizer, OptimizerSpec
from dure.job.replica import Replica
from dure.partition.blocks import first_samples
from dure.partition.stage_module import seed_of

if TYPE_CHECKING:
    from dure.job.data.dataset import Batch
    from dure.partition.layout import StageLayout
    from dure.partition.stage import Stage


class GradientModel:
    """A dense model with layers of these `widths`, drawn from `seed`, and the `optimizer` that trains it.

    `values` are its parameters, flat. It predicts the gradient of a mean loss, one row of features for each sample:

        S(h) = A h + b, behind hidden layers with ReLU, if any;  at first 0, since A and b are
        prediction for B samples:  S(h) / B, as the loss is a mean over them
        step on the gradient d:    the mean over the samples of || S(h) - B d ||^2 / (1 + the mean of || h ||^2)

    The division keeps a linear model stable at any width and scale of h, by plain SGD with a rate below 1. It changes
    no minimum.
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
            raise ValueError(
                f"the state has {values.numel()} values in place of {self.values.numel()}: it is another model's"
            )
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


NAME = "synthesizer"
"""Names its state among that of a worker."""


class Predictor(Protocol):
    """Predicts gradients of a stage's outputs, and learns from the targets, in the order of the mini-batches."""

    def predict(self, outputs: Sequence[Tensor], targets: Batch | None) -> Sequence[Tensor]: ...

    def learn(self, gradients: Sequence[Tensor]) -> None: ...


class Synthesizer:
    """The synthesizer behind `stage`, with `hidden` layers and its own `optimizer`.

    Its state is declared state of the worker (`kept`), so that a restart restores it.
    """

    def __init__(self, stage: Stage, *, hidden: int, labels: bool, optimizer: OptimizerSpec) -> None:
        assert stage.module is not None
        specs = [each for each in stage.layout.border(stage.rank, stage.rows(0)).tensors if each.gradient]
        self.labels = Labels(stage.layout) if labels else None
        self._shapes = [each.shape for each in specs]
        self._model = GradientModel(
            widths_of(stage, hidden, self.labels),
            optimizer,
            seed=seed_of((stage.batches.seed, stage.batches.replica, stage.rank)),
            dtype=specs[0].dtype,
            device=stage.module.replica.device,
        )
        self._waiting: deque[Tensor] = deque()
        self._kept, self._plain = stage.requester.kept, stage.requester.kept_plain
        if NAME in self._plain:
            self._model.restore(State(under_prefix(f"{NAME}.", self._kept), self._plain[NAME]))
        self._keep()

    def _keep(self) -> None:
        state = self._model.state()
        self._kept.update(with_prefix(f"{NAME}.", state.tensors))
        self._plain[NAME] = state.plain

    def predict(self, outputs: Sequence[Tensor], targets: Batch | None) -> list[Tensor]:
        """The predicted gradients of the outputs of a mini-batch. `targets` are for a synthesizer with labels."""
        parts = [_rows_of(each) for each in outputs]
        if self.labels is not None:
            parts.append(self.labels.encoded(targets, parts[0]))
        features = torch.cat(parts, dim=1)
        self._waiting.append(features)
        split = torch.split(self._model.predict(features), [each[0].numel() for each in outputs], dim=1)
        return [part.reshape(shape) for part, shape in zip(split, self._shapes, strict=True)]

    def learn(self, gradients: Sequence[Tensor]) -> None:
        """Make a step towards the gradients of the oldest mini-batch that `predict` has seen and `learn` has not."""
        self._model.learn(self._waiting.popleft(), torch.cat([_rows_of(each) for each in gradients], dim=1))
        self._keep()


class Labels:
    """Encodes a job's targets as features: floats and flags as they are, and classes as one-hot vectors.

    Raises `UsageError` for targets that are not one tensor, or whose classes are not columns of the model's outputs.
    """

    def __init__(self, layout: StageLayout) -> None:
        targets = first_samples(layout.job, 1, torch.device("cpu"))[1]
        found, outputs = tensors(targets), layout.outputs
        if len(found) != 1:
            raise UsageError(
                f"dni:labels=true needs one tensor of targets, and a sample of the job has {described(targets)}: write "
                "dni:labels=false"
            )
        self.width = found[0][0].numel()
        has_scores = outputs.single and len(outputs.tensors[0].shape) == 2 and found[0].dim() == 1
        self._classes = has_scores and not found[0].is_floating_point()
        if self._classes:
            self.width = outputs.tensors[0].shape[1]
        elif not found[0].is_floating_point() and found[0].dtype != torch.bool:
            raise UsageError(
                "dni:labels=true needs classes whose scores are the columns of the outputs, and a sample of the job "
                f"has targets {described(targets)}, with outputs {[each.shape for each in outputs.tensors]} of a "
                "batch: write dni:labels=false, or give targets that are numbers as floats"
            )

    def encoded(self, targets: Batch | None, like: Tensor) -> Tensor:
        """The features of the targets of a mini-batch, in the dtype of `like`. A target that is no class gets zeros."""
        assert targets is not None
        (found,) = tensors(targets)
        if self._classes:
            found = found.unsqueeze(1) == torch.arange(self.width, device=found.device)
        return _rows_of(found).to(like.dtype)


def _rows_of(tensor: Tensor) -> Tensor:
    """A row of features for each sample; one number per sample is a row of one."""
    return tensor.reshape(len(tensor), -1)


def check(layout: StageLayout, *, labels: bool) -> None:
    """Raise `UsageError` for a model or targets that synthesizers behind the stages of `layout` cannot read."""
    for stage in range(layout.depth - 1):
        _ = features_of(layout, stage, layout.job.batch_size)
    if labels and layout.depth > 1:
        _ = Labels(layout)


def widths_of(stage: Stage, hidden: int, labels: Labels | None) -> list[int]:
    """The widths of a synthesizer behind `stage`."""
    width = features_of(stage.layout, stage.rank, stage.rows(0))
    return [width + (labels.width if labels else 0), *[width] * hidden, width]


def features_of(layout: StageLayout, stage: int, rows: int) -> int:
    """The numbers of a sample behind a stage. Raises `UsageError` where samples are not the first dimension."""
    shapes = [each.shape for each in layout.border(stage, rows).tensors if each.gradient]
    if any(not shape or shape[0] != rows for shape in shapes):
        raise UsageError(
            f"a synthesizer reads one row for each of {rows} samples, and stage {stage} gives {shapes}: "
            "let the first dimension count the samples, or cut elsewhere"
        )
    return sum(torch.Size(shape[1:]).numel() for shape in shapes)


def share_of(stage: Stage, hidden: int, labels: bool) -> float:
    """The time of a synthesizer's forward, in shares of the model's forward."""
    widths = widths_of(stage, hidden, Labels(stage.layout) if labels else None)
    return stage.layout.share_of_dense(sum(inputs * outputs for inputs, outputs in pairwise(widths)))


CoreState = TypeVar("CoreState", Tensor, tuple[Tensor, ...])


class RecurrentSynthesizer:
    """Predicts the gradient of all later losses in the state of a recurrent core, of `width` numbers for each sample.

    `width` counts all tensors of the state. The model is linear or has `hidden` layers; `optimizer` trains it.
    Predictions are multiplied by `scale` where they enter a loss; the paper used 0.1 in its recurrent experiments.

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

    The loss is the mean over the rows of the state, which are samples. A state is a tensor or a tuple of tensors, as in
    an LSTM. Prediction of later synthetic gradients, an auxiliary task of the paper, is left out.
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
