"""Trial batches: numbers of samples that a job takes, for measurements whose number of samples nobody has asked for.

Batch norm rejects a batch of one; a loss of pairs or triplets takes multiples of two or three.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from dure.core.user_code import explain_user_errors
from dure.errors import DureError, UsageError
from dure.job.data.structure import called, mapped

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

ROWS = 2
"""Samples of a trial batch, where the job takes so many."""


class _Job(Protocol):
    """The part of a job that decides which batches it takes."""

    @property
    def loss(self) -> Callable[[Any, Any], Tensor]: ...

    @property
    def train(self) -> Any: ...

    @property
    def batch_size(self) -> int: ...


def trial_rows(job: _Job, module: nn.Module) -> int:
    """The number of samples of a trial batch: ROWS, or a mini-batch of a job that does not take ROWS."""
    return ROWS if refusal(job, module, ROWS) is None else job.batch_size


def refusal(job: _Job, module: nn.Module, rows: int) -> str | None:
    """The error of the model or the loss on a batch of `rows` samples; None without one.

    Runs a forward, and one with gradients where that fails: a model may differentiate in its forward. Without them
    the activations of a whole pipeline are not kept. Buffers and random state are left as they were.
    """
    found = _refusal(job, module, rows, gradients=False)
    return found if found is None else _refusal(job, module, rows, gradients=True)


def _refusal(job: _Job, module: nn.Module, rows: int, *, gradients: bool) -> str | None:
    device = next(module.parameters()).device
    buffers = [(each, each.clone()) for each in module.buffers()]
    try:
        with explain_user_errors(f"a batch of {rows} samples raised"), torch.random.fork_rng(devices=[]):
            batch = job.train.batch(torch.arange(rows) % len(job.train))
            inputs, targets = (mapped(lambda each: each.to(device, copy=True), each) for each in batch)
            with torch.set_grad_enabled(gradients):
                job.loss(called(module, inputs), targets)
    except DureError as error:
        return str(error)
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
    return None


def check_graph(loss: Tensor) -> None:
    """Raise `UsageError` for a loss whose gradients `torch.autograd.grad` cannot compute, or not all of them."""
    if "CheckpointFunctionBackward" in _nodes(loss):  # its parameters would have no gradient, or autograd raises
        raise UsageError(
            "its model calls torch.utils.checkpoint with use_reentrant=True, and dure computes gradients by "
            "torch.autograd.grad, with which PyTorch supports use_reentrant=False only. Write "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False): the gradients are the same."
        )


def _nodes(loss: Tensor) -> set[str]:
    """The names of the operations in the graph of `loss`."""
    names, seen, left = set(), set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.add(node.name())
            left += [each for each, _ in node.next_functions]
    return names
