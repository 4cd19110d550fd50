"""One bit per element and two values per column: 1-bit SGD (Seide, Fu, Droppo, Li, Yu, Interspeech 2014).

    bit_i = values_i >= 0;   decoded: the mean of its column's elements with that bit

    message      bits of the columns' elements | low and high of each column, float32 | all other elements, float32

A column is what feeds one output of a layer; biases and other small tensors travel as they are. Sums of columns are
kept, so what is lost is the shape within a column. The error is fed back; `feedback=false` shows what happens if not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dure.codec import bits
from dure.codec.base import Codec
from dure.codec.coder import Coder, SliceLayout
from dure.codec.residual import FeedbackCoder
from dure.errors import DamagedMessage


@dataclass(frozen=True, slots=True)
class OneBit(Codec):
    """A bit per element, two means per column."""

    feedback: bool = True

    def coder(self, layout: SliceLayout, seed: int = 0) -> Coder:
        inner = _TwoMeansCoder(layout)
        return FeedbackCoder(inner) if self.feedback else inner


class _TwoMeansCoder(Coder):
    """The mean of a column's elements of at least 0, or of the others, for each of them."""

    def __init__(self, layout: SliceLayout) -> None:
        super().__init__(layout.numel)
        bounds, is_column = torch.tensor(layout.bounds), torch.tensor(layout.is_column, dtype=torch.bool)
        lengths = bounds.diff()
        self._in_column = torch.repeat_interleave(is_column, lengths)
        self._plain = int(lengths[~is_column].sum())
        self._lengths = lengths[is_column]
        self._packed = bits.nbytes(self.numel - self._plain)

    @property
    def most_bytes(self) -> int:
        return self._packed + 4 * (2 * len(self._lengths) + self._plain)

    def _encode(self, values: torch.Tensor) -> torch.Tensor:
        values = values.float()
        columns, plain = self._apart(values)
        positive = columns >= 0
        lengths = self._lengths.to(values.device)
        count = _sums(positive.float(), lengths)
        high = _sums(columns.clamp(min=0), lengths) / count.clamp(min=1)
        low = _sums(columns.clamp(max=0), lengths) / (lengths - count).clamp(min=1)
        floats = torch.cat([low, high, plain]).view(torch.uint8)
        return torch.cat([bits.pack(positive), floats])

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        self._check_length(message, self.most_bytes)
        floats = message[self._packed :].clone().view(torch.float32)
        if not torch.isfinite(floats).all():
            raise DamagedMessage("a mean or a value that is no number.")
        num_columns, lengths = len(self._lengths), self._lengths.to(out.device)
        low, high = (floats[start : start + num_columns].repeat_interleave(lengths) for start in (0, num_columns))
        columns = torch.where(bits.unpack(message[: self._packed], self.numel - self._plain), high, low).to(out)
        if not self._plain:
            out.copy_(columns)
            return
        inside = self._in_column.to(out.device)
        out[inside] = columns
        out[~inside] = floats[2 * num_columns :].to(out)

    def _apart(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The elements of columns, and the others."""
        if not self._plain:
            return values, values[:0]
        inside = self._in_column.to(values.device)
        return values[inside], values[~inside]


def _sums(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The sum of each column."""
    return torch.segment_reduce(values, "sum", lengths=lengths) if len(lengths) else values.new_zeros(0)
