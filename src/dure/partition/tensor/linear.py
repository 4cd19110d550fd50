"""Linear layers split over workers: by outputs (column parallel) and by inputs (row parallel).

    Y = X A^T + b                             A: outputs x inputs, as in `torch.nn.Linear`

| split  | a worker holds     | forward                       | backward               |
|--------|--------------------|-------------------------------|------------------------|
| column | rows of A, and of b | Y_i = X A_i^T + b_i           | dX: all-reduce         |
| row    | columns of A, b    | Y: all-reduce of X_i A_i^T, then + b | dX_i: none      |

Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from dure.partition.tensor.operators import copied, gathered, sliced, summed
from dure.partition.tensor.shard import ParameterShard, even_shards
from dure.partition.tensor.ways import Ways


class ColumnLinear(nn.Module):
    """Outputs of a linear layer at one worker. Every worker has the whole input, and with `sizes` gets all outputs."""

    bias: nn.Parameter | None

    def __init__(self, weight: Tensor, bias: Tensor | None, ways: Ways, sizes: Sequence[int] | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias))
        self.ways = ways
        self.sizes = sizes

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = linear(copied(self.ways, inputs), self.weight, self.bias)
        return outputs if self.sizes is None else gathered(self.ways, outputs, self.sizes, -1)


class RowLinear(nn.Module):
    """A linear layer at a worker that has some of the inputs, or with `sizes` takes them from the whole input.

    Every worker gets the whole output.
    """

    bias: nn.Parameter | None

    def __init__(self, weight: Tensor, bias: Tensor | None, ways: Ways, sizes: Sequence[int] | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias))
        self.ways = ways
        self.sizes = sizes

    def forward(self, inputs: Tensor) -> Tensor:
        if self.sizes is not None:
            inputs = sliced(self.ways, inputs, self.sizes, -1)
        total = summed(self.ways, linear(inputs, self.weight))
        return total if self.bias is None else total + self.bias


@dataclass(frozen=True, slots=True)
class Column:
    """A split of a linear layer by outputs; `unit` outputs stay together, as those of a head do.

    `parts`: the outputs consist of so many equal parts that are each split, as queries, keys and values in one layer.
    `gathers`: the outputs of all workers are gathered.
    """

    unit: int = 1
    parts: int = 1
    gathers: bool = False

    def shards(self, layer: nn.Module, size: int) -> Mapping[str, Sequence[ParameterShard]]:
        outputs = layer.get_parameter("weight").shape[0]
        each = even_shards(outputs // self.parts, size, dim=0, unit=self.unit)
        starts = torch.arange(self.parts) * (outputs // self.parts)
        shards = [ParameterShard(0, (starts[:, None] + shard.index).flatten()) for shard in each]
        return {name: shards for name, _ in layer.named_parameters()}

    def split(self, layer: nn.Module, ways: Ways) -> nn.Module:
        shards = self.shards(layer, ways.size)
        sizes = [each.index.numel() for each in shards["weight"]] if self.gathers else None
        return ColumnLinear(*_cut(layer, shards, ways.rank), ways, sizes)


@dataclass(frozen=True, slots=True)
class Row:
    """A split of a linear layer by inputs; `unit` inputs stay together.

    `slices`: every worker has the whole input, and takes its own from it.
    """

    unit: int = 1
    slices: bool = False

    def shards(self, layer: nn.Module, size: int) -> Mapping[str, Sequence[ParameterShard]]:
        return {"weight": even_shards(layer.get_parameter("weight").shape[1], size, dim=1, unit=self.unit)}

    def split(self, layer: nn.Module, ways: Ways) -> nn.Module:
        shards = self.shards(layer, ways.size)
        sizes = [each.index.numel() for each in shards["weight"]] if self.slices else None
        return RowLinear(*_cut(layer, shards, ways.rank), ways, sizes)


def _cut(layer: nn.Module, shards: Mapping[str, Sequence[ParameterShard]], rank: int) -> tuple[Tensor, Tensor | None]:
    """The weight and the bias of a layer at a worker."""
    with torch.no_grad():
        found = {
            name: shards[name][rank].of(each) if name in shards else each for name, each in layer.named_parameters()
        }
    return found["weight"].detach(), found["bias"].detach() if "bias" in found else None
