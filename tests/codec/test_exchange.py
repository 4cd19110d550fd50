"""The exchange of encoded values: the random numbers of its two encodings."""

from dataclasses import dataclass

import torch

from dure.codec.base import Codec
from dure.codec.coder import SliceLayout
from dure.codec.exchange import Owner


class QuarterCoder:
    """Sends a random quarter of the values, four times as large; a mean over many messages is exact."""

    def __init__(self, numel, seed):
        self.numel = numel
        self.random = torch.Generator().manual_seed(seed)

    def values(self, encoded):
        return encoded.view(torch.float32)

    def encode(self, values):
        mask = torch.rand(self.numel, generator=self.random) < 0.25
        return (4 * values * mask).view(torch.uint8)

    def decode(self, encoded, out):
        out.copy_(self.values(encoded))

    def zeros(self, like):
        return torch.zeros(self.numel)

    def accumulate(self, encoded, into, share):
        into.add_(self.values(encoded), alpha=share)

    def verdict(self, mean):
        return self.encode(mean)


@dataclass(frozen=True)
class Quarter(Codec):
    def coder(self, layout, seed=0):
        return QuarterCoder(layout.numel, seed)


def test_the_mean_of_randomly_encoded_values_is_unbiased_after_both_encodings():
    """With the random numbers of worker 0, the second encoding would keep what worker 0 kept: a mean of 2.5."""
    layout, workers, rounds = SliceLayout.plain(1000), 2, 40
    coders, owner = [Quarter().coder(layout, seed=rank) for rank in range(workers)], Owner(Quarter(), layout)
    total = torch.zeros(1000)
    for _ in range(rounds):
        messages = {rank: coder.encode(torch.ones(1000)) for rank, coder in enumerate(coders)}
        coders[0].accumulate(owner.combine(messages), total, 1 / rounds)
    assert abs(float(total.mean()) - 1) < 0.1
