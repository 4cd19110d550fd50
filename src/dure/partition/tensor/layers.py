"""Layers that several workers share: linear layers and convolutions, embeddings, and losses split by vocabulary.

    Y = X A^T + b                 A: outputs x inputs, as in `torch.nn.Linear`; for convolutions both are channels

| split  | a worker holds        | forward                              | backward        |
|--------|-----------------------|--------------------------------------|-----------------|
| column | rows of A, and of b   | Y_i = X A_i^T + b_i                  | dX: all-reduce  |
| row    | columns of A, all of b | Y: all-reduce of X_i A_i^T, then + b | dX_i: no message |

Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3. Filters of convolutions are split in the same way, as Yadan
et al., "Multi-GPU Training of ConvNets", arXiv 1312.5853, do beside data parallelism.

An embedding is split by rows (`Vocabulary`). The shards may be uneven, so the vocabulary needs no padding.

A loss is split by vocabulary (`split_cross_entropy`). Of `positions` of a text and V words, gathering the logits would
send positions x V elements. This sends three for each position: its largest logit, the sum of exponentials, and the
logit of its target.

    loss = log(sum_j exp(z_j - m)) + m - z_target          m: the largest logit; sums and maxima over all workers
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import embedding, linear

from dure.core.vectors import equal_ranges
from dure.errors import UsageError
from dure.partition.tensor.plan import ParameterShard, even_shards
from dure.partition.tensor.ways import Ways, copied, gathered, sliced, summed

Apply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A layer as a function of inputs, weight and bias."""

Change = Callable[[Ways, Tensor], Tensor]
"""An operator on a tensor over the workers that share a layer."""

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class LayerPart(nn.Module):
    """A part of a linear layer or a convolution at one worker. `change` is its operator over the workers."""

    bias: nn.Parameter | None

    def __init__(
        self,
        layer: nn.Module,
        weight: Tensor,
        bias: Tensor | None,
        ways: Ways,
        sizes: Sequence[int] | None,
        change: Change,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias))
        self.ways = ways
        self.sizes = sizes
        self.change = change
        self._apply_layer = function_of(layer)
        self._dim = channels_of(layer)


class ColumnPart(LayerPart):
    """Outputs of a layer, of the input that `change` gives. With `sizes` every worker gets all outputs."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self._apply_layer(self.change(self.ways, inputs), self.weight, self.bias)
        return outputs if self.sizes is None else gathered(self.ways, outputs, self.sizes, self._dim)


class RowPart(LayerPart):
    """A layer on some of the inputs, which with `sizes` it takes from the whole input.

    `change` makes the output of the workers' sums.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        if self.sizes is not None:
            inputs = sliced(self.ways, inputs, self.sizes, self._dim)
        total = self.change(self.ways, self._apply_layer(inputs, self.weight, None))
        return total if self.bias is None else total + self.bias.view(-1, *[1] * (-1 - self._dim))


@dataclass(frozen=True, slots=True)
class Column:
    """A split of a layer by outputs; `unit` outputs stay together, as those of a head do.

    `parts`: the outputs consist of so many equal parts that are each split, as queries, keys and values in one layer.
    `gathers`: the outputs of all workers are gathered. `reads`: the operator on the input.
    """

    unit: int = 1
    parts: int = 1
    gathers: bool = False
    reads: Change = copied

    def shards(self, layer: nn.Module, size: int) -> Mapping[str, Sequence[ParameterShard]]:
        outputs = layer.get_parameter("weight").shape[0]
        each = even_shards(outputs // self.parts, size, dim=0, unit=self.unit)
        starts = torch.arange(self.parts) * (outputs // self.parts)
        shards = [ParameterShard(0, (starts[:, None] + shard.index).flatten()) for shard in each]
        return {name: shards for name, _ in layer.named_parameters()}

    def split(self, layer: nn.Module, ways: Ways) -> nn.Module:
        shards = self.shards(layer, ways.size)
        sizes = [each.index.numel() for each in shards["weight"]] if self.gathers else None
        return ColumnPart(layer, *_cut(layer, shards, ways.rank), ways, sizes, self.reads)


@dataclass(frozen=True, slots=True)
class Row:
    """A split of a layer by inputs; `unit` inputs stay together.

    `slices`: every worker has the whole input, and takes its own from it. `joins`: the operator on the output.
    """

    unit: int = 1
    slices: bool = False
    joins: Change = summed

    def shards(self, layer: nn.Module, size: int) -> Mapping[str, Sequence[ParameterShard]]:
        return {"weight": even_shards(layer.get_parameter("weight").shape[1], size, dim=1, unit=self.unit)}

    def split(self, layer: nn.Module, ways: Ways) -> nn.Module:
        shards = self.shards(layer, ways.size)
        sizes = [each.index.numel() for each in shards["weight"]] if self.slices else None
        return RowPart(layer, *_cut(layer, shards, ways.rank), ways, sizes, self.joins)


@dataclass(frozen=True, slots=True)
class ByChannel:
    """A split of batch norm by channels, between layers that are split: parameters, and buffers of as many elements."""

    def shards(self, layer: nn.Module, size: int) -> Mapping[str, Sequence[ParameterShard]]:
        assert isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
        shards = even_shards(layer.num_features, size, dim=0)
        tensors = (*layer.named_parameters(), *layer.named_buffers())
        return {name: shards for name, each in tensors if each.dim() == 1}

    def split(self, layer: nn.Module, ways: Ways) -> nn.Module:
        part, shards = bare(layer), self.shards(layer, ways.size)
        for name, parameter in layer.named_parameters():
            part._parameters[name] = nn.Parameter(shards[name][ways.rank].of(parameter.detach()))
        for name, buffer in layer.named_buffers():
            part._buffers[name] = shards[name][ways.rank].of(buffer) if name in shards else buffer.clone()
        return part


def unchanged(ways: Ways, tensor: Tensor) -> Tensor:
    """The tensor: the operator before the layer sums the gradients of its inputs."""
    return tensor


def is_splittable(layer: nn.Module) -> bool:
    """Whether a layer can be split by outputs and by inputs."""
    return type(layer) is nn.Linear or (type(layer) in CONVOLUTIONS and getattr(layer, "groups", 0) == 1)


def function_of(layer: nn.Module) -> Apply:
    """A linear layer or a convolution as a function, which keeps none of its parameters."""
    return linear if isinstance(layer, nn.Linear) else partial(_convolved, bare(layer))


def channels_of(layer: nn.Module) -> int:
    """The dimension of inputs and outputs in the tensors of a layer, counted from the last."""
    return -1 if isinstance(layer, nn.Linear) else -1 - len(layer.kernel_size)  # type: ignore[arg-type]


def bare(layer: nn.Module) -> nn.Module:
    """A layer with the settings of another, without parameters and buffers."""
    found = copy(layer)
    found._parameters = dict.fromkeys(layer._parameters)
    found._buffers = dict.fromkeys(layer._buffers)
    return found


def _convolved(layer: nn.Module, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    found: Tensor = layer._conv_forward(inputs, weight, bias)  # type: ignore[operator]
    return found


def _cut(layer: nn.Module, shards: Mapping[str, Sequence[ParameterShard]], rank: int) -> tuple[Tensor, Tensor | None]:
    """The weight and the bias of a layer at a worker."""
    with torch.no_grad():
        found = {
            name: shards[name][rank].of(each) if name in shards else each for name, each in layer.named_parameters()
        }
    return found["weight"].detach(), found["bias"].detach() if "bias" in found else None


class VocabularyPart(nn.Module):
    """The rows of an embedding from `start` on, at one worker. Every worker gets the embeddings of all words."""

    def __init__(self, weight: Tensor, start: int, padding: int | None, ways: Ways) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.start = start
        self.padding = padding
        self.ways = ways

    def forward(self, words: Tensor) -> Tensor:
        own = words - self.start
        known = (own >= 0) & (own < self.weight.shape[0])
        padding = None if self.padding is None else self.padding - self.start
        if padding is not None and not 0 <= padding < self.weight.shape[0]:
            padding = None
        found = embedding(own.where(known, torch.zeros_like(own)), self.weight, padding)
        return summed(self.ways, found * known.unsqueeze(-1))


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A split of an `nn.Embedding` by rows."""

    def shards(self, layer: nn.Module, size: int) -> Mapping[str, Sequence[ParameterShard]]:
        return {"weight": even_shards(layer.get_parameter("weight").shape[0], size, dim=0)}

    def split(self, layer: nn.Module, ways: Ways) -> nn.Module:
        assert isinstance(layer, nn.Embedding)
        if layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
            raise UsageError(
                "an embedding with max_norm, scale_grad_by_freq or sparse cannot be split by vocabulary: build it "
                "without them, or leave it whole."
            )
        shard = self.shards(layer, ways.size)["weight"][ways.rank]
        weight = shard.of(layer.weight.detach())
        return VocabularyPart(weight, int(shard.index[0]), layer.padding_idx, ways)


IGNORED = -100
"""The target of positions without a loss, as in `torch.nn.functional.cross_entropy`."""


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, ways: Ways, logits: Tensor, targets: Tensor, start: int) -> Tensor:
        each = ways.all_gather(logits.amax(dim=1), [targets.shape] * ways.size)
        largest = torch.stack(each).amax(dim=0)
        exponentials = (logits - largest[:, None]).exp()
        own = targets - start
        here = (own >= 0) & (own < logits.shape[1])
        place = own.where(here, torch.zeros_like(own))[:, None]
        found = logits.gather(1, place)[:, 0] * here
        total, found = ways.all_reduce(torch.stack([exponentials.sum(dim=1), found]))
        kept = targets != IGNORED
        losses = (total.log() + largest - found) * kept
        count = kept.sum()
        ctx.save_for_backward(exponentials / total[:, None], place, here, kept, count)
        mean: Tensor = losses.sum() / count
        return mean

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        softmax, place, here, kept, count = ctx.saved_tensors
        gradient = softmax.clone()
        gradient.scatter_add_(1, place, -here.to(gradient.dtype)[:, None])
        gradient *= (kept * (gradients[0] / count))[:, None]
        return None, gradient, None, None


def split_cross_entropy(ways: Ways, logits: Tensor, targets: Tensor, words: int) -> Tensor:
    """The mean cross-entropy of `words` classes, of which each worker has the logits of an even range.

    `logits` are (..., own words), `targets` (...) of whole numbers; those that are -100 do not count.
    """
    ways.leave()
    start = equal_ranges(words, ways.size)[ways.rank][0]
    flat, wanted = logits.flatten(0, -2), targets.flatten()
    found: Tensor = _CrossEntropy.apply(ways, flat, wanted, start)  # type: ignore[no-untyped-call]
    return found
