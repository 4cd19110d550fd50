"""Coders with state: a residual (error feedback), or a moving average (momentum).

The state is on the device of the last values; a restored one comes from the CPU and moves with the next values.
"""

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

    def encode_finite(self, values: torch.Tensor) -> torch.Tensor:
        total = self._with_residual(values)
        message = self.inner._encode_and_subtract(total)
        self.residual = total
        return message

    def _with_residual(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of `values` and the residual, within the range of their type; on the CPU in place of the residual."""
        if self.residual is None:
            return values.clone()
        residual, most = self.residual.to(values.device), torch.finfo(values.dtype).max
        if values.device.type != "cpu":
            # The residual stays as it was until `inner`, which is the first to look, has found the sum finite.
            return torch.where(values.isfinite(), (residual + values).clamp_(-most, most), values)
        residual.add_(values)
        if not all_finite(residual):  # the sum of two finite numbers overflowed
            residual.clamp_(-most, most)
        return residual

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        self.inner.decode(message, out)

    def accumulate(self, message: torch.Tensor, out: torch.Tensor, weight: float = 1.0) -> None:
        self.inner.accumulate(message, out, weight)

    def state(self) -> dict[str, torch.Tensor]:
        own = {} if self.residual is None else {"residual": self.residual.cpu()}
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

    def encode_finite(self, values: torch.Tensor) -> torch.Tensor:
        average = torch.zeros_like(values) if self.average is None else self.average.to(values.device)
        # On the CPU, values have been found finite. Elsewhere `inner` looks, and the average stays until it has.
        average = (average.lerp_ if values.device.type == "cpu" else average.lerp)(values, 1 - self.beta)
        message = self.inner.encode_finite(average)
        self.average = average
        return message

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        self.inner.decode(message, out)

    def accumulate(self, message: torch.Tensor, out: torch.Tensor, weight: float = 1.0) -> None:
        self.inner.accumulate(message, out, weight)

    def verdict(self, values: torch.Tensor) -> torch.Tensor:
        return self.inner.verdict(values)

    def packed_signs(self, message: torch.Tensor) -> torch.Tensor | None:
        return self.inner.packed_signs(message)

    def state(self) -> dict[str, torch.Tensor]:
        own = {} if self.average is None else {"average": self.average.cpu()}
        return own | self.inner.state()

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self.average = state["average"].clone() if "average" in state else None
        self.inner.restore(state)
