"""The sign of every element, where a zero abstains.

    entropy      counts of zeros and of positives, 4 bytes each | the three signs by a range coder, near their entropy
    planes       a bit for each element that is not zero | a bit for each that is above: 2 bits an element

Where many elements are exactly zero (dead pixels, inactive units), to call them positive is a vote for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from dure.codec import bits
from dure.codec.base import Codec, Vote
from dure.codec.coder import Coder, SliceLayout
from dure.codec.vote import Majority
from dure.errors import DamagedMessage

_HEADER = 8


@dataclass(frozen=True, slots=True)
class Ternary(Codec):
    """Minus one, zero or one; `coding` "entropy" is the smaller, "planes" the faster."""

    coding: Literal["entropy", "planes"] = "entropy"

    def __post_init__(self) -> None:
        if self.coding not in ("entropy", "planes"):
            raise ValueError(f'coding must be "entropy" or "planes", got {self.coding!r}.')

    def coder(self, layout: SliceLayout, seed: int = 0) -> Coder:
        return (_EntropyCoder if self.coding == "entropy" else _PlanesCoder)(layout.numel)

    def vote(self) -> Vote:
        return Majority()


class _PlanesCoder(Coder):
    """Two bits an element."""

    @property
    def most_bytes(self) -> int:
        return 2 * bits.nbytes(self.numel)

    def _encode(self, values: torch.Tensor) -> torch.Tensor:
        return torch.cat([bits.pack(values != 0), bits.pack(values > 0)])

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        self._check_length(message, self.most_bytes)
        votes, above = message[: bits.nbytes(self.numel)], message[bits.nbytes(self.numel) :]
        if bool((above & ~votes).any()):
            raise DamagedMessage("an element that is zero and above zero.")
        bits.unpack_into(above, out, -1.0, 1.0)
        out.mul_(bits.unpack(votes, self.numel))


class _EntropyCoder(Coder):
    """As many bits as the shares of the three signs ask for."""

    @property
    def most_bytes(self) -> int:
        return _HEADER + 2 * bits.nbytes(self.numel) + 64

    def _encode(self, values: torch.Tensor) -> torch.Tensor:
        import constriction

        signs = torch.sign(values).to(torch.int32).cpu().numpy() + 1
        zeros, positives = int((signs == 1).sum()), int((signs == 2).sum())
        head = np.array([zeros, positives], "<u4").view(np.uint8)
        if self.numel in (zeros, positives, self.numel - zeros - positives):
            return torch.from_numpy(head).to(values.device)
        coder = constriction.stream.queue.RangeEncoder()
        coder.encode(signs, self._model(zeros, positives))
        coded = coder.get_compressed().astype("<u4").view(np.uint8)
        return torch.from_numpy(np.concatenate([head, coded])).to(values.device)

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        import constriction

        self._check_length(message, _HEADER, self.most_bytes)
        array = message.cpu().numpy()
        zeros, positives = (int(count) for count in np.frombuffer(array[:_HEADER].tobytes(), "<u4"))
        negatives, coded = self.numel - zeros - positives, array[_HEADER:]
        if negatives < 0 or coded.size % 4 or bool(coded.size) == (self.numel in (zeros, positives, negatives)):
            raise DamagedMessage(f"{zeros} zeros, {positives} positives and {coded.size} bytes for {self.numel} signs.")
        if not coded.size:
            out.fill_(-1.0 if negatives else 1.0 if positives else 0.0)
            return
        coder = constriction.stream.queue.RangeDecoder(np.frombuffer(coded.tobytes(), "<u4").astype(np.uint32))
        signs = coder.decode(self._model(zeros, positives), self.numel)
        if not coder.maybe_exhausted() or ((signs == 1).sum(), (signs == 2).sum()) != (zeros, positives):
            raise DamagedMessage("signs that are not those that were counted.")
        out.copy_(torch.from_numpy(signs - 1))

    def _model(self, zeros: int, positives: int) -> Any:
        import constriction

        counts = np.array([self.numel - zeros - positives, zeros, positives], np.float64)
        return constriction.stream.model.Categorical(np.maximum(counts / self.numel, 1e-9), perfect=False)
