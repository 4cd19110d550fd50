"""Top-k sparsification: sends the elements of largest magnitude, with error feedback for the rest by default.

    message      positions (`gaps`), preceded by their length | values as float32, in the order of positions

Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017, the usual baseline of sparse
messages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from dure.codec import gaps
from dure.codec.base import Codec, CodecMemory, Exchange
from dure.codec.blocks import require_in_float32, to_device, to_host
from dure.codec.coder import Coder, FeedbackCoder, SliceLayout
from dure.core.catalogue import parameter
from dure.core.cost import CodecCost
from dure.errors import DamagedMessage

_LENGTH = 4  # bytes of the length of the positions


@dataclass(frozen=True, slots=True)
class TopK(Codec):
    """The position and value of the largest elements; the residual keeps the rest."""

    paper: ClassVar[str] = "Aji and Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017"
    cost: ClassVar[CodecCost] = CodecCost.measured((690, 5.4), (300, 1.1), (280, 0.74))

    exchange: ClassVar[Exchange] = "all_gather"

    share: float = parameter(
        0.01, "share of the elements that is sent, at least one", range="> 0, <= 1", unit="fraction"
    )
    feedback: bool = parameter(True, "elements that are not sent are added to the next message")

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, got {self.share}. Use 0.01.")

    def coder(self, layout: SliceLayout, seed: int = 0) -> Coder:
        inner = _LargestCoder(layout.numel, min(layout.numel, max(1, math.ceil(self.share * layout.numel))))
        return FeedbackCoder(inner) if self.feedback else inner

    def keeps(self, senders: int) -> CodecMemory:
        return CodecMemory(self.feedback, self.feedback)


class _LargestCoder(Coder):
    """Encodes the `count` elements of largest magnitude, the others as zero."""

    def __init__(self, numel: int, count: int) -> None:
        super().__init__(numel)
        self.count = count

    @property
    def most_bytes(self) -> int:
        return _LENGTH + gaps.most_bytes(self.numel, self.count) + 4 * self.count

    def encode_finite(self, values: torch.Tensor) -> torch.Tensor:
        return self._message(values)[0]

    def _encode_and_subtract(self, values: torch.Tensor) -> torch.Tensor:
        message, positions, sent = self._message(values)
        values.index_add_(0, positions, sent.to(values.dtype), alpha=-1.0)
        return message

    def _message(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The message, and the positions and float32 values in it."""
        positions = largest(values, self.count)
        coded = gaps.encode(to_host(positions, values), self.numel, "range")
        picked = values[positions]
        require_in_float32(picked)
        sent = picked.float()
        length = np.array([coded.size], "<i4").view(np.uint8)
        head = to_device(np.concatenate([length, coded]), values)
        return torch.cat([head, sent.view(torch.uint8)]), positions, sent

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        positions, sent = self._read(message, out)
        out.zero_()
        out[positions] = sent

    def accumulate(self, message: torch.Tensor, out: torch.Tensor, weight: float = 1.0) -> None:
        positions, sent = self._read(message, out)
        out.index_add_(0, positions, sent, alpha=weight)

    def _read(self, message: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The positions and values of a message, like `out`. Raises `DamagedMessage`."""
        least = _LENGTH + gaps.HEADER + 4 * self.count
        self.check_length(message, least, self.most_bytes)
        read = message.cpu().numpy()
        length = int(np.frombuffer(read[:_LENGTH].tobytes(), "<i4")[0])
        if length != message.numel() - _LENGTH - 4 * self.count:
            raise DamagedMessage(f"{length} bytes of positions in a message of {message.numel()}.")
        positions = gaps.decode(read[_LENGTH : _LENGTH + length], self.numel, "range")
        if positions.size != self.count:
            raise DamagedMessage(f"{positions.size} positions where {self.count} are sent.")
        sent = np.frombuffer(read[_LENGTH + length :].tobytes(), np.float32)
        if not np.isfinite(sent).all():
            raise DamagedMessage("a value that is not finite.")
        return to_device(positions, out), message[_LENGTH + length :].clone().view(torch.float32).to(out)


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """The ascending positions of the `count` elements of largest magnitude; among equal ones, the first."""
    if not count:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    if values.device.type != "cpu":
        return _largest_by_operations(values.abs(), count)
    return torch.from_numpy(_largest_by_partition(values, count))


def _largest_by_operations(magnitudes: torch.Tensor, count: int) -> torch.Tensor:
    least = torch.topk(magnitudes, count, sorted=False).values.amin()
    above, equal = magnitudes > least, magnitudes == least
    chosen = above | (equal & (equal.cumsum(0) <= count - above.sum()))
    # Position i is the first with i + 1 chosen elements up to it. `nonzero` would let the host wait for its size.
    return torch.searchsorted(chosen.cumsum(0), torch.arange(1, count + 1, device=magnitudes.device))


def _largest_by_partition(values: torch.Tensor, count: int) -> NDArray[np.int64]:
    """Magnitudes have the order of their bit patterns.

    NumPy partitions integers several times as fast as PyTorch partitions floats.
    """
    bits = values.abs().view(_INTEGERS[values.dtype.itemsize]).numpy()
    place = bits.size - count
    least = np.partition(bits, place)[place]
    above = np.flatnonzero(bits > least)
    equal = np.flatnonzero(bits == least)[: count - above.size]
    return np.sort(np.concatenate([above, equal]))


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
