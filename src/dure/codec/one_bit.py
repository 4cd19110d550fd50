"""One bit per element and two values per column: 1-bit SGD (Seide, Fu, Droppo, Li, Yu, Interspeech 2014).

    bit_i = values_i >= 0;   decoded: the mean of its column's elements with that bit

    message      bits of the columns' elements | low and high of each column, float32 | all other elements, float32

A column is the weights of one output of a layer. Biases and other tensors that are no matrix are sent as float32. The
sum of a column is exact; only the differences within it are lost. The error is fed back, unless `feedback=false`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from dure.codec import bits
from dure.codec.base import Codec, CodecMemory
from dure.codec.blocks import BLOCK, all_finite, empty, require_finite, require_in_float32, viewed
from dure.codec.coder import Coder, DenseCoder, FeedbackCoder, SliceLayout
from dure.core.catalogue import parameter
from dure.core.cost import CodecCost
from dure.errors import DamagedMessage


@dataclass(frozen=True, slots=True)
class OneBit(Codec):
    """One bit per element and two means per column; the error is fed back."""

    paper: ClassVar[str] = "Seide, Fu, Droppo, Li and Yu, 1-Bit Stochastic Gradient Descent, Interspeech 2014"
    cost: ClassVar[CodecCost] = CodecCost.measured((690, 10), (150, 1.7), (210, 2.1))

    feedback: bool = parameter(True, "the error of a message is added to the next")

    def coder(self, layout: SliceLayout, seed: int = 0) -> Coder:
        inner = _TwoMeansCoder(layout)
        return FeedbackCoder(inner) if self.feedback else inner

    def keeps(self, senders: int) -> CodecMemory:
        return CodecMemory(self.feedback, self.feedback)


class _Piece(NamedTuple):
    """A block of the slice: complete columns of equal width, or (`width` 0) elements outside of columns.

    It has at least one column, and on the CPU no more than stay in the cache. `bit` is the index of its first element
    among all elements of columns, `first` the index of its first column. For `width` 0, `first` is the index of its
    first element among all elements outside of columns.
    """

    where: slice
    width: int
    bit: int
    first: int

    @property
    def columns(self) -> slice:
        """The range of its columns among all columns."""
        return slice(self.first, self.first + self.numel // self.width)

    @property
    def numel(self) -> int:
        """The number of its elements."""
        stop: int = self.where.stop
        return stop - int(self.where.start)


class _TwoMeansCoder(DenseCoder):
    """Encodes each element of a column as the mean of the column's elements of its sign."""

    looks = True

    def __init__(self, layout: SliceLayout) -> None:
        super().__init__(layout.numel)
        self._layout = layout
        self._in_cache = {piece.where.start: piece for piece in _pieces(layout, BLOCK)}
        self._columns = sum(layout.is_column)
        self._plain = sum(piece.numel for piece in self._in_cache.values() if not piece.width)
        self._packed = bits.nbytes(self.numel - self._plain)

    @property
    def most_bytes(self) -> int:
        return self._packed + 4 * (2 * self._columns + self._plain)

    def _pieces(self, like: torch.Tensor) -> Mapping[int, _Piece]:
        """The pieces by their first element, for the device of `like`."""
        return self._in_cache if like.device.type == "cpu" else self._whole

    @cached_property
    def _whole(self) -> Mapping[int, _Piece]:
        """The pieces for other devices than the CPU, as few as the layout allows."""
        return {piece.where.start: piece for piece in _pieces(self._layout, self.numel)}

    def _blocks(self, out: torch.Tensor) -> Iterable[slice]:
        return (piece.where for piece in self._pieces(out).values())

    def encode_finite(self, values: torch.Tensor) -> torch.Tensor:
        positive, floats = self._split(values, torch.float32)
        if values.device.type != "cpu" and not all_finite(floats):
            require_finite(values)
            require_in_float32(values)
            positive, floats = self._split(values, torch.float64)  # a sum overflowed in float32
        return torch.cat([bits.pack_mask(positive), floats.view(torch.uint8)])

    def _split(self, values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether each element of a column is at least 0, and the floats of the message. Sums have the type `dtype`.

        On the CPU, each piece is checked while it is in the cache. Elsewhere the caller checks the floats: the mean of
        a column with NaN or infinity is not finite either.
        """
        on_cpu, pieces = values.device.type == "cpu", self._pieces(values)
        positive = empty(self.numel - self._plain, values, torch.bool)
        low, high = empty(self._columns, values, torch.float32), empty(self._columns, values, torch.float32)
        plain = empty(self._plain, values, torch.float32)
        halves = empty(max((piece.numel for piece in pieces.values()), default=0), values, dtype)
        for piece in pieces.values():
            if on_cpu:
                require_finite(values[piece.where])
                require_in_float32(values[piece.where])
            block = values[piece.where].float()
            if not piece.width:
                plain[piece.first : piece.first + block.numel()] = block
                continue
            mask = positive[piece.bit : piece.bit + block.numel()]
            bits.positive_into(block, mask)
            half = halves[: block.numel()]
            means = _means(block.to(dtype), mask.view(-1, piece.width), half)
            if on_cpu and not (all_finite(means[0]) and all_finite(means[1])):  # the sum overflowed in float32
                means = _means(block.double(), mask.view(-1, piece.width), half.double())
            low[piece.columns], high[piece.columns] = means
        return positive, torch.cat([low, high, plain])

    def _parts(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The packed bits and the floats of a message."""
        return message[: self._packed], viewed(message[self._packed :], torch.float32)

    def _check(self, parts: tuple[torch.Tensor, torch.Tensor]) -> None:
        if not all_finite(parts[1]):
            raise DamagedMessage("a mean or a value that is not finite.")

    def _write(self, parts: tuple[torch.Tensor, torch.Tensor], where: slice, out: torch.Tensor) -> None:
        packed, floats = parts
        piece, numel = self._pieces(out)[where.start], out.numel()
        if not piece.width:
            out.copy_(floats[2 * self._columns + piece.first :][:numel])
            return
        byte, skip = divmod(piece.bit, 8)
        masks = torch.empty(8 * bits.nbytes(skip + numel), dtype=torch.int32, device=out.device)
        bits.unpack_into(packed[byte : byte + masks.numel() // 8], masks, 0, -1)
        chosen = masks[skip : skip + numel]
        low = floats[: self._columns][piece.columns].view(torch.int32).unsqueeze(1)
        high = floats[self._columns : 2 * self._columns][piece.columns].view(torch.int32).unsqueeze(1)
        chosen.view(-1, piece.width).bitwise_and_(low ^ high).bitwise_xor_(
            low
        )  # selects high where all bits of the mask are set, else low
        out.copy_(chosen.view(torch.float32))


def _pieces(layout: SliceLayout, most: int) -> Iterator[_Piece]:
    """The pieces of a slice, of at most `most` elements where they have more than one column."""
    widths = [
        (stop - start) * column for (start, stop), column in zip(pairwise(layout.bounds), layout.is_column, strict=True)
    ]
    start = bit = columns = 0
    for end, width, following in zip(layout.bounds[1:], widths, [*widths[1:], -1], strict=False):
        numel = end - start
        if width == following and numel + width <= most:
            continue
        yield _Piece(slice(start, end), width, bit, columns if width else start - bit)
        if width:
            bit, columns = bit + numel, columns + numel // width
        start = end


def _means(block: torch.Tensor, mask: torch.Tensor, half: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The means of each row's elements below 0, and of its others (`mask`). `half` is scratch memory like `block`."""
    num_rows, width = mask.shape
    count = _count(mask)
    lengths = torch.full((num_rows,), width, device=block.device)
    # `unsafe` leaves out a check of the lengths, for which the host would wait for the device.
    above = torch.segment_reduce(torch.clamp(block, min=0, out=half), "sum", lengths=lengths, unsafe=True)
    below = torch.segment_reduce(torch.clamp(block, max=0, out=half), "sum", lengths=lengths, unsafe=True)
    return below / (width - count).clamp(min=1), above / count.clamp(min=1)


def _count(mask: torch.Tensor) -> torch.Tensor:
    """The number of true elements of each row, as floats."""
    if mask.device.type != "cpu":
        return mask.sum(dim=1).float()
    return torch.from_numpy(mask.numpy().view(np.uint8).sum(axis=1, dtype=np.uint32).astype(np.float32))
