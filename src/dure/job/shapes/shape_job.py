"""Jobs of shapes: published models on PyTorch's meta device, whose data have no values.

parameter    meaning                                                                      default
batch        samples of a worker in a step                                                32
precision    of matrix products: a key of `PRECISIONS`, which has the type of all values  fp32
accumulate   mini-batches whose gradients a worker sums in a step, of `batch` together    1
recompute    whether backward computes the forward of each block again                    false
optimizer    whose state counts in the memory of a worker                                 sgd
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dure.core.spec_text import names
from dure.errors import UsageError
from dure.job.data.dataset import Data
from dure.job.job import PRECISIONS, Job
from dure.job.optimizer import OptimizerSpec

LENGTH = 100_000
"""Samples of the data set, which has no values."""


class Shapes(NamedTuple):
    """A published model: `sample` and `target` are the shapes of a sample and of what it should give.

    Values of samples are of `dtype`: floating-point ones take the precision of the job. Targets are classes.
    """

    name: str
    network: Callable[[], nn.Module]
    loss: Callable[[Any, Tensor], Tensor]
    sample: tuple[int, ...]
    target: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32

    def job(self, batch: int, precision: str, accumulate: int, recompute: bool, optimizer: str) -> Job:
        """The job with these parameters. Raises `UsageError` for values that it cannot have."""
        if precision not in PRECISIONS:
            raise UsageError(f"{self.name}: precision must be one of {names(PRECISIONS)}, got {precision!r}.")
        if batch > LENGTH:
            raise UsageError(f"{self.name}: batch must be at most {LENGTH:,}, the samples of the job, got {batch:,}.")
        values = PRECISIONS[precision]
        inputs = torch.empty(LENGTH, *self.sample, dtype=self.dtype, device="meta")
        if inputs.is_floating_point():
            inputs = inputs.to(values)
        return Job(
            name=self.name,
            model=ModelOfShapes(self.network, values),
            loss=self.loss,
            train=Data(inputs, torch.empty(LENGTH, *self.target, dtype=torch.int64, device="meta")),
            batch_size=batch,
            accumulate=accumulate,
            precision=precision,
            recompute=recompute,
            optimizer=OptimizerSpec.parse(optimizer),
            steps=10,
            source="shapes of a published model, no values",
        )


def function_of(shapes: Shapes) -> Callable[..., Job]:
    """The function of a job whose model has no parameters of its own."""

    def shaped(
        batch: int = 32, precision: str = "fp32", accumulate: int = 1, recompute: bool = False, optimizer: str = "sgd"
    ) -> Job:
        return shapes.job(batch, precision, accumulate, recompute, optimizer)

    return shaped


class ModelOfShapes:
    """Makes modules of `network` on the meta device: copies of the first, as PyTorch initializes shapes slowly."""

    def __init__(self, network: Callable[[], nn.Module], dtype: torch.dtype) -> None:
        self._network = network
        self._dtype = dtype
        self._first: nn.Module | None = None

    def __call__(self) -> nn.Module:
        """A new module."""
        if self._first is None:
            with torch.device("meta"):
                self._first = self._network().to(self._dtype)
        return copy.deepcopy(self._first)
