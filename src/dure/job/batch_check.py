"""Check of stacked gradients: the bits of a gradient must not depend on the other works of its stack."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dure.core.user_code import explain_user_errors
from dure.errors import DureError
from dure.job.batched_gradients import Stacked, present
from dure.job.data.structure import mapped

if TYPE_CHECKING:
    from dure.job.gradient import Gradient, GradientWork

_TRIAL = 64
"""Gradients in the largest stack that the check tries."""


def find_fault(
    stacked: Stacked, work: GradientWork, most: int, alone: Callable[[GradientWork], Gradient]
) -> str | None:
    """The reason not to compute works of the shapes of `work` by `stacked`; None if there is none.

    The check computes the same works in stacks of several sizes and orders, whose bits must be equal. It computes two
    of them by `alone` too, whose result must agree to about half of the dtype's digits.
    """
    trial = [_variant(work, shift) for shift in range(min(most, _TRIAL))]
    try:
        with warnings.catch_warnings(), explain_user_errors("a stack raised"):
            warnings.simplefilter("error", UserWarning)  # vmap warns if it falls back to a loop
            values, losses = stacked.evaluate(trial)
    except DureError as error:  # code of the user that computes one at a time may raise anything on a stack
        return str(error.__cause__ or error).strip().split("\n")[0]
    for stack in _stacks(len(trial), stacked.fewest):
        again, again_losses = stacked.evaluate([trial[index] for index in stack])
        if not (_same_bits(again, values[stack]) and _same_bits(again_losses, losses[stack])):
            return f"bits depend on the company, here of {len(stack)}"
    for index in (0, len(trial) - 1):
        reference = alone(trial[index]).values
        error_size = (values[index] - reference).norm()
        if reference.isfinite().all() and not error_size <= torch.finfo(reference.dtype).eps ** 0.5 * reference.norm():
            return f"the gradient differs from the one computed alone by {float(error_size):.2g}"
    return None


def _stacks(count: int, fewest: int) -> Iterator[list[int]]:
    """The stacks to compare: indices of works, in several numbers and orders."""
    everyone = list(range(count))
    yield everyone[::-1]
    for size in (1, 2, 3, fewest, count // 2 + 1, count - 1):
        if fewest <= size <= count:
            yield everyone[-size:]
            yield everyone[:size][::-1]


def _variant(work: GradientWork, shift: int) -> GradientWork:
    """A work of the same shapes with other values."""
    return dataclasses.replace(
        work,
        values=work.values.roll(shift),
        inputs=mapped(lambda each: each.roll(shift, 0), present(work.inputs)),
        targets=mapped(lambda each: each.roll(shift + 1 if shift else 0, 0), present(work.targets)),
    )


def _same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
