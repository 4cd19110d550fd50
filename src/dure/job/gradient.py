"""Gradients and the work of computing one, as values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from dure.job.data.structure import Batch


@dataclass(slots=True)
class GradientWork:
    """The gradient of one mini-batch at `values`, to be computed.

    `values` are flat parameters, lent: not changed until the result is there. `inputs` and `targets` have a sample
    per row of each tensor (`data.structure`), and are None where only time counts. Random layers draw from (`seed`,
    `rank`, `step`). `flops` is what the whole batch costs, for virtual time. `buffers` is this worker's own snapshot
    (`Replica.buffers_flat`), None for those of a fresh model.
    """

    rank: int
    step: int
    values: Tensor
    inputs: Batch | None
    targets: Batch | None
    seed: int
    flops: float
    buffers: Tensor | None = None

    def run(self) -> NoReturn:
        """A gradient is not computed alone: give it to a runtime's `GradientEngine`."""
        raise TypeError("GradientWork is computed by a GradientEngine. Write engine.evaluate([work])[0].")

    def ghost(self) -> Gradient:
        """What stands for the gradient in a timing-only run: `values` is a `base.Ghost`, and all are alike."""
        return Gradient(self.values, loss=0.0, samples=0)


@dataclass(slots=True)
class Gradient:
    """A flat gradient that is its receiver's own, the batch's mean loss, and how many samples that was.

    Gradients that were computed together share memory without overlapping: who keeps one for long keeps a copy.
    `buffers` is the worker's new snapshot, None where the model has none. What is `apart` is not in `values`. Values
    that are `checked` are known to be finite. `faulty` ranks have no part in a mean, as their gradient was not finite.
    """

    values: Tensor
    loss: float
    samples: int
    buffers: Tensor | None = None
    apart: Apart | None = None
    checked: bool = False
    faulty: Sequence[int] = ()

    def scaled(self, factor: float) -> Gradient:
        """This gradient times `factor`, in place."""
        self.values *= factor
        if self.apart is not None:
            for part in (self.apart.whole, *(values for _, values in self.apart.rows)):
                part *= factor
        return self

    def with_values(self, values: Tensor) -> Gradient:
        """The same, but for the gradient itself."""
        return replace(self, values=values)


class Apart(NamedTuple):
    """The part of a gradient that is for servers (`job.gradients`).

    `rows` has, of each table, the numbers of the rows that may differ from zero, ascending, and their values (count,
    width). `whole` is the gradient of what servers hold whole, flat.
    """

    rows: Sequence[tuple[torch.Tensor, torch.Tensor]]
    whole: torch.Tensor
