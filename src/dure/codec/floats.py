"""Every element by itself, in as many bits as one likes: float32, float16, bfloat16, or 8 bits with a scale per block.

name     bytes                        error of an element
fp32     4 n                          none
fp16     2 n                          2^-11 of it; beyond 65,504 it is cut there
bf16     2 n                          2^-8 of it
int8     n + 4 ceil(n / 256)          half of 1 / 127 of the largest of its 256 neighbors (Dettmers, ICLR 2016)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dure.codec.base import Codec
from dure.codec.cast import CastCoder
from dure.codec.coder import Coder, SliceLayout
from dure.errors import DamagedMessage

_BLOCK = 256  # elements that share a scale


@dataclass(frozen=True, slots=True)
class Float16(Codec):
    """Half precision: 5 bits of exponent."""

    def coder(self, layout: SliceLayout, seed: int = 0) -> CastCoder:
        return CastCoder(layout.numel, torch.float16)


@dataclass(frozen=True, slots=True)
class BFloat16(Codec):
    """The upper half of a float32: 8 bits of exponent."""

    def coder(self, layout: SliceLayout, seed: int = 0) -> CastCoder:
        return CastCoder(layout.numel, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Int8(Codec):
    """8 bits and a scale for every 256 elements: today's point of reference."""

    def coder(self, layout: SliceLayout, seed: int = 0) -> _Int8Coder:
        return _Int8Coder(layout.numel)


class _Int8Coder(Coder):
    """The largest magnitude of a block is 127, zero is zero, and between them steps are equal."""

    @property
    def _blocks(self) -> int:
        return -(-self.numel // _BLOCK)

    @property
    def most_bytes(self) -> int:
        return self.numel + 4 * self._blocks

    def _encode(self, values: torch.Tensor) -> torch.Tensor:
        blocks = torch.nn.functional.pad(values.float(), (0, -self.numel % _BLOCK)).view(self._blocks, _BLOCK)
        scales = blocks.abs().amax(dim=1) / 127 if self.numel else blocks.new_zeros(0)
        steps = torch.where(scales[:, None] > 0, blocks / scales[:, None], 0.0).round().clamp(-127, 127).to(torch.int8)
        return torch.cat([steps.view(-1)[: self.numel].view(torch.uint8), scales.view(torch.uint8)])

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        self._check_length(message, self.most_bytes)
        scales = message[self.numel :].clone().view(torch.float32)
        if not (torch.isfinite(scales) & (scales >= 0)).all():
            raise DamagedMessage("a scale that is no number, or negative.")
        steps = message[: self.numel].clone().view(torch.int8).to(out.dtype)
        out.copy_(steps * scales.to(out).repeat_interleave(_BLOCK)[: self.numel])
