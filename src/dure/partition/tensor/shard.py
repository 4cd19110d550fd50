"""The place of a worker's part of a parameter in the whole parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dure.core.ranges import equal_ranges


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """The entries `index` of a parameter along the dimension `dim`, in this order."""

    dim: int
    index: Tensor

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The shape of the part of a tensor of the shape `whole`."""
        return (*whole[: self.dim], self.index.numel(), *whole[self.dim + 1 :])

    def of(self, whole: Tensor) -> Tensor:
        """The part of a whole tensor; a copy."""
        return whole.index_select(self.dim, self.index.to(whole.device))

    def put(self, whole: Tensor, part: Tensor) -> None:
        """Set the entries of this shard in `whole`, in place."""
        whole.index_copy_(self.dim, self.index.to(whole.device), part.to(whole.device))


def even_shards(length: int, size: int, dim: int, unit: int = 1) -> list[ParameterShard]:
    """Consecutive shards of a dimension of `length` entries for `size` workers, as even as whole units allow.

    >>> [each.index.tolist() for each in even_shards(10, 2, dim=0, unit=2)]
    [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]
    """
    ranges = equal_ranges(length // unit, size)
    return [ParameterShard(dim, torch.arange(start * unit, stop * unit)) for start, stop in ranges]
