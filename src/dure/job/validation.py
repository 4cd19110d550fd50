"""Preflight of a job: before a run starts, one training step with the smallest and the largest batch, one evaluation.

An error of the job is thus reported in one sentence, the same in every runtime. Without a preflight a simulation would
meet the error while it computes many gradients at once, and a real run would meet it in a worker process.

The preflight does not affect the run that follows, bit for bit: it builds a model of its own, reads the first samples
of the data, and restores the random generators of PyTorch, NumPy and Python.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from dure.core.user_code import explain_user_errors
from dure.errors import ReplicaError, UsageError
from dure.job.data.dataset import Data, called, described, tensors
from dure.job.job import check_graph
from dure.job.replica import Replica

if TYPE_CHECKING:
    from dure.job.data.dataset import Batch, DataSet
    from dure.job.job import Job


def validate_job(job: Job, name: str, *, rows: int, fewest: int | None = None, seed: int = 0) -> None:
    """Compute a gradient and a grade of `job` on `rows` samples, once. Errors call the job `name`.

    If some workers have smaller batches, `fewest` is the size of the smallest, and a gradient on it is computed too:
    batch norm rejects a batch of one.

    Raises `UsageError`, naming the job, if its model, loss, accuracy or data are invalid.
    """
    with _named(name), torch.random.fork_rng(devices=[]), _restoring_generators():
        torch.default_generator.manual_seed(seed)  # the outcome does not depend on earlier draws
        module = _model(job, seed)
        for size in dict.fromkeys((rows, fewest or rows)):
            inputs, targets = _first(job.train, size)
            with _smaller(size, rows), torch.enable_grad():
                _differentiate(module, _loss(job, _outputs(module, inputs), targets))
        batch = _first(job.graded, rows)
        try:
            with torch.no_grad():
                _grade(job, module.eval(), *batch)
        except UsageError:
            with torch.enable_grad():  # a loss may contain a gradient
                _grade(job, module.eval(), *batch)


def _grade(job: Job, module: nn.Module, inputs: Batch, targets: Batch) -> None:
    outputs = _outputs(module, inputs)
    _loss(job, outputs, targets)
    _check_accuracy(job, outputs, targets)


def try_to_count(job: Job, name: str) -> None:
    """Preflight of a run without values: build the model and count its operations. Raises as `validate_job`."""
    with _named(name):
        _model(job, 0)
        _ = job.flops_per_sample


@contextmanager
def _restoring_generators() -> Iterator[None]:
    """Restore the global generators of NumPy and Python at the end of the block."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)


@contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from error.__cause__


@contextmanager
def _smaller(size: int, largest: int) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        if size == largest:
            raise
        raise UsageError(
            f"{error} A batch of {largest} samples works, and the smallest of this run has {size}: give larger batch "
            "sizes."
        ) from error.__cause__


def _first(data: DataSet, rows: int) -> tuple[Batch, Batch]:
    if isinstance(data, Data):
        _check_place("its samples lie", [*tensors(data.inputs), *tensors(data.targets)])
    with explain_user_errors("reading its first samples raised"):
        inputs, targets = data.batch(torch.arange(rows) % len(data))
    _check_place("its samples lie", [*tensors(inputs), *tensors(targets)])
    return inputs, targets


def _check_place(what: str, values: Sequence[Tensor]) -> None:
    """Raise `UsageError` for a job with tensors on an accelerator: runs move replicas and batches there."""
    device = next((each.device for each in values if each.device.type not in ("cpu", "meta")), None)
    if device is not None:
        raise UsageError(
            f"{what} on {device}. Leave a job on the CPU: --device {device.type} moves replicas and batches there."
        )


def _model(job: Job, seed: int) -> nn.Module:
    module = job.build(seed)
    _check_place("its model() builds", [*module.parameters(), *module.buffers()])
    try:
        Replica(module)
    except ReplicaError as error:
        raise UsageError(str(error)) from error
    return module


def _outputs(module: nn.Module, inputs: Batch) -> Any:
    dtype = next(each.dtype for each in module.parameters() if each.requires_grad)
    right = ""
    if any(each.is_floating_point() and each.dtype != dtype for each in tensors(inputs)):
        right = f" with parameters of {dtype}, although both need one dtype (as --dtype float32 makes them)"
    how = "" if isinstance(inputs, Tensor) else f" as model({'**' if isinstance(inputs, dict) else '*'}inputs)"
    with explain_user_errors(f"its model must take a batch of inputs {described(inputs)}{how}{right}, and raised"):
        return called(module, inputs)


def _loss(job: Job, outputs: Any, targets: Batch) -> Tensor:
    with explain_user_errors(
        f"its loss must take outputs {described(outputs)} and targets {described(targets)}, and raised"
    ):
        loss = job.loss(outputs, targets)
    write = "Write loss=lambda outputs, targets: (...).mean()."
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"a job's loss must be a tensor of one number, the mean over the batch; got {loss!r:.80}. {write}"
        )
    if loss.numel() != 1:
        raise UsageError(
            f"a job's loss must be one number, the mean over the batch; got shape {tuple(loss.shape)}. {write}"
        )
    return loss


def _differentiate(module: nn.Module, loss: Tensor) -> None:
    if not loss.requires_grad:
        raise UsageError(
            "a job's loss must be computed from the model's outputs by operations that have gradients, and this one "
            "has none. Leave out .detach(), .item(), argmax and torch.no_grad()."
        )
    check_graph(loss)
    parameters = [each for each in module.parameters() if each.requires_grad]
    with explain_user_errors("the backward pass of its loss raised"):
        torch.autograd.grad(loss.reshape(()), parameters, allow_unused=True)


def _check_accuracy(job: Job, outputs: Any, targets: Batch) -> None:
    if job.accuracy is None:
        return
    with explain_user_errors(
        f"its accuracy must take outputs {described(outputs)} and targets {described(targets)}, and raised"
    ):
        accuracy: Any = job.accuracy(outputs, targets)
    write = "Write accuracy=lambda outputs, targets: (outputs.argmax(-1) == targets).float().mean()."
    if not isinstance(accuracy, float | int) and not (isinstance(accuracy, Tensor) and accuracy.numel() == 1):
        raise UsageError(
            f"a job's accuracy must be one number, the share of right answers; got {accuracy!r:.80}. {write}"
        )
    if not -1e-6 <= float(accuracy) <= 1 + 1e-6:
        raise UsageError(
            f"a job's accuracy must be the share of right answers, from 0 to 1; got {float(accuracy):g}. {write}"
        )
