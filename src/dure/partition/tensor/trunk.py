"""A convolutional trunk of which each worker computes some samples, and a dense head of which each has some weights.

    trunk:      each worker, its samples of the mini-batch           weights whole, gradients to be summed
    junction:   activations of the samples of all workers, in rounds
    head:       each worker, its weights                             for the samples of each round

| scheme   | rounds | samples of a round                      |
|----------|--------|-----------------------------------------|
| `gather` | 1      | all                                     |
| `turns`  | W      | those of one worker                     |
| `mixed`  | W      | a share 1 / W of those of each worker   |

The update comes after all rounds, so the schemes give the same result up to rounding. Between the rounds W times less
memory is needed for activations of the head's samples.

Krizhevsky, "One weird trick for parallelizing convolutional neural networks", arXiv 1404.5997, section 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from dure.core.vectors import Ranges, equal_ranges
from dure.errors import UsageError
from dure.partition.tensor.plan import ParameterShard
from dure.partition.tensor.plans import layers_of
from dure.partition.tensor.ways import Ways, collected, gathered, sliced

Scheme = Literal["gather", "turns", "mixed"]


class TrunkAndHead(nn.Sequential):
    """The layers of a sequence at one worker; those before number `cut` are the trunk.

    `parts`: the first layer of the head is split by outputs, so that the gradients of its inputs are to be summed.
    """

    def __init__(self, whole: nn.Sequential, cut: int, scheme: Scheme, ways: Ways, *, parts: bool) -> None:
        super().__init__()
        for name, layer in layers_of(whole):
            self.add_module(name, layer)
        self.cut = cut
        self.scheme = scheme
        self.ways = ways
        self.parts = parts

    def forward(self, inputs: Tensor) -> Tensor:
        own = equal_ranges(len(inputs), self.ways.size)
        if min(stop - start for start, stop in own) < 1:
            raise UsageError(
                f"{self.ways.size} workers share a mini-batch of {len(inputs)} samples: each needs one at least. Raise "
                "the mini-batch's size, or use fewer ways."
            )
        layers = list(self)
        features = sliced(self.ways, inputs, sizes(own), 0)
        for layer in layers[: self.cut]:
            features = layer(features)
        join = collected if self.parts else gathered
        outputs, places = [], []
        for shares in rounds(self.scheme, own):
            start, stop = shares[self.ways.rank]
            first = own[self.ways.rank][0]
            value = join(self.ways, features[start - first : stop - first], sizes(shares), 0)
            for layer in layers[self.cut :]:
                value = layer(value)
            outputs.append(value)
            places += [torch.arange(*share) for share in shares]
        return torch.cat(outputs)[torch.cat(places).argsort().to(inputs.device)]


def rounds(scheme: Scheme, own: Ranges) -> Iterator[Ranges]:
    """For each round, the samples of each worker, as ranges of the mini-batch, of which each has its `own`.

    >>> list(rounds("turns", [(0, 2), (2, 4)]))
    [[(0, 2), (2, 2)], [(0, 0), (2, 4)]]
    >>> list(rounds("mixed", [(0, 2), (2, 4)]))
    [[(0, 1), (2, 3)], [(1, 2), (3, 4)]]
    """
    ways = len(own)
    if scheme == "gather":
        yield own
    elif scheme == "turns":
        for turn, (start, stop) in enumerate(own):
            yield [(start, stop) if rank == turn else (own[rank][0], own[rank][0]) for rank in range(ways)]
    else:
        parts = [[(first + a, first + b) for a, b in equal_ranges(stop - first, ways)] for first, stop in own]
        yield from ([part[number] for part in parts] for number in range(ways))


def sizes(ranges: Ranges) -> list[int]:
    """The number of elements of each range."""
    return [stop - start for start, stop in ranges]


@dataclass(frozen=True, slots=True)
class Junction:
    """The split of a sequence into a trunk, its first `cut` layers, and a head."""

    cut: int
    scheme: Scheme
    parts: bool

    def shards(self, layer: nn.Module, size: int) -> Mapping[str, Sequence[ParameterShard]]:
        return {}

    def split(self, layer: nn.Module, ways: Ways) -> nn.Module:
        assert isinstance(layer, nn.Sequential)
        return TrunkAndHead(layer, self.cut, self.scheme, ways, parts=self.parts)
