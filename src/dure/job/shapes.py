"""Jobs of shapes without values: model and data are on PyTorch's meta device, where computations take no time.

Operations, sizes and activations are those of the job itself, so that a plan can treat models that are too large for
the memory of this machine. Products of attention are counted, which PyTorch's counter leaves out on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from dure.job.data.dataset import Data
from dure.job.data.structure import mapped
from dure.job.job import Job


def numel_of(job: Job) -> int:
    """The trainable parameters of a job's model, which is not held in memory. Raises as `shapes_of`."""
    return sum(each.numel() for each in _on_meta(job.model).parameters() if each.requires_grad)


def shapes_of(job: Job) -> Job:
    """`job` with shapes and no values, for timing-only runs.

    Raises `RuntimeError` for a model that cannot be built on the meta device, `UsageError` if it cannot be computed.
    """
    inputs, targets = job.train.batch(torch.arange(2) % len(job.train))
    samples = len(job.train)

    def rows(each: Tensor) -> Tensor:
        return torch.empty(samples, *each.shape[1:], dtype=each.dtype, device="meta")

    data = Data(mapped(rows, inputs), mapped(rows, targets))
    found = replace(job, model=partial(_on_meta, job.model), train=data, test=None)
    _ = found.flops_per_sample
    return found


def _on_meta(model: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return model()
