"""The initial model of a job, equal on every node of a run; and jobs of shapes without values.

Model and data of a job of shapes are on PyTorch's meta device, where computations take no time. Operations, sizes and
activations are those of the job itself, so that a plan can treat models that are too large for the memory of this
machine. Products of attention are counted, which PyTorch's counter leaves out on a CPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dure.core.node import Ghost
from dure.core.step_shape import StepShape
from dure.core.user_code import explain_user_errors
from dure.errors import ReplicaError, UsageError
from dure.job.data.dataset import Data, mapped
from dure.job.job import Job
from dure.job.rates import Rates, rates_of, schedule_of
from dure.job.replica import Replica

WITHOUT_VALUES = (
    "its model has shapes and no values, as it is on PyTorch's meta device. Train it in virtual time with "
    "--timing-only (timing_only=True)."
)

PLANNED = (
    "Job.accumulate, Job.precision and Job.recompute are for plans and timing-only runs (--timing-only): leave them "
    "out here. A pipeline with remat=true, as in gpipe:stages=2,remat=true, computes forwards again in real runs, too."
)


class InitialModel:
    """Initial values of a job's model, drawn from `seed`, on `device`.

    The values are drawn on the CPU, so that they are equal on every device. In a timing-only run a `Ghost` stands for
    each vector.
    """

    def __init__(self, job: Job, seed: int, *, timing_only: bool = False, device: str = "cpu") -> None:
        self._job = job
        self._seed = seed
        self._timing_only = timing_only
        self._device = device
        self.step_shapes: dict[object, StepShape] = {}
        """The shapes of this job's steps, by what they depend on; a plan's timings share them."""
        self.code_rates: dict[tuple[str, float], float] = {}
        """Bytes per value that codecs, at a scale of the values, send of this job's gradients; for timing-only runs."""

    @cached_property
    def replica(self) -> Replica:
        """A replica with the initial values. Raises `UsageError` for a model that cannot be one."""
        try:
            module = self._job.build(self._seed)
            if not self._timing_only and any(each.is_meta for each in module.parameters()):
                raise UsageError(WITHOUT_VALUES)
            if not self._timing_only and (self._job.accumulate > 1 or self._job.precision or self._job.recompute):
                raise UsageError(PLANNED)
            return Replica(module if self._timing_only else module.to(self._device))  # it may be on the meta device
        except (ReplicaError, UsageError) as error:
            raise UsageError(f"{self._job.name or 'the job'}: {error}") from error.__cause__ or error

    @property
    def params(self) -> Any:
        """A copy of the initial parameters, flat."""
        return self._ghost if self._timing_only else self.replica.params.detach().clone()

    def release(self) -> None:
        """Free the memory of the initial values, in a process that has taken a copy; shapes stay."""
        self.replica.drop_values()

    @cached_property
    def _ghost(self) -> Ghost:
        # A ghost never changes, so all workers share one.
        return Ghost(self.replica.numel, self.replica.params.element_size())

    @property
    def buffers(self) -> Any:
        """Initial buffers, flat; None if the model has no buffers that training changes."""
        buffers = self.replica.buffers_flat()
        if not buffers.numel():
            return None
        return Ghost(buffers.numel(), buffers.element_size()) if self._timing_only else buffers

    @cached_property
    def rates(self) -> Rates:
        """The job's optimizer with its parameter groups and schedule. Raises `UsageError` for invalid groups."""
        job, replica = self._job, self.replica
        return rates_of(job.optimizer, job.groups, schedule_of(job.schedule), replica.layers, replica.parameters)

    def merge_buffers(self, snapshots: Sequence[torch.Tensor], weights: Sequence[int] | None) -> torch.Tensor:
        """Merge the buffers of several workers: means by `weights` (equal ones if None), counts by their maximum."""
        if isinstance(snapshots[0], Ghost):
            return snapshots[0]
        return self.replica.merge_buffers(snapshots, weights)


def is_on_meta(job: Job) -> bool:
    """Whether a job's data has shapes and no values: it is on PyTorch's meta device."""
    with explain_user_errors("reading its first sample raised"):
        inputs, _ = job.train.batch(torch.arange(1))
    return any(isinstance(each, torch.Tensor) and each.is_meta for each in tree_leaves(inputs))


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
    found = replace(job, model=_copies(job.model), train=data, test=None)
    _ = found.flops_per_sample
    return found


def _copies(model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Makes models of shapes: copies of one, as PyTorch initializes shapes slowly.

    Functions that a module holds could use the copied module itself, so such a model is built anew.
    """
    first = _on_meta(model)
    held = (value for part in first.modules() for value in vars(part).values())
    functions = any(isinstance(value, FunctionType) for value in held)
    hooks = any(value for part in first.modules() for name, value in vars(part).items() if name.endswith("_hooks"))
    if not functions and not hooks:
        with suppress(RuntimeError, TypeError):  # PyTorch copies no results of operations, such as normed weights
            _ = copy.deepcopy(first)
            return partial(copy.deepcopy, first)
    return partial(_on_meta, model)


def _on_meta(model: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return model()
