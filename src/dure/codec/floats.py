"""Codecs of fewer bits per element: float16, bfloat16, or 8 bits with a scale for each block of 256 elements.

name     bytes                        error of an element x
fp32     4 n                          none
fp16     2 n                          |x| 2^-11; beyond 65,504 x is cut to it
bf16     2 n                          |x| 2^-8
int8     n + 4 ceil(n / 256)          half of 1 / 127 of the largest magnitude in its block (Dettmers, ICLR 2016)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from dure.codec.base import Codec, CodecMemory
from dure.codec.blocks import blocks, empty, is_finite, require_finite, require_in_float32, scratch, viewed
from dure.codec.coder import CastCoder, DenseCoder, SliceLayout
from dure.core.cost import CodecCost
from dure.errors import DamagedMessage

_NEIGHBORS = 256  # elements that share a scale
_MOST = torch.finfo(torch.float32).max
_MOST_SCALE = float(np.nextafter(np.float32(_MOST / 127), np.float32(0)))  # 127 times this is finite


@dataclass(frozen=True, slots=True)
class Float16(Codec):
    """Every element in half precision, with 5 bits of exponent: 2 bytes each."""

    paper: ClassVar[str] = "Micikevicius et al., Mixed Precision Training, ICLR 2018"
    cost: ClassVar[CodecCost] = CodecCost.measured((35, 0.95), (37, 0.81), (60, 1.2))

    def coder(self, layout: SliceLayout, seed: int = 0) -> CastCoder:
        return CastCoder(layout.numel, torch.float16)

    def keeps(self, senders: int) -> CodecMemory:
        return CodecMemory(0, 0)


@dataclass(frozen=True, slots=True)
class BFloat16(Codec):
    """The upper half of every float32, with 8 bits of exponent: 2 bytes each."""

    paper: ClassVar[str] = "Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019"
    cost: ClassVar[CodecCost] = CodecCost.measured((32, 1), (35, 0.73), (54, 1.1))

    def coder(self, layout: SliceLayout, seed: int = 0) -> CastCoder:
        return CastCoder(layout.numel, torch.bfloat16)

    def keeps(self, senders: int) -> CodecMemory:
        return CodecMemory(0, 0)


@dataclass(frozen=True, slots=True)
class Int8(Codec):
    """8 bits per element, and one scale for every 256 elements."""

    paper: ClassVar[str] = "Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016"
    cost: ClassVar[CodecCost] = CodecCost.measured((110, 2.1), (80, 0.74), (100, 1.1))

    def coder(self, layout: SliceLayout, seed: int = 0) -> _Int8Coder:
        return _Int8Coder(layout.numel)

    def keeps(self, senders: int) -> CodecMemory:
        return CodecMemory(0, 0)


class _Int8Coder(DenseCoder):
    """Encodes each element as an integer of equal steps: 127 steps are the largest magnitude of its block of 256."""

    looks = True

    @property
    def _scales(self) -> int:
        return -(-self.numel // _NEIGHBORS)

    @property
    def most_bytes(self) -> int:
        return self.numel + 4 * self._scales

    def encode_finite(self, values: torch.Tensor) -> torch.Tensor:
        message = empty(self.most_bytes, values)
        steps, scales = message[: self.numel].view(torch.int8), empty(self._scales, values, torch.float32)
        memory = scratch(self._scales * _NEIGHBORS, values, torch.float32).view(-1, _NEIGHBORS)
        for where in blocks(values):
            block, missing = values[where].float(), (where.start - where.stop) % _NEIGHBORS
            padded = torch.nn.functional.pad(block, (0, missing)) if missing else block
            scale = scales[where.start // _NEIGHBORS : -(-where.stop // _NEIGHBORS)]
            found = memory[: scale.numel()]
            _to_steps(padded.view(-1, _NEIGHBORS), scale, found)
            steps[where] = found.view(-1)[: block.numel()]
            if not is_finite(scale):  # then an element is not finite, or beyond float32
                require_finite(values[where])
                require_in_float32(values[where])
        message[self.numel :] = scales.view(torch.uint8)
        return message

    def _parts(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The steps (int8) and scales (float32) of a message."""
        return message[: self.numel].view(torch.int8), viewed(message[self.numel :], torch.float32)

    def _check(self, parts: tuple[torch.Tensor, torch.Tensor]) -> None:
        steps, scales = parts
        if not self.numel:
            return
        known = ((scales >= 0) & (scales <= _MOST_SCALE)).all()
        finite = (scales.amax() <= _MOST / 128) | (steps.amin() > -128)  # no message has a step of -128
        if not bool(known & finite):
            raise DamagedMessage("a scale that is negative or makes values that are not finite.")

    def _write(self, parts: tuple[torch.Tensor, torch.Tensor], where: slice, out: torch.Tensor) -> None:
        steps, scales = parts
        out.copy_(steps[where])
        scale = scales[where.start // _NEIGHBORS : -(-where.stop // _NEIGHBORS)].to(out.dtype)
        whole = out.numel() // _NEIGHBORS
        out[: whole * _NEIGHBORS].view(-1, _NEIGHBORS).mul_(scale[:whole, None])
        out[whole * _NEIGHBORS :].mul_(scale[whole:])


def _to_steps(values: torch.Tensor, scale: torch.Tensor, steps: torch.Tensor) -> None:
    """Write the scale of each row of `values` (rows, 256) to `scale`, and the elements in units of it to `steps`."""
    largest = torch.abs(values, out=steps).amax(dim=1)
    # CUDA multiplies by the reciprocal of a Python number, which rounds otherwise than a division by a tensor does.
    torch.div(largest, scale.new_full((), 127.0), out=scale)
    scale.masked_fill_((scale > _MOST_SCALE) & (largest <= _MOST), _MOST_SCALE)
    torch.div(values, scale[:, None], out=steps)
    if scale.device.type != "cpu" or not bool(scale.all()):
        steps.masked_fill_((scale == 0)[:, None], 0.0)
    steps.round_().clamp_(-127, 127)
