"""What a codec is to a strategy: a choice, without state, whose coders do the work (`coder`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    import torch

    from dure.codec.coder import Coder, SliceLayout

Way = Literal["stripes", "gather"]


class Vote(Protocol):
    """How many workers' signs become one: `decide` is given messages, `settle` what they decode to; both give one."""

    def decide(self, messages: Mapping[int, torch.Tensor], coder: Coder) -> torch.Tensor: ...

    def settle(self, votes: Mapping[int, torch.Tensor], coder: Coder) -> torch.Tensor: ...

    def state(self) -> dict[str, torch.Tensor]: ...

    def restore(self, state: Mapping[str, torch.Tensor]) -> None: ...


class Codec(ABC):
    """A choice of what goes on the wire. `way` says how members exchange its messages (`exchange`)."""

    __slots__ = ()

    way: ClassVar[Way] = "stripes"

    @abstractmethod
    def coder(self, layout: SliceLayout, seed: int = 0) -> Coder:
        """A coder for a slice; `seed` is that of what it draws."""

    def vote(self) -> Vote | None:
        """A vote, where its messages are not to be averaged."""
        return None
