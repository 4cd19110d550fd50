"""Threshold quantization: sends plus or minus the threshold for elements that have grown beyond it (Strom 2015).

    r = r + values;   for each element with |r| >= threshold:  send its position and sign, r = r -/+ threshold

N. Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing", Interspeech 2015. The residual r is
error feedback around a quantizer, and is implemented so. A message carries at most one threshold per element. If values
are larger than the threshold for long, the residual grows without bound: choose a threshold above typical values.

    message      signs, a bit per sent element | positions (`gaps`)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from dure.codec import bits, gaps
from dure.codec.base import Codec, CodecMemory, Exchange
from dure.codec.blocks import BLOCK, blocks, to_device, to_host
from dure.codec.coder import Coder, FeedbackCoder, SliceLayout
from dure.core.catalogue import parameter
from dure.core.cost import CodecCost
from dure.errors import DamagedMessage

_COUNT = 4  # bytes of the number of signs


@dataclass(frozen=True, slots=True)
class Strom(Codec):
    """The position and sign of every element that has grown beyond `threshold`; the residual keeps the rest."""

    paper: ClassVar[str] = (
        "Strom, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, Interspeech 2015"
    )
    cost: ClassVar[CodecCost] = CodecCost.measured((470, 4.1), (180, 1.1), (170, 0.75))

    exchange: ClassVar[Exchange] = "all_gather"

    threshold: float = parameter(
        0.01,
        "size from which an element is sent, and the size that is sent",
        range="> 0, < inf",
        unit="as encoded",
        symbol="τ",
    )
    coding: gaps.Coding = parameter(
        "range", "code of the positions: a range coder, or a Rice code, which is a little longer"
    )

    def __post_init__(self) -> None:
        if not 0 < self.threshold < math.inf:
            raise ValueError(f"threshold must be above 0 and finite, got {self.threshold}. Use 0.01.")

    def coder(self, layout: SliceLayout, seed: int = 0) -> FeedbackCoder:
        return FeedbackCoder(_ThresholdCoder(layout.numel, self.threshold, self.coding))

    def keeps(self, senders: int) -> CodecMemory:
        return CodecMemory(1, 1)


class _ThresholdCoder(Coder):
    """Encodes elements of a magnitude of at least `threshold` as plus or minus `threshold`, the others as zero."""

    def __init__(self, numel: int, threshold: float, coding: gaps.Coding) -> None:
        super().__init__(numel)
        self.threshold = threshold
        self.coding = coding

    @property
    def most_bytes(self) -> int:
        return _COUNT + bits.nbytes(self.numel) + gaps.most_bytes(self.numel, self.numel)

    def encode_finite(self, values: torch.Tensor) -> torch.Tensor:
        return self._message(values)[0]

    def _encode_and_subtract(self, values: torch.Tensor) -> torch.Tensor:
        message, positions, signs = self._message(values)
        values.index_add_(0, positions, self._steps(signs, positions.numel(), values), alpha=-1.0)
        return message

    def _message(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The message, and the positions and packed signs in it."""
        positions = beyond(values, self.threshold)
        body = gaps.encode(to_host(positions, values), self.numel, self.coding)
        signs = bits.pack_signs(values[positions])
        count = np.array([positions.numel()], "<i4").view(np.uint8)
        coded = to_device(np.concatenate([count, body]), values)
        return torch.cat([coded[:_COUNT], signs, coded[_COUNT:]]), positions, signs

    def _steps(self, signs: torch.Tensor, count: int, like: torch.Tensor) -> torch.Tensor:
        """Plus or minus the threshold by each of `count` packed signs, of the type of `like`."""
        steps = torch.empty(count, dtype=like.dtype, device=like.device)
        bits.unpack_into(signs, steps, -self.threshold, self.threshold)
        return steps

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        positions, steps = self._read(message, out)
        out.zero_()
        out[positions] = steps

    def accumulate(self, message: torch.Tensor, out: torch.Tensor, weight: float = 1.0) -> None:
        positions, steps = self._read(message, out)
        out.index_add_(0, positions, steps, alpha=weight)

    def _read(self, message: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The positions of a message, and plus or minus the threshold for each. Raises `DamagedMessage`."""
        self.check_length(message, _COUNT + gaps.HEADER, self.most_bytes)
        read = message.cpu().numpy()
        count = int(np.frombuffer(read[:_COUNT].tobytes(), "<i4")[0])
        begin = _COUNT + bits.nbytes(count)
        if not 0 <= count <= self.numel or message.numel() < begin:
            raise DamagedMessage(f"{count} signs in a message of {message.numel()} bytes.")
        positions = gaps.decode(read[begin:], self.numel, self.coding)
        if positions.size != count:
            raise DamagedMessage(f"{count} signs for {positions.size} positions.")
        return to_device(positions, out), self._steps(message[_COUNT:begin].to(out.device), count, out)


def beyond(values: torch.Tensor, threshold: float) -> torch.Tensor:
    """The ascending positions of the elements whose magnitude is at least `threshold`."""
    if values.device.type != "cpu":
        return torch.nonzero(values.abs() >= threshold).view(-1)  # the host waits for the number of positions
    source = values.detach().numpy()
    magnitudes = np.empty(min(BLOCK, source.size), source.dtype)
    parts = [np.empty(0, np.int64)]
    for where in blocks(values):
        block = source[where]
        large = np.abs(block, out=magnitudes[: block.size]) >= threshold
        parts.append(np.flatnonzero(large) + where.start)
    return torch.from_numpy(np.concatenate(parts))
