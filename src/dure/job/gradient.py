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
    """A request for the gradient of one mini-batch at the flat parameters `values`.

    `values` are lent: their owner does not change them before the result. `inputs` and `targets` have one sample in
    each row of a tensor (`data.structure`); both are None in a timing-only run. Random layers draw from (`seed`,
    `rank`, `step`). `flops` counts the floating-point operations of the whole batch, for virtual time. `buffers` is the
    worker's snapshot (`Replica.buffers_flat`); None means the buffers of a fresh model.
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
        """Raise `TypeError`: only the `GradientEngine` of a runtime computes gradients."""
        raise TypeError("GradientWork is computed by a GradientEngine. Write engine.evaluate([work])[0].")

    def ghost(self) -> Gradient:
        """The result in a timing-only run, in which `values` is a `core.node.Ghost`."""
        return Gradient(self.values, loss=0.0, samples=0)


@dataclass(slots=True)
class Gradient:
    """A flat gradient, which its receiver owns, with the mean loss and the number of samples of its batch.

    Gradients of one stack are disjoint views of the same memory; copy a gradient that is kept for long. `buffers` is
    the worker's new snapshot, None for a model without buffers. `for_servers` is the part of the gradient that is not
    in `values`, since servers hold its parameters (`hybrid`). `checked`: the values are known to be finite. `faulty`
    ranks had a gradient that was not finite, and are left out of this mean.
    """

    values: Tensor
    loss: float
    samples: int
    buffers: Tensor | None = None
    for_servers: ServerGradient | None = None
    checked: bool = False
    faulty: Sequence[int] = ()

    def scaled(self, factor: float) -> Gradient:
        """Multiply this gradient by `factor` in place, and return it.

        It is not `checked` any more: scaled gradients are summed over a group, and a sum may overflow.
        """
        self.values *= factor
        self.checked = False
        if self.for_servers is not None:
            for part in (self.for_servers.whole, *(values for _, values in self.for_servers.rows)):
                part *= factor
        return self

    def with_values(self, values: Tensor) -> Gradient:
        """A copy with other `values`, which are not `checked`."""
        return replace(self, values=values, checked=False)


class ServerGradient(NamedTuple):
    """The gradient of the parameters that servers hold in a hybrid run (`GradientEngine.split_off`).

    `rows` has a pair for each table: the ascending numbers (count) of all rows that may differ from zero, and their
    values (count, width). `whole` is the flat gradient of the other parameters that servers hold.
    """

    rows: Sequence[tuple[torch.Tensor, torch.Tensor]]
    whole: torch.Tensor
