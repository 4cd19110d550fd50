"""Ternary signs for a vote: -1, 0 or 1 for every element, where a zero abstains.

    entropy      counts of zeros and of positives, 4 bytes each | the three signs by a range coder, near their entropy
    planes       a bit per element that is set if it is not zero | a bit that is set if it is above zero

With `sign`, elements that are exactly zero (dead pixels, inactive units) count as positive and can outvote the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from dure.codec import bits
from dure.codec.base import Codec, CodecMemory, Vote
from dure.codec.blocks import to_device, to_host
from dure.codec.coder import Coder, DenseCoder, SliceLayout
from dure.codec.vote import Majority
from dure.core.catalogue import parameter
from dure.core.cost import CodecCost
from dure.errors import DamagedMessage

_HEADER = 8
_COMPARE = (np.not_equal, np.greater)


@dataclass(frozen=True, slots=True)
class Ternary(Codec):
    """Minus one, zero or one for every element, for a majority vote in which zeros abstain."""

    paper: ClassVar[str] = "Wen et al., TernGrad, NeurIPS 2017 (the alphabet); Bernstein et al. 2019 (the vote)"
    cost: ClassVar[CodecCost] = CodecCost.measured((130, 4.7), (98, 12), (2200, 14))

    coding: Literal["entropy", "planes"] = parameter(
        "entropy", "entropy: the smaller messages; planes: 2 bits per element, faster"
    )

    def coder(self, layout: SliceLayout, seed: int = 0) -> Coder:
        return (_EntropyCoder if self.coding == "entropy" else _PlanesCoder)(layout.numel)

    def keeps(self, senders: int) -> CodecMemory:
        return CodecMemory(0, 0)

    def vote(self) -> Vote:
        return Majority()


class _PlanesCoder(DenseCoder):
    """Encodes each element in two bits, as two planes of bits."""

    looks = True

    @property
    def most_bytes(self) -> int:
        return 2 * bits.nbytes(self.numel)

    def encode_finite(self, values: torch.Tensor) -> torch.Tensor:
        return torch.cat(_planes(values))

    def _parts(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The packed planes: the elements that are not zero, and the elements above zero."""
        return message[: bits.nbytes(self.numel)], message[bits.nbytes(self.numel) :]

    def _check(self, parts: tuple[torch.Tensor, torch.Tensor]) -> None:
        votes, above = parts
        if bool((above & ~votes).any()):
            raise DamagedMessage("an element that is zero and above zero.")

    def _write(self, parts: tuple[torch.Tensor, torch.Tensor], where: slice, out: torch.Tensor) -> None:
        votes, above = (part[where.start // 8 : bits.nbytes(where.stop)] for part in parts)
        magnitudes = torch.empty_like(out)
        bits.unpack_into(votes, magnitudes, 0.0, 1.0)
        bits.unpack_into(above, out, -1.0, 1.0)
        out.mul_(magnitudes)


def _planes(values: torch.Tensor) -> list[torch.Tensor]:
    """The packed planes of `values`: the elements that are not zero, and the elements above zero."""
    return bits.pack(values, _COMPARE, look=True)


def _planes_on_host(values: torch.Tensor) -> list[NDArray[np.uint8]]:
    """As `_planes`, on the host."""
    if values.device.type == "cpu":
        return [plane.numpy() for plane in _planes(values)]
    return np.split(to_host(torch.cat(bits.pack(values, _COMPARE)), values), 2)


class _EntropyCoder(DenseCoder):
    """Encodes signs near the entropy of their shares.

    A symbol of the range coder stands for four signs: a number of four digits in base 3, the first sign the lowest
    digit, where 0 is zero, 1 positive and 2 negative. Zeros fill the last symbol.
    """

    looks = True

    @property
    def most_bytes(self) -> int:
        return _HEADER + 2 * bits.nbytes(self.numel) + 64

    @property
    def least_bytes(self) -> int:
        return _HEADER

    def encode_finite(self, values: torch.Tensor) -> torch.Tensor:
        import constriction

        votes, above = _planes_on_host(values)
        symbols = _symbols(votes, above)[: self._num_symbols]
        zeros, positives = self._counts(symbols)
        head = np.array([zeros, positives], "<u4").view(np.uint8)
        if self.numel in (zeros, positives, self.numel - zeros - positives):
            return to_device(head, values)
        coder = constriction.stream.queue.RangeEncoder()
        coder.encode(symbols, self._model(zeros, positives))
        coded = coder.get_compressed().astype("<u4").view(np.uint8)
        return to_device(np.concatenate([head, coded]), values)

    def _parts(self, message: torch.Tensor) -> NDArray[np.int32]:
        """The symbols of a message. Raises `DamagedMessage`."""
        import constriction

        array = message.cpu().numpy()
        zeros, positives = (int(count) for count in np.frombuffer(array[:_HEADER].tobytes(), "<u4"))
        negatives, coded = self.numel - zeros - positives, array[_HEADER:]
        if negatives < 0 or coded.size % 4 or bool(coded.size) == (self.numel in (zeros, positives, negatives)):
            raise DamagedMessage(f"{zeros} zeros, {positives} positives and {coded.size} bytes for {self.numel} signs.")
        if not coded.size:
            return np.full(self._num_symbols, 80 if negatives else 40 if positives else 0, np.int32)
        coder = constriction.stream.queue.RangeDecoder(np.frombuffer(coded.tobytes(), "<u4").astype(np.uint32))
        symbols: NDArray[np.int32] = coder.decode(self._model(zeros, positives), self._num_symbols)
        if not coder.maybe_exhausted() or self._counts(symbols) != (zeros, positives):
            raise DamagedMessage("signs whose counts differ from those in the header.")
        if self.numel % 4 and symbols[-1] >= 3 ** (self.numel % 4):
            raise DamagedMessage("a sign that belongs to no element.")
        return symbols

    def _write(self, parts: NDArray[np.int32], where: slice, out: torch.Tensor) -> None:
        symbols = parts[where.start // 4 : -(-where.stop // 4)]
        if out.device.type != "cpu":
            out.copy_(_signs_by_operations(to_device(symbols.astype(np.uint8), out))[: out.numel()])
            return
        signs = torch.from_numpy(np.take(_SIGNS, symbols, axis=0).reshape(-1))
        out.copy_(signs[: out.numel()])

    @property
    def _num_symbols(self) -> int:
        return -(-self.numel // 4)

    def _counts(self, symbols: NDArray[np.int32]) -> tuple[int, int]:
        """The numbers of zeros, without those that fill the last symbol, and of positives."""
        seen = np.bincount(symbols, minlength=81)
        zeros, positives = int(seen @ (_SIGNS == 0).sum(axis=1)), int(seen @ (_SIGNS > 0).sum(axis=1))
        return zeros - (-self.numel % 4), positives

    def _model(self, zeros: int, positives: int) -> Any:
        import constriction

        counts = np.array([zeros, positives, self.numel - zeros - positives], np.float64)
        shares = np.maximum(counts / self.numel, 1e-9)
        pairs = np.outer(shares, shares).ravel()
        return constriction.stream.model.Categorical(np.maximum(np.outer(pairs, pairs).ravel(), 1e-9), perfect=False)


_DIGITS = np.arange(81)[:, None] // 3 ** np.arange(4) % 3
_SIGNS = np.array([0, 1, -1], np.float32)[_DIGITS]
"""The four signs of each symbol: (81, 4)."""


def _signs_by_operations(symbols: torch.Tensor) -> torch.Tensor:
    """The signs of symbols on a device, to which only the symbols are copied."""
    digits = symbols.unsqueeze(1) // 3 ** torch.arange(4, dtype=torch.uint8, device=symbols.device) % 3
    return torch.where(digits == 2, -1, digits.to(torch.int8)).view(-1)


def _symbols(votes: NDArray[np.uint8], above: NDArray[np.uint8]) -> NDArray[np.int32]:
    """The symbols of packed planes, two for each byte."""
    symbols = np.empty((votes.size, 2), np.int32)
    np.take(_OF_NIBBLES, votes & 15 | above << 4, out=symbols[:, 0], mode="clip")
    np.take(_OF_NIBBLES, votes >> 4 | above & 240, out=symbols[:, 1], mode="clip")
    return symbols.reshape(-1)


def _of_nibbles() -> NDArray[np.int32]:
    """The symbol of each byte whose low four bits are a plane of votes, and whose high four bits are of positives."""
    votes, above = (np.arange(256)[:, None] >> np.arange(4) + shift & 1 for shift in (0, 4))
    symbols: NDArray[np.int32] = ((2 * votes - above) @ 3 ** np.arange(4)).astype(np.int32)
    return symbols


_OF_NIBBLES = _of_nibbles()
