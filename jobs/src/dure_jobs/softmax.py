"""`softmax-regression`: a convex problem whose optimum is finite, for methods that promise high precision.

Inputs are normal. Labels are drawn from the softmax of a random linear map, so no map separates them. The test data are
the training data: the test loss is the function that is minimized.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dure.errors import UsageError
from dure.job.data.dataset import Data
from dure.job.job import Job, dtype_named
from dure.job.models.mlp import top1
from dure.job.optimizer import OptimizerSpec


def softmax_regression(
    dim: int = 20, classes: int = 4, samples: int = 500, dtype: str = "float64", data_seed: int = 0
) -> Job:
    """A linear map from `dim` inputs to `classes` scores."""
    if dim < 1 or classes < 2 or samples < 1:
        raise UsageError(f"give dim >= 1, classes >= 2 and samples >= 1, got {dim}, {classes} and {samples}.")
    generator = torch.Generator().manual_seed(data_seed)
    inputs = torch.randn(samples, dim, dtype=torch.float64, generator=generator)
    scores = inputs @ torch.randn(dim, classes, dtype=torch.float64, generator=generator) / dim**0.5
    labels = torch.multinomial(scores.softmax(dim=1), 1, generator=generator).squeeze(1)
    data = Data(inputs.to(dtype_named(dtype)), labels)
    return Job(
        name="softmax-regression",
        model=partial(nn.Linear, dim, classes, dtype=dtype_named(dtype)),
        loss=cross_entropy,
        train=data,
        test=data,
        batch_size=4,
        optimizer=OptimizerSpec(lr=0.1),
        steps=500,
        accuracy=top1,
        source=f"softmax-regression: {samples:,} samples in {dim:,} dimensions, drawn with seed {data_seed}",
    )
