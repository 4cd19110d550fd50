"""What a codec loses is kept, and added to what comes next (Seide et al. 2014; Stich et al. 2018).

    p = values + residual;  message = encode(p);  residual = p - decode(message)

so that all that was ever decoded and the residual add up to all that was ever given. Without it the error of a codec
that always errs to the same side never goes away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from dure.codec.coder import Coder, Layout


class Inner(Protocol):
    """A codec that another one wraps."""

    def coder(self, layout: Layout, seed: int = 0) -> Coder: ...


@dataclass(frozen=True, slots=True)
class ErrorFeedback:
    """`codec`, whose error is fed back."""

    codec: Inner

    def coder(self, layout: Layout, seed: int = 0) -> FeedbackCoder:
        """A coder for a slice."""
        return FeedbackCoder(self.codec.coder(layout, seed))


class FeedbackCoder(Coder):
    """Encodes with a residual; decodes as `inner` does. The residual is the sender's, and is saved."""

    def __init__(self, inner: Coder) -> None:
        super().__init__(inner.numel)
        self.inner = inner
        self.residual: torch.Tensor | None = None

    @property
    def most_bytes(self) -> int:
        return self.inner.most_bytes

    def _encode(self, values: torch.Tensor) -> torch.Tensor:
        self.residual = values.clone() if self.residual is None else self.residual.add_(values)
        message = self.inner._encode(self.residual)
        self.inner.accumulate(message, self.residual, -1.0)
        return message

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        self.inner.decode(message, out)

    def accumulate(self, message: torch.Tensor, out: torch.Tensor, weight: float = 1.0) -> None:
        self.inner.accumulate(message, out, weight)

    def state(self) -> dict[str, torch.Tensor]:
        own = {} if self.residual is None else {"residual": self.residual}
        return own | self.inner.state()

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self.residual = state["residual"].clone() if "residual" in state else None
        self.inner.restore(state)


@dataclass(frozen=True, slots=True)
class Momentum:
    """`codec` of a moving average: u = beta u + (1 - beta) values. With `Sign` it is Signum (Bernstein et al. 2018)."""

    codec: Inner
    beta: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            raise ValueError(f"beta must be at least 0 and below 1, got {self.beta}. Use 0.9.")

    def coder(self, layout: Layout, seed: int = 0) -> MomentumCoder:
        """A coder for a slice."""
        return MomentumCoder(self.codec.coder(layout, seed), self.beta)


class MomentumCoder(Coder):
    """Encodes the moving average; decodes as `inner` does."""

    def __init__(self, inner: Coder, beta: float) -> None:
        super().__init__(inner.numel)
        self.inner = inner
        self.beta = beta
        self.average: torch.Tensor | None = None

    @property
    def most_bytes(self) -> int:
        return self.inner.most_bytes

    def _encode(self, values: torch.Tensor) -> torch.Tensor:
        if self.average is None:
            self.average = torch.zeros_like(values)
        self.average.lerp_(values, 1 - self.beta)
        return self.inner._encode(self.average)

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        self.inner.decode(message, out)

    def accumulate(self, message: torch.Tensor, out: torch.Tensor, weight: float = 1.0) -> None:
        self.inner.accumulate(message, out, weight)

    def state(self) -> dict[str, torch.Tensor]:
        own = {} if self.average is None else {"average": self.average}
        return own | self.inner.state()

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self.average = state["average"].clone() if "average" in state else None
        self.inner.restore(state)
