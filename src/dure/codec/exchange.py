"""Compressed all-reduce: one round that combines the values of K members to the same result at all of them.

    reduce_scatter    The vector is cut into K stripes, one owned by each member. A member encodes every stripe for its
                      owner. The owner combines the K messages of its stripe and encodes the result. All members decode
                      it, the owner too, so that results are equal. A member sends 2 (K - 1) / K messages of the vector,
                      as in a ring.
    all_gather        Every member sends its message to every other, and adds all of them up: K - 1 messages of the
                      vector. For messages whose sum cannot be encoded as small again.

The combination is the mean in rank order, or the codec's vote. If the codec keeps a residual, owners keep one too, for
the error of encoding the combined values (Seide et al. 2014, "two-stage error feedback").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dure.codec.base import COMBINED_SEED, Codec
from dure.codec.coder import Coder, SliceLayout, restore, states
from dure.core.node import CodecWork
from dure.core.state import under_prefix, with_prefix


class Owner:
    """Combines all members' messages for the stripe that a member owns."""

    def __init__(self, codec: Codec, layout: SliceLayout) -> None:
        self._coder = codec.coder(layout)
        self._again = codec.coder(layout, COMBINED_SEED)
        self._vote = codec.vote()

    @property
    def numel(self) -> int:
        return self._again.numel

    def combine(self, messages: Mapping[int, torch.Tensor], weights: Mapping[int, float] | None = None) -> torch.Tensor:
        """The message of the combined values, from the messages by member.

        `weights` are the members' shares of the mean; None means equal shares. Raises `DamagedMessage`.
        """
        if self._vote is not None:
            return self._vote.decide(messages, self._again)
        mean = self._coder.zeros(next(iter(messages.values())))
        for member in sorted(messages):
            share = 1 / len(messages) if weights is None else weights[member]
            self._coder.accumulate(messages[member], mean, share)
        return self._again.verdict(mean)

    def codec_works(self, count: int) -> tuple[CodecWork, ...]:
        """The codec work of `combine` for `count` messages, for virtual time."""
        return combining(self.numel, count, votes=self._vote is not None)

    def state(self) -> dict[str, torch.Tensor]:
        """The tensors that a checkpoint keeps, on the CPU."""
        kept = with_prefix("again ", self._again.state())
        return kept if self._vote is None else kept | with_prefix("vote ", self._vote.state())

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from a `state`."""
        self._again.restore(under_prefix("again ", state))
        if self._vote is not None:
            self._vote.restore(under_prefix("vote ", state))


def combining(numel: int, count: int, *, votes: bool) -> tuple[CodecWork, ...]:
    """The codec work of an owner of `numel` values for `count` messages: one vote, or a mean that is encoded again."""
    if votes:
        return (CodecWork("combine", count * numel),)
    return CodecWork("combine", numel, count), CodecWork("encode", numel)


def tallying(numel: int, count: int) -> tuple[CodecWork, ...]:
    """The codec work of a server of `numel` values for a vote on `count` decoded updates."""
    return *combining(numel, count, votes=True), CodecWork("decode", numel)


def memory(coders: Sequence[Coder], owner: Owner) -> dict[str, torch.Tensor]:
    """The tensors that a checkpoint keeps of a member: those of its `coders` and of the `owner`."""
    return states(coders) | with_prefix("owner ", owner.state())


def remember(coders: Sequence[Coder], owner: Owner, tensors: Mapping[str, torch.Tensor]) -> None:
    """Restore `coders` and `owner` from their `memory`."""
    restore(coders, tensors)
    owner.restore(under_prefix("owner ", tensors))


def add_up(coder: Coder, messages: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Write the mean of the members' messages, in rank order, to the flat `out`."""
    out.zero_()
    for message in messages:
        coder.accumulate(message, out, 1 / len(messages))
