"""A model that sleeps instead of computing, for measurements of the network alone.

Forward sleeps a third of the seconds. Backward sleeps the rest, distributed over the layers by their size: the last
layer's gradient is complete first, as in a real backward pass. Gradients are constant.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dure.job.data.dataset import Data
from dure.job.job import Job
from dure.job.optimizer import OptimizerSpec

SLOPE = 1e-3


def synthetic_job(layers: Sequence[int], seconds: float) -> Job:
    """A job whose model has a layer for each number of parameters in `layers`, and whose steps take `seconds`."""
    return Job(
        model=lambda: StandIn(layers, seconds),
        loss=lambda outputs, targets: outputs,
        train=Data(torch.zeros(64, 1), torch.zeros(64)),
        test=Data(torch.zeros(1, 1), torch.zeros(1)),
        batch_size=1,
        optimizer=OptimizerSpec(lr=1e-3),
        split="whole",
        name="stand-in",
    )


def job_file(layers: Sequence[int], seconds: float) -> str:
    """The text of a job file whose function `job` returns `synthetic_job(layers, seconds)`."""
    head = "from dure.planner.probe.synthetic_job import synthetic_job"
    return f"{head}\n\n\ndef job():\n    return synthetic_job({[*layers]}, {seconds})\n"


class StandIn(nn.Module):
    """A layer for each number of parameters in `layers`; forward and backward together take `seconds`."""

    def __init__(self, layers: Sequence[int], seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in layers)

    def forward(self, inputs: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return inputs.mean()  # evaluations take no time
        time.sleep(self.seconds / 3)
        total = sum(layer.numel() for layer in self.layers)
        carried = inputs.mean()
        for layer in self.layers:
            seconds = self.seconds * 2 / 3 * layer.numel() / total
            carried = _Layer.apply(carried, layer, seconds)  # type: ignore[no-untyped-call]
        return carried


class _Layer(torch.autograd.Function):
    """The identity; its backward pass takes `seconds`."""

    @staticmethod
    def forward(ctx: Any, carried: Tensor, layer: Tensor, seconds: float) -> Tensor:
        ctx.seconds, ctx.shape = seconds, layer.shape
        return carried.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], torch.full(ctx.shape, SLOPE), None
