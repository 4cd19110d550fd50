"""Synthesizers: models that predict the gradient of a stage's outputs from the outputs, and from the labels."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from dure.core.state import State, under_prefix, with_prefix
from dure.errors import UsageError
from dure.job.data.structure import described, tensors
from dure.partition.blocks import first_samples
from dure.partition.gradient_model import GradientModel
from dure.partition.stage_module import seed_of

if TYPE_CHECKING:
    from dure.job.data.structure import Batch
    from dure.job.optimizer import OptimizerSpec
    from dure.partition.layout import StageLayout
    from dure.partition.stage import Stage

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
