"""Synthesizers: small dense models that predict the gradient of a stage's outputs from the outputs.

S(h) = A h + b, or `hidden` layers of the width of h with ReLU before it;  S([h, y]) with labels
prediction for B samples:  S(h) / B, as the loss is a mean;  at first 0, since A and b are
step on the gradient d:    the mean over the samples of || S(h) - B d ||^2
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from dure.errors import UsageError
from dure.job.data.structure import called, tensors
from dure.job.isolated import Isolated
from dure.job.optimizer import FlatOptimizer, OptimizerSpec
from dure.job.replica import Replica
from dure.partition.stage_module import seed_of

if TYPE_CHECKING:
    from dure.job.data.structure import Batch
    from dure.job.job import Job
    from dure.partition.stage import Stage

NAME = "synthesizer"
"""Names its state among that of a worker."""


class Predictor(Protocol):
    """Predicts gradients of a stage's outputs, and learns from the targets, in the order of the mini-batches."""

    def predict(self, outputs: Sequence[Tensor], targets: Batch | None) -> Sequence[Tensor]: ...

    def learn(self, gradients: Sequence[Tensor]) -> None: ...


class Synthesizer:
    """The synthesizer behind `stage`, with `hidden` layers and its own `optimizer`.

    Its values and those of the optimizer are declared state of the worker (`kept`), so that a restart restores them.
    """

    def __init__(self, stage: Stage, *, hidden: int, labels: bool, optimizer: OptimizerSpec) -> None:
        assert stage.module is not None
        specs = [each for each in stage.layout.border(stage.rank, stage.rows(0)).tensors if each.gradient]
        self.labels = Labels(stage.layout.job) if labels else None
        self._shapes = [each.shape for each in specs]
        widths = widths_of(stage, hidden, self.labels)
        device = stage.module.replica.device
        with Isolated(True, seed_of((stage.batches.seed, stage.batches.replica, stage.rank)), device):
            self._model = dense(widths).to(device, specs[0].dtype)
        self._replica = Replica(self._model)
        self._optimizer = FlatOptimizer(optimizer, self._replica.numel, self._replica.dtype, device=device)
        self._waiting: deque[Tensor] = deque()
        self._keep_in(stage.requester.kept, stage.requester.kept_plain)

    def _keep_in(self, kept: dict[str, Tensor], plain: dict[str, Any]) -> None:
        """Make the state a part of `kept` and `plain`, from the values that these have already."""
        own = {NAME: self._replica.params} | {f"{NAME} {name}": v for name, v in self._optimizer.vectors.items()}
        for name, values in own.items():
            if name in kept:
                values.copy_(kept[name])
            kept[name] = values
        self._optimizer.steps = plain.setdefault(f"{NAME} steps", 0)
        self._plain = plain

    def predict(self, outputs: Sequence[Tensor], targets: Batch | None) -> list[Tensor]:
        """The predicted gradients of the outputs of a mini-batch. `targets` are for a synthesizer with labels."""
        parts = [each.flatten(1) for each in outputs]
        if self.labels is not None:
            parts.append(self.labels.encoded(targets, parts[0]))
        features = torch.cat(parts, dim=1)
        self._waiting.append(features)
        with torch.no_grad():
            found = self._model(features) / len(features)
        split = found.split([each[0].numel() for each in outputs], dim=1)
        return [part.reshape(shape) for part, shape in zip(split, self._shapes, strict=True)]

    def learn(self, gradients: Sequence[Tensor]) -> None:
        """Make a step towards the gradients of the oldest mini-batch that `predict` has seen and `learn` has not."""
        features = self._waiting.popleft()
        wanted = torch.cat([each.flatten(1) for each in gradients], dim=1) * len(features)
        with Isolated(True, None, features.device):
            loss = (self._model(features) - wanted).square().sum(dim=1).mean()
            found = torch.autograd.grad(loss, self._replica.parameters)
        values = self._replica.params
        self._optimizer.apply(values, torch.cat([each.reshape(-1) for each in found]), values)
        self._plain[f"{NAME} steps"] = self._optimizer.steps


class Labels:
    """Encodes a job's targets as features: numbers as they are, and classes as one-hot vectors.

    Raises `UsageError` for targets that are no tensor, or whose classes are not the columns of the model's outputs.
    """

    def __init__(self, job: Job) -> None:
        inputs, targets = job.train.batch(torch.arange(2) % len(job.train))
        found = tensors(targets)
        if len(found) != 1:
            raise UsageError(f"labels=true needs one tensor of targets, and {job.name} has {len(found)}: leave it out")
        self.width = found[0][0].numel()
        self._classes = not found[0].is_floating_point()
        if self._classes:
            with torch.no_grad():
                outputs = called(job.build(0), inputs)
            if not isinstance(outputs, Tensor) or outputs.dim() != 2 or found[0].dim() != 1:
                raise UsageError("labels=true needs classes whose scores are the columns of the outputs: leave it out")
            self.width = outputs.shape[1]

    def encoded(self, targets: Batch | None, like: Tensor) -> Tensor:
        """The features of the targets of a mini-batch, in the dtype of `like`."""
        assert targets is not None
        (found,) = tensors(targets)
        return (one_hot(found, self.width) if self._classes else found.flatten(1)).to(like.dtype)


def widths_of(stage: Stage, hidden: int, labels: Labels | None) -> list[int]:
    """The widths of a synthesizer behind `stage`. Raises `UsageError` where samples are not the first dimension."""
    rows = stage.rows(0)
    shapes = [each.shape for each in stage.layout.border(stage.rank, rows).tensors if each.gradient]
    if any(not shape or shape[0] != rows for shape in shapes):
        raise UsageError(
            f"a synthesizer reads one row for each of {rows} samples, and stage {stage.rank} gives {shapes}: "
            "let the first dimension count the samples, or cut elsewhere"
        )
    width = sum(torch.Size(shape[1:]).numel() for shape in shapes)
    return [width + (labels.width if labels else 0), *[width] * hidden, width]


def share_of(stage: Stage, hidden: int, labels: bool) -> float:
    """The time of a synthesizer's forward, in shares of the model's forward."""
    widths = widths_of(stage, hidden, Labels(stage.layout.job) if labels else None)
    return stage.layout.share_of_dense(sum(inputs * outputs for inputs, outputs in pairwise(widths)))


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
