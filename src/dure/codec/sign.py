"""The sign of every element, a bit each. Bernstein et al., "signSGD", ICML 2018; with a scale, Karimireddy et al. 2019.

    message      ceil(n / 8) bytes: bit i is whether element i is >= 0; then, if scaled, the mean magnitude as float32
    decoded      +1 or -1, or the mean magnitude with that sign

The mean of signs is no estimate of the mean's sign, so unscaled signs are for votes. Scaled, with the error fed back
("Error Feedback Fixes SignSGD", ICML 2019), they may be averaged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dure.codec import bits
from dure.codec.coder import Coder, Layout
from dure.errors import DamagedMessage

_SCALE = 4  # bytes


@dataclass(frozen=True, slots=True)
class Sign:
    """One bit per element, zero counting as positive; `scaled` adds the mean magnitude."""

    scaled: bool = False

    def coder(self, layout: Layout) -> SignCoder:
        """A coder for a slice."""
        return SignCoder(layout.numel, scaled=self.scaled)


class SignCoder(Coder):
    """Signs of a slice, packed."""

    def __init__(self, numel: int, *, scaled: bool = False) -> None:
        super().__init__(numel)
        self.scaled = scaled

    @property
    def most_bytes(self) -> int:
        return bits.nbytes(self.numel) + _SCALE * self.scaled

    def _encode(self, values: torch.Tensor) -> torch.Tensor:
        packed = bits.pack_signs(values)
        if not self.scaled:
            return packed
        scale = values.abs().mean(dtype=torch.float32) if self.numel else values.new_zeros((), dtype=torch.float32)
        return torch.cat([packed, scale.reshape(1).view(torch.uint8)])

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        self._check_length(message, self.most_bytes)
        packed = message[: bits.nbytes(self.numel)]
        scale = self._scale(message) if self.scaled else 1.0
        bits.unpack_into(packed, out, -scale, scale)

    def _scale(self, message: torch.Tensor) -> float:
        scale = float(message[-_SCALE:].clone().view(torch.float32).item())
        if not 0 <= scale < math.inf:
            raise DamagedMessage(f"a mean magnitude of {scale}; it is finite and not negative.")
        return scale
