"""Codecs of timing-only runs: messages have the sizes of another codec's messages, and no values.

length of a message                      size here
the same for all values of a slice       exact
depends on the values (strom, top-k,     the slice's share in a message that was measured on the job's first
ternary with an entropy code)            gradients (`bytes_per_value`)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dure.codec.base import Codec, Vote
from dure.codec.coder import Coder, DenseCoder, SliceLayout
from dure.codec.residual import FeedbackCoder, MomentumCoder
from dure.core.node import Ghost

if TYPE_CHECKING:
    import torch

    from dure.codec.timing import Slice


class SizeOnly(Codec):
    """Stands for `codec` in a timing-only run. `rate`: bytes per value of messages whose length depends on them."""

    __slots__ = ("codec", "exchange", "rate")

    def __init__(self, codec: Codec, rate: float) -> None:
        self.codec = codec
        self.exchange = codec.exchange  # type: ignore[misc]
        self.rate = rate

    def coder(self, layout: SliceLayout, seed: int = 0) -> Coder:
        return SizeOnlyCoder(self.codec.coder(layout, seed), self.rate)

    def vote(self) -> Vote | None:
        return None if self.codec.vote() is None else SizeOnlyVote()


class SizeOnlyCoder(Coder):
    """Makes messages of the sizes of the coder `like`."""

    def __init__(self, like: Coder, rate: float) -> None:
        super().__init__(like.numel)
        self._most = like.most_bytes
        self._nbytes = like.most_bytes if is_fixed(like) else min(like.most_bytes, round(rate * like.numel))

    @property
    def most_bytes(self) -> int:
        return self._most

    def encode(self, values: torch.Tensor) -> Any:
        return Ghost(self._nbytes, 1)

    encode_finite = encode

    def zeros(self, like: torch.Tensor) -> Any:
        return Ghost(self.numel)

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        """Write nothing."""

    def accumulate(self, message: torch.Tensor, out: torch.Tensor, weight: float = 1.0) -> None:
        """Add nothing."""


class SizeOnlyVote:
    """A vote without values: its result has the size of a message."""

    def decide(self, messages: Mapping[int, torch.Tensor], coder: Coder) -> torch.Tensor:
        return coder.encode(next(iter(messages.values())))

    settle = decide

    def state(self) -> dict[str, torch.Tensor]:
        return {}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Do nothing: there is no state."""


def is_fixed(coder: Coder) -> bool:
    """Whether all messages of a coder are equally long."""
    while isinstance(coder, FeedbackCoder | MomentumCoder):
        coder = coder.inner
    return isinstance(coder, DenseCoder) and coder.least_bytes == coder.most_bytes


def bytes_per_value(codec: Codec, slices: Iterable[Slice], scale: float = 1.0) -> float:
    """The mean length of `codec`'s messages over the values of the largest of `slices`; 0 where lengths are fixed.

    Values are multiplied by `scale`. The first message is left out, as residuals are empty before it.
    """
    if is_fixed(codec.coder(SliceLayout.plain(1))):
        return 0.0
    layout, values = max(slices, key=lambda each: each[0].numel)
    coder = codec.coder(layout)
    lengths = [coder.encode(each * scale).numel() for each in values]
    return sum(lengths[1:]) / len(lengths[1:]) / layout.numel
