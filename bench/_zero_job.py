"""The job of `zero.py`: `char-gpt` in three sizes, named in job texts by this file."""

from __future__ import annotations

import torch

from dure.job.data.dataset import Data
from dure.job.job import Job
from dure.job.models.char_gpt import char_gpt
from dure.job.optimizer import OptimizerSpec

SIZES = {"tiny": (32, 2, 2), "5M": (256, 6, 4), "50M": (512, 16, 8)}
"""Width, layers and heads of the models."""

GRADED = 16
"""Windows of an evaluation, which is no part of what is measured."""


def sized(size: str = "tiny") -> Job:
    """`char-gpt` of that size with AdamW."""
    width, layers, heads = SIZES[size]
    job = char_gpt(width=width, layers=layers, heads=heads)
    test = Data(*job.graded.batch(torch.arange(GRADED)))
    return job.adjusted(test=test, optimizer=OptimizerSpec("adamw", lr=1e-4, weight_decay=0.01))
