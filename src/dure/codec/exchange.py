"""One round in which every member's values become what all of them are given, as codecs allow it.

    stripes    the vector is cut into as many stripes as there are members. Each encodes every stripe for its owner; the
               owner combines what came, encodes that, and everybody decodes it: the owner too, so that all have the
               same. Each member sends 2 (K - 1) / K messages of the vector, as in a ring, and no sum is ever cut.
    gather     everybody sends its message to everybody, who adds them up: for messages that cannot be made smaller
               again once they are summed, K - 1 times a message.

What combines is the mean, in rank order, or the codec's vote. Where the codec keeps a residual, so do owners: what is
lost when the combined values are encoded again comes later (Seide et al. 2014, "two-stage error feedback").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dure.codec.base import Codec, Vote
from dure.codec.coder import Coder, SliceLayout, restore, states
from dure.core.node import CodecWork


class Owner:
    """What the owner of a slice does with everybody's messages for it."""

    def __init__(self, codec: Codec, layout: SliceLayout) -> None:
        self._coder = codec.coder(layout)
        self._again = codec.coder(layout)
        self._vote = codec.vote()

    @property
    def numel(self) -> int:
        return self._again.numel

    def combine(self, messages: Mapping[int, torch.Tensor], weights: Mapping[int, float] | None = None) -> torch.Tensor:
        """The message for everybody, from those of each member; `weights` are shares of a mean, equal if None.

        Raises `DamagedMessage` for what a member cannot have sent.
        """
        if self._vote is not None:
            return self._vote.decide(messages, self._again)
        mean = torch.zeros(self._coder.numel, device=next(iter(messages.values())).device)
        for member in sorted(messages):
            share = 1 / len(messages) if weights is None else weights[member]
            self._coder.accumulate(messages[member], mean, share)
        return self._again.verdict(mean)

    def codec_works(self, count: int) -> tuple[CodecWork, ...]:
        """What `combine` does to `count` messages, for virtual time."""
        return combining(self.numel, count, votes=self._vote is not None)

    def state(self) -> dict[str, torch.Tensor]:
        """What survives a restart."""
        return {f"{part} {name}": value for part, each in self._parts.items() for name, value in each.state().items()}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take up a `state`."""
        for part, each in self._parts.items():
            own = f"{part} "
            each.restore({name.removeprefix(own): kept for name, kept in state.items() if name.startswith(own)})

    @property
    def _parts(self) -> dict[str, Vote | Coder]:
        """What remembers: the vote, how reliable voters are; the coder, what its verdicts have lost."""
        return {"again": self._again} if self._vote is None else {"again": self._again, "vote": self._vote}


def combining(numel: int, count: int, *, votes: bool) -> tuple[CodecWork, ...]:
    """What an owner of `numel` values does to `count` messages for them: one vote, or a mean that is encoded again."""
    if votes:
        return (CodecWork("combine", count * numel),)
    return CodecWork("combine", numel, count), CodecWork("encode", numel)


def tallying(numel: int, count: int) -> tuple[CodecWork, ...]:
    """What a server of `numel` values, which votes, does to `count` updates that it has decoded."""
    return *combining(numel, count, votes=True), CodecWork("decode", numel)


def memory(coders: Sequence[Coder], owner: Owner) -> dict[str, torch.Tensor]:
    """What survives a restart of a member that encodes with `coders` and is an `owner`, by name."""
    return states(coders) | {f"owner {name}": value for name, value in owner.state().items()}


def remember(coders: Sequence[Coder], owner: Owner, tensors: Mapping[str, torch.Tensor]) -> None:
    """Take up their `memory`."""
    restore(coders, tensors)
    owner.restore({name.removeprefix("owner "): kept for name, kept in tensors.items() if name.startswith("owner ")})


def add_up(coder: Coder, messages: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Write the mean of the members' messages, in rank order, to the flat `out`."""
    out.zero_()
    for message in messages:
        coder.accumulate(message, out, 1 / len(messages))
