"""Interfaces of the codec axis: `Codec`, a choice without state, and `Vote`. Their coders do the work (`coder`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol

from dure.core.cost import CodecCost

if TYPE_CHECKING:
    import torch

    from dure.codec.coder import Coder, SliceLayout

Exchange = Literal["reduce_scatter", "all_gather"]

COMBINED_SEED = (1 << 32) - 1
"""Seed of the coder that encodes combined values: no rank. PyTorch's generators use 32 bits of a seed. A worker whose
random numbers the coder shared would count more."""


class CodecMemory(NamedTuple):
    """The vectors that coders keep from message to message, in lengths of their slices.

    `sender`: those of a worker that encodes. `combiner`: those of a member that combines the messages of all for its
    slice, and of a server that votes.
    """

    sender: float
    combiner: float


class Vote(Protocol):
    """Reduces the signs of all workers to one message.

    `decide` takes encoded messages by worker, `settle` the tensors that they decode to. Both return an encoded message.
    """

    def decide(self, messages: Mapping[int, torch.Tensor], coder: Coder) -> torch.Tensor: ...

    def settle(self, votes: Mapping[int, torch.Tensor], coder: Coder) -> torch.Tensor: ...

    def state(self) -> dict[str, torch.Tensor]: ...

    def restore(self, state: Mapping[str, torch.Tensor]) -> None: ...


class Codec(ABC):
    """The encoding of gradients or model changes on the wire.

    `exchange` names the exchange of its messages in a group (`codec.exchange`). `cost` is its cost in virtual time,
    measured once; the default is none (`codec.cost`).
    """

    __slots__ = ()

    exchange: ClassVar[Exchange] = "reduce_scatter"
    cost: ClassVar[CodecCost] = CodecCost()

    @abstractmethod
    def coder(self, layout: SliceLayout, seed: int = 0) -> Coder:
        """A new coder for one slice. `seed` starts the random numbers that the coder draws.

        It is the rank of a worker. The coder that encodes combined values, at an owner of a stripe or a server, has
        `COMBINED_SEED`.
        """

    def keeps(self, senders: int) -> CodecMemory:
        """The vectors that its coders and its vote keep, for a number of `senders`.

        The default is one vector at each side, as for an error memory.
        """
        return CodecMemory(1, 1)

    def vote(self) -> Vote | None:
        """A new vote, for a codec whose messages are voted on; None for a codec whose messages are averaged."""
        return None
