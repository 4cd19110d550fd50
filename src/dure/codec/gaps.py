"""Encoding of ascending positions in a vector: the gaps between them, coded near their entropy.

If each of n elements is sent with probability rho, gaps are geometric and have an entropy of about log2(e / rho) bits.
The lowest `k` bits of a gap are sent as they are. The quotient above them is coded:

    rice    in unary, as `quotient` ones and a zero: Golomb's code for k = log2(ln 2 / rho) (Golomb 1966; Rice 1979)
    range   by a range coder (`constriction`) for the geometric distribution, with a smaller k

    header       count (4 bytes), k (1), escapes (3)
    body         low bits, k for each gap | escaped quotients, 4 bytes each | quotients

Sender and receiver must compute the same distribution. It follows from count and n by sums and products of floats,
which are equal on all machines; logarithms and powers are not.
"""

from __future__ import annotations

import struct
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dure.errors import DamagedMessage

Integers = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Coding = Literal["rice", "range"]

HEADER = 8
"""Bytes of the header."""

_ESCAPE = 255
"""The largest symbol of the range coder. It stands for every quotient of at least this size."""

_FINENESS = 16
"""Quotients of the range coder per gap of mean length. The bits below a quotient are treated as uniform."""


def most_bytes(numel: int, most: int) -> int:
    """The bytes of the longest encoding of at most `most` positions out of `numel`."""
    return HEADER + 9 * most + numel // 8 + 64


def encode(positions: Integers, numel: int, coding: Coding) -> Bytes:
    """Encode `positions`, ascending without repetition and below `numel`."""
    count = positions.size
    low_bits = _low_bits(count, numel, coding)
    gaps = np.diff(positions, prepend=-1) - 1
    quotients = gaps >> low_bits
    lows = _pack_lows(gaps, low_bits)
    if coding == "rice":
        escapes, coded = gaps[:0].astype(np.uint32), _unary(quotients)
    else:
        escapes = quotients[quotients >= _ESCAPE].astype(np.uint32)
        coded = _range_encode(np.minimum(quotients, _ESCAPE), count, numel, low_bits)
    head = struct.pack("<II", count, low_bits | escapes.size << 8)
    return np.concatenate([np.frombuffer(head, np.uint8), lows, escapes.view(np.uint8), coded])


def decode(message: Bytes, numel: int, coding: Coding) -> Integers:
    """Decode positions below `numel`. Raises `DamagedMessage` for bytes that `encode` cannot give."""
    if message.size < HEADER:
        raise DamagedMessage(f"{message.size} bytes of positions; a header has {HEADER}.")
    count, rest = struct.unpack("<II", message[:HEADER].tobytes())
    low_bits, num_escapes = rest & 255, rest >> 8
    if count > numel or num_escapes > count or low_bits != _low_bits(count, numel, coding):
        raise DamagedMessage(f"{count} positions out of {numel}, with {low_bits} low bits and {num_escapes} escapes.")
    end = HEADER + (count * low_bits + 7) // 8
    begin = end + 4 * num_escapes
    if message.size < begin:
        raise DamagedMessage(f"{message.size} bytes of positions where at least {begin} are needed.")
    coded = message[begin:]
    if coding == "rice":
        quotients = _count_ones(coded, count)
    else:
        quotients = _range_decode(coded, count, numel, low_bits)
        _put_escapes(quotients, message[end:begin])
    if count and quotients.max() > numel >> low_bits:
        raise DamagedMessage(f"a gap longer than the {numel} elements of the slice.")
    positions = np.cumsum((quotients << low_bits | _unpack_lows(message[HEADER:end], count, low_bits)) + 1) - 1
    if count and not positions[-1] < numel:
        raise DamagedMessage(f"position {positions[-1]} in a slice of {numel} elements.")
    return positions


def _low_bits(count: int, numel: int, coding: Coding) -> int:
    """The number k of low bits: for "rice" log2(ln 2 / rho) to the nearest integer, for "range" log2(1 / (16 rho)).

    In integer arithmetic: 710 / 1024 is just above ln 2, and the factor 1.414 rounds the logarithm to the nearest.
    """
    if not count:
        return 0
    target = numel * 710 * 1414 // (count * 1024 * 1000) if coding == "rice" else numel // (count * _FINENESS)
    return max(target.bit_length() - 1, 0)


# ---- low bits


def _pack_lows(gaps: Integers, low_bits: int) -> Bytes:
    if not low_bits:
        return np.empty(0, np.uint8)
    bits = np.empty((gaps.size, low_bits), np.uint8)
    for place in range(low_bits):
        bits[:, place] = gaps >> place & 1
    return np.packbits(bits, bitorder="little")


def _unpack_lows(packed: Bytes, count: int, low_bits: int) -> Integers:
    bits = np.unpackbits(packed, count=count * low_bits, bitorder="little").reshape(count, low_bits)
    lows = np.zeros(count, np.int64)
    for place in range(low_bits):
        lows |= bits[:, place].astype(np.int64) << place
    return lows


# ---- quotients in unary


def _unary(quotients: Integers) -> Bytes:
    ends = np.cumsum(quotients + 1) - 1
    bits = np.ones(int(ends[-1]) + 1 if ends.size else 0, np.uint8)
    bits[ends] = 0
    return np.packbits(bits, bitorder="little")


def _count_ones(packed: Bytes, count: int) -> Integers:
    ends = np.flatnonzero(np.unpackbits(packed, bitorder="little") == 0)
    if ends.size < count or (count and packed.size != ends[count - 1] // 8 + 1) or (not count and packed.size):
        raise DamagedMessage(f"{packed.size} bytes do not hold {count} quotients.")
    return np.diff(ends[:count], prepend=-1) - 1


# ---- quotients by the range coder


def _model(count: int, numel: int, low_bits: int) -> Any:
    """The geometric distribution of quotients; the escape symbol has the probability of all larger ones."""
    import constriction

    ratio = 1.0 - count / numel
    # to the power of 2 ** low_bits by products, which are equal on all machines
    for _ in range(low_bits):
        ratio *= ratio
    ratio = max(ratio, 2.0**-16)
    tail = np.cumprod(np.full(_ESCAPE, ratio))
    probabilities = np.concatenate([[1.0 - ratio], tail[:-1] * (1.0 - ratio), tail[-1:]])
    return constriction.stream.model.Categorical(np.maximum(probabilities, 1e-9), perfect=False)


def _range_encode(symbols: Integers, count: int, numel: int, low_bits: int) -> Bytes:
    import constriction

    if not count:
        return np.empty(0, np.uint8)
    coder = constriction.stream.queue.RangeEncoder()
    coder.encode(symbols.astype(np.int32), _model(count, numel, low_bits))
    coded: Bytes = coder.get_compressed().astype("<u4").view(np.uint8)
    return coded


def _range_decode(coded: Bytes, count: int, numel: int, low_bits: int) -> Integers:
    import constriction

    if coded.size % 4 or bool(coded.size) != bool(count):
        raise DamagedMessage(f"{coded.size} bytes of the range coder for {count} quotients.")
    if not count:
        return np.empty(0, np.int64)
    coder = constriction.stream.queue.RangeDecoder(np.frombuffer(coded.tobytes(), "<u4").astype(np.uint32))
    symbols: Integers = coder.decode(_model(count, numel, low_bits), count).astype(np.int64)
    if not coder.maybe_exhausted():
        raise DamagedMessage("the range coder has bytes left over.")
    return symbols


def _put_escapes(quotients: Integers, escapes: Bytes) -> None:
    """Replace the escape symbols in `quotients` by the values that were sent separately."""
    places = np.flatnonzero(quotients == _ESCAPE)
    values = np.frombuffer(escapes.tobytes(), "<u4").astype(np.int64)
    if places.size != values.size or (values < _ESCAPE).any():
        raise DamagedMessage(f"{values.size} escaped quotients where {places.size} were announced.")
    quotients[places] = values
