"""`digits-mlp`: one hidden layer on handwritten digits, which are part of the package. Needs no download."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.nn.functional import cross_entropy

from dure.job.data.digits import load_digits
from dure.job.job import Job
from dure.job.models.mlp import deep_mlp_maker, top1
from dure.job.optimizer import OptimizerSpec


def digits_mlp(hidden: int = 64, depth: int = 1) -> Job:
    """A job with 64 pixels, `depth` hidden layers of `hidden` units, and 10 classes."""
    return digits_job("digits-mlp", deep_mlp_maker(64, hidden, depth, 10))


def digits_job(name: str, model: Callable[[], nn.Module]) -> Job:
    """A job of a classifier of 64 pixels."""
    data = load_digits()
    return Job(
        name=name,
        model=model,
        loss=cross_entropy,
        train=data.train,
        test=data.test,
        batch_size=32,
        optimizer=OptimizerSpec(lr=0.1),
        steps=300,
        accuracy=top1,
        source=data.source,
    )
