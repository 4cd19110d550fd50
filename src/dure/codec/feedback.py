"""Wrappers of codecs: error feedback (Seide et al. 2014; Stich et al. 2018), and momentum before encoding.

Error feedback keeps the error of a message and adds it to the next values:

    p = values + residual;  message = encode(p);  residual = p - decode(message)

The sum of all decoded values and the residual is then the sum of all encoded values. Without feedback the error of a
biased codec never goes away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from dure.codec.base import Codec, CodecMemory, Exchange, Vote
from dure.codec.coder import Coder, FeedbackCoder, MomentumCoder, SliceLayout
from dure.core.catalogue import parameter
from dure.core.cost import CodecCost
from dure.core.text import quoted

JOINED = {"joined": True}
"""Metadata of the field that holds the wrapped codec, which stands before the `+` in a text."""


@dataclass(frozen=True, slots=True)
class ErrorFeedback(Codec):
    """Error feedback: the encoding error of one message is added to the next.

    Codecs for votes cannot have it, since a decoded sign is no estimate of the encoded value.
    """

    paper: ClassVar[str] = "Stich, Cordonnier and Jaggi, Sparsified SGD with Memory, NeurIPS 2018"
    costs: ClassVar[Mapping[str, CodecCost]] = {
        "fp16": CodecCost.measured((130, 3.1), (37, 0.77), (63, 1.1)),
        "bf16": CodecCost.measured((110, 3), (36, 0.7), (56, 1.1)),
        "int8": CodecCost.measured((250, 4), (80, 0.74), (100, 1.1)),
        "sign": CodecCost.measured((210, 3.6), (30, 0.45), (55, 0.93)),
    }
    joins: ClassVar[tuple[str, ...]] = tuple(costs)

    codec: Codec = field(metadata=JOINED)

    def __post_init__(self) -> None:
        _require_object(self.codec, "ErrorFeedback")
        if self.codec.vote() is not None:
            raise ValueError("error feedback is for messages that are averaged, not for votes. Use sign:scaled=true.")
        _require_forgetful(self.codec, "error feedback", "ef")

    @property
    def exchange(self) -> Exchange:  # type: ignore[override]
        return self.codec.exchange

    def coder(self, layout: SliceLayout, seed: int = 0) -> Coder:
        return FeedbackCoder(self.codec.coder(layout, seed))

    def keeps(self, senders: int) -> CodecMemory:
        return CodecMemory(1, 1)


@dataclass(frozen=True, slots=True)
class Momentum(Codec):
    """Momentum before encoding: the codec encodes a moving average. With `sign` it is Signum.

    u = beta u + (1 - beta) values;  message = encode(u)
    """

    paper: ClassVar[str] = "Bernstein et al., signSGD: Compressed Optimisation for Non-Convex Problems, ICML 2018"
    costs: ClassVar[Mapping[str, CodecCost]] = {
        "sign": CodecCost.measured((54, 1.7), (22, 0.43), (170, 0.045)),
        "ternary": CodecCost.measured((180, 5.6), (98, 12), (2200, 14)),
        "it-sign": CodecCost.measured((180, 6), (98, 12), (3400, 15)),
    }
    joins: ClassVar[tuple[str, ...]] = tuple(costs)

    codec: Codec = field(metadata=JOINED)
    beta: float = parameter(0.9, "weight of the past in the moving average", range=">= 0, < 1", symbol="β")

    def __post_init__(self) -> None:
        _require_object(self.codec, "Momentum")
        if not 0 <= self.beta < 1:
            raise ValueError(f"beta must be at least 0 and below 1, got {self.beta}. Use 0.9.")
        _require_forgetful(self.codec, "momentum", "momentum")

    @property
    def exchange(self) -> Exchange:  # type: ignore[override]
        return self.codec.exchange

    def vote(self) -> Vote | None:
        return self.codec.vote()

    def coder(self, layout: SliceLayout, seed: int = 0) -> MomentumCoder:
        return MomentumCoder(self.codec.coder(layout, seed), self.beta)

    def keeps(self, senders: int) -> CodecMemory:
        return CodecMemory(1, self.codec.keeps(senders).combiner)  # a combined result gets no momentum


def _require_object(codec: object, name: str) -> None:
    if not isinstance(codec, Codec):
        raise ValueError(f"{name} joins a codec as an object, as in {name}(Sign(scaled=True)), got {quoted(codec)}.")


def _require_forgetful(codec: Codec, what: str, name: str) -> None:
    """Raise `ValueError` for a codec with a residual or an average: with two, the error can grow without bound."""
    if isinstance(codec.coder(SliceLayout.plain(1)), FeedbackCoder | MomentumCoder):
        raise ValueError(
            f"{what} is for codecs without state, and this one keeps a residual or an average already. Leave "
            f"+{name} out."
        )
