"""Embeddings split by vocabulary: a worker has the rows of its words, and the sum over the workers has all.

Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3. The shards may be uneven, so the vocabulary needs no
padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from dure.errors import UsageError
from dure.partition.tensor.operators import summed
from dure.partition.tensor.shard import ParameterShard, even_shards
from dure.partition.tensor.ways import Ways


class VocabularyPart(nn.Module):
    """The rows `start` to `stop` of an embedding at one worker. Every worker gets the embeddings of all words."""

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
