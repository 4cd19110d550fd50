"""Operators of split layers: functions of tensors whose forward or backward has a collective over `Ways`.

| operator    | forward        | backward       | the next operations are              | name in the papers      |
|-------------|----------------|----------------|--------------------------------------|-------------------------|
| `copied`    | the tensor     | all-reduce     | parts, one at each worker            | f                       |
| `summed`    | all-reduce     | the gradient   | the same at all workers              | g                       |
| `gathered`  | all-gather     | own slice      | the same at all workers              |                         |
| `sliced`    | own slice      | all-gather     | parts, one at each worker            |                         |
| `collected` | all-gather     | reduce-scatter | parts, one at each worker            | g, sequence parallel    |
| `scattered` | reduce-scatter | all-gather     | the same for all slices              | g-bar, likewise         |

Slices are along one dimension, of given `sizes`. Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3;
Korthikanti et al., "Reducing Activation Recomputation", arXiv 2205.05198, section 4.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from dure.partition.tensor.ways import Ways

OnSlices = Callable[[Ways, Tensor, Sequence[int], int], Tensor]
"""A function of the ways, a tensor, and the sizes of the slices of a dimension."""


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


class _Across(Function):
    """An operator on slices of one dimension: `there` is its forward, `back` its backward."""

    @staticmethod
    def forward(
        ctx: Any, there: OnSlices, back: OnSlices, ways: Ways, tensor: Tensor, sizes: Sequence[int], dim: int
    ) -> Tensor:
        ctx.back, ctx.ways, ctx.sizes, ctx.dim = back, ways, sizes, dim
        return there(ways, tensor, sizes, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, None, ctx.back(ctx.ways, gradients[0], ctx.sizes, ctx.dim), None, None


def _own(ways: Ways, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
    """The slice of this worker."""
    return torch.split(tensor, list(sizes), dim)[ways.rank].contiguous()


def _sum(ways: Ways, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
    """The slice of this worker in the sum over all."""
    return ways.reduce_scatter(torch.split(tensor, list(sizes), dim))


def _all(ways: Ways, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
    """The slices of all workers, joined."""
    dim %= tensor.dim()
    shapes = [torch.Size((*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])) for size in sizes]
    return torch.cat(ways.all_gather(tensor, shapes), dim)


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


def gathered(ways: Ways, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
    """The workers' slices joined, for operations that all workers repeat."""
    ways.leave()
    found: Tensor = _Across.apply(_all, _own, ways, tensor, sizes, dim)  # type: ignore[no-untyped-call]
    return found


def sliced(ways: Ways, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
    """This worker's slice of a tensor that all workers have."""
    found: Tensor = _Across.apply(_own, _all, ways, tensor, sizes, dim)  # type: ignore[no-untyped-call]
    ways.enter()
    return found


def collected(ways: Ways, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
    """The workers' slices joined, for operations of which each worker computes a part."""
    ways.leave()
    found: Tensor = _Across.apply(_all, _sum, ways, tensor, sizes, dim)  # type: ignore[no-untyped-call]
    ways.enter()
    return found


def scattered(ways: Ways, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
    """This worker's slice of the sum of the workers' tensors."""
    ways.leave()
    found: Tensor = _Across.apply(_sum, _all, ways, tensor, sizes, dim)  # type: ignore[no-untyped-call]
    ways.enter()
    return found
