"""Coders with state: a residual (error feedback), or a moving average (momentum)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dure.codec.blocks import all_finite
from dure.codec.coder import Coder


class FeedbackCoder(Coder):
    """Error feedback: adds the residual before encoding with `inner`. Decodes as `inner`.

    Only the sender has a residual, which checkpoints keep.
    """

    def __init__(self, inner: Coder) -> None:
        super().__init__(inner.numel)
        self.inner = inner
        self.residual: torch.Tensor | None = None

    @property
    def most_bytes(self) -> int:
        return self.inner.most_bytes

    def _encode(self, values: torch.Tensor) -> torch.Tensor:
        self.residual = values.clone() if self.residual is None else self.residual.add_(values)
        if not all_finite(self.residual):  # the sum of two finite numbers overflowed
            most = torch.finfo(values.dtype).max
            self.residual.clamp_(-most, most)
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


class MomentumCoder(Coder):
    """Momentum: encodes the moving average of the values with `inner`. Decodes as `inner`."""

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

    def verdict(self, values: torch.Tensor) -> torch.Tensor:
        return self.inner.verdict(values)

    def packed_signs(self, message: torch.Tensor) -> torch.Tensor | None:
        return self.inner.packed_signs(message)

    def state(self) -> dict[str, torch.Tensor]:
        own = {} if self.average is None else {"average": self.average}
        return own | self.inner.state()

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self.average = state["average"].clone() if "average" in state else None
        self.inner.restore(state)
