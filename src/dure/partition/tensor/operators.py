"""Operators of split layers: functions of tensors whose forward or backward has a collective over `Ways`.

| operator   | forward               | backward              | Megatron-LM          |
|------------|-----------------------|-----------------------|----------------------|
| `copied`   | the tensor            | all-reduce            | f                    |
| `summed`   | all-reduce            | the gradient          | g                    |

Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from dure.partition.tensor.ways import Ways


class _Copied(Function):
    @staticmethod
    def forward(ctx: Any, ways: Ways, tensor: Tensor) -> Tensor:
        ctx.ways = ways
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, ctx.ways.all_reduce(gradients[0])


class _Summed(Function):
    @staticmethod
    def forward(ctx: Any, ways: Ways, tensor: Tensor) -> Tensor:
        return ways.all_reduce(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, gradients[0]


def copied(ways: Ways, tensor: Tensor) -> Tensor:
    """The tensor, which all workers have; its gradient is the sum of theirs.

    Layers that read the same tensor one after another share one copy, and so one all-reduce of its gradient.
    """
    found = ways.copy_of(tensor)
    if found is None:
        found = _Copied.apply(ways, tensor)  # type: ignore[no-untyped-call]
        ways.keep_copy(tensor, found)
    ways.enter()
    return found


def summed(ways: Ways, tensor: Tensor) -> Tensor:
    """The sum of the workers' tensors, which all workers have."""
    ways.leave()
    found: Tensor = _Summed.apply(ways, tensor)  # type: ignore[no-untyped-call]
    return found
