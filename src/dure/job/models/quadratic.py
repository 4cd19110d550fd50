"""`quadratic`: a quadratic loss whose minimum is known, for laws and oracles.

    f(w) = mean over samples i of  1/2 (w - t_i)' A (w - t_i)        A = diag(a), a from 1/conditioning to 1

All samples share A, so the minimum of f is exactly the mean of the t_i. Each step of gradient descent multiplies
coordinate j's distance to the minimum by 1 - lr a_j. `noise` is the standard deviation of the t_i; with 0, every
mini-batch has the gradient of f.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from dure.errors import UsageError
from dure.job.data.dataset import Data
from dure.job.job import Job, dtype_named
from dure.job.optimizer import OptimizerSpec


class Point(nn.Module):
    """A point in space, equal for every sample; its initial value is the origin."""

    def __init__(self, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(dim, dtype=dtype))

    def forward(self, inputs: Tensor) -> Tensor:
        """Repeat the point to (batch, dim). Of the inputs (batch, 1), only the batch size matters."""
        return self.place.expand(inputs.shape[0], -1)


def half_square(curvature: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean over the batch of 1/2 (w - t)' diag(curvature) (w - t)."""
    return 0.5 * ((outputs - targets).square() * curvature.to(outputs)).sum(dim=1).mean()


def quadratic(
    dim: int = 100,
    conditioning: float = 10.0,
    noise: float = 0.1,
    samples: int = 1024,
    dtype: str = "float32",
    data_seed: int = 0,
) -> Job:
    """A quadratic loss in `dim` dimensions with curvatures from 1/conditioning to 1, evenly spaced in logarithm."""
    if dim < 1 or samples < 1:
        raise UsageError(f"dim and samples must be at least 1, got {dim} and {samples}.")
    if conditioning < 1 or noise < 0:
        raise UsageError(f"conditioning must be at least 1 and noise at least 0, got {conditioning} and {noise}.")
    rng = np.random.default_rng(data_seed)
    drawn = rng.standard_normal(dim) + noise * rng.standard_normal((samples, dim))
    targets = torch.from_numpy(drawn).to(dtype_named(dtype))
    curvature = torch.from_numpy(np.geomspace(1 / conditioning, 1.0, dim))
    return Job(
        name="quadratic",
        model=partial(Point, dim, targets.dtype),
        loss=partial(half_square, curvature),
        train=Data(torch.zeros(samples, 1, dtype=targets.dtype), targets),
        batch_size=16,
        optimizer=OptimizerSpec(lr=0.5),
        steps=200,
        optimum=targets.double().mean(dim=0).to(targets.dtype),
        source=f"quadratic: {samples:,} targets in {dim:,} dimensions, drawn with seed {data_seed}",
    )
