"""Packing of booleans: element i of a vector is bit i % 8 (from the lowest) of byte i // 8; spare bits are 0.

On the CPU, NumPy works in blocks that stay in the cache. On other devices, PyTorch's operations give the same bytes.
There, only `look` makes the host wait for the device, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from dure.codec.blocks import BLOCK, blocks, not_finite, require_finite

WORDS = 1 << 12
"""Words of 64 elements per block of `at_least`."""


def nbytes(numel: int) -> int:
    """The number of bytes for one bit of each of `numel` elements.

    >>> [nbytes(numel) for numel in (0, 1, 8, 9)]
    [0, 1, 1, 2]
    """
    return (numel + 7) // 8


def pack_signs(values: torch.Tensor, *, look: bool = False) -> torch.Tensor:
    """Pack whether each element of a flat tensor is at least 0 (both zeros are). `look` as in `pack`.

    >>> pack_signs(torch.tensor([1.0, -1.0, 0.0, -2.0])).tolist()
    [5]
    """
    return pack(values, (np.greater_equal,), look=look)[0]


def pack(values: torch.Tensor, compare: Sequence[np.ufunc], *, look: bool = False) -> list[torch.Tensor]:
    """Pack the result of each comparison of a flat tensor with 0: one uint8 tensor of `nbytes` per comparison.

    With `look`, raises `DivergedError` for NaN and infinity.
    """
    if values.device.type != "cpu":
        by_operations = [_pack_by_operations(getattr(torch, each.__name__)(values, 0)) for each in compare]
        if look:  # after all operations have been issued, since the host waits here
            require_finite(values)
        return by_operations
    source = values.detach().numpy()
    packed = [np.empty(nbytes(source.size), np.uint8) for _ in compare]
    masks = np.empty(min(BLOCK, source.size), np.bool_)
    for where in blocks(values):
        block, place = source[where], slice(where.start // 8, nbytes(where.stop))
        mask = masks[: block.size]
        if look and not np.isfinite(block, out=mask).all():
            raise not_finite()
        for target, each in zip(packed, compare, strict=True):
            target[place] = np.packbits(each(block, 0, out=mask), bitorder="little")
    return [torch.from_numpy(each) for each in packed]


def positive_into(values: torch.Tensor, out: torch.Tensor) -> None:
    """Write whether each element is at least 0 to the bool tensor `out`."""
    if values.device.type != "cpu":
        out.copy_(values >= 0)
    else:
        np.greater_equal(values.detach().numpy(), 0, out=out.numpy())


def pack_mask(mask: torch.Tensor) -> torch.Tensor:
    """Pack a flat tensor of bools into `nbytes` bytes."""
    if mask.device.type != "cpu":
        return _pack_by_operations(mask)
    return torch.from_numpy(np.packbits(mask.numpy(), bitorder="little"))


def unpack(packed: torch.Tensor, numel: int) -> torch.Tensor:
    """Unpack the first `numel` bits to a tensor of bools."""
    if packed.device.type != "cpu":
        return _unpack_by_operations(packed, numel)
    return torch.from_numpy(np.unpackbits(packed.numpy(), count=numel, bitorder="little").view(np.bool_))


def unpack_into(packed: torch.Tensor, out: torch.Tensor, low: float | torch.Tensor, high: float | torch.Tensor) -> None:
    """Write `high` to each element of the flat `out` whose bit is set, and `low` to the others.

    Both tensors are on one device. On other devices than the CPU, `low` and `high` may be tensors without dimensions.
    """
    if packed.device != out.device:
        raise ValueError(f"bits on {packed.device} and elements on {out.device}: both must be on one device.")
    if packed.device.type != "cpu":
        bits = _unpack_by_operations(packed, out.numel())
        if isinstance(low, torch.Tensor):  # CUDA's `masked_fill_` would read `high` on the host and wait for the device
            out.copy_(torch.where(bits, high, low))
        else:
            out.fill_(low).masked_fill_(bits, high)
        return
    target = out.numpy()
    table = _table(float(low), float(high), target.dtype.str)
    whole = target.size // 8
    # A byte is always a valid index of the 256 rows; mode="clip" skips NumPy's check of it.
    np.take(table, packed.numpy()[:whole], axis=0, out=target[: whole * 8].reshape(whole, 8), mode="clip")
    if target.size % 8:
        target[whole * 8 :] = table[packed[whole]][: target.size % 8]


@lru_cache(maxsize=64)
def _table(low: float, high: float, dtype: str) -> NDArray[np.floating]:
    """The eight values of each byte: (256, 8)."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits, high, low).astype(dtype)


def at_least(messages: Sequence[torch.Tensor], threshold: int) -> torch.Tensor:
    """For each element, whether at least `threshold` of the packed messages have its bit set, packed again.

    The messages stay packed. Bitwise operations on words of 64 elements count the set bits in binary: plane p holds bit
    p of every count. The counts are then compared with the threshold from the highest plane down.

    >>> votes = [pack_signs(torch.tensor(each)) for each in ([1.0, 1.0, -1.0], [1.0, -1.0, -1.0], [1.0, 1.0, 1.0])]
    >>> unpack(at_least(votes, 2), 3).tolist()
    [True, True, False]
    """
    size = messages[0].numel()
    if messages[0].device.type != "cpu":
        return _reaches(_count(messages), threshold)
    words = (size + 7) // 8
    result = np.zeros(words, dtype=np.uint64)
    sources = [_words(message.numpy(), words) for message in messages]
    for start in range(0, words, WORDS):
        stop = min(start + WORDS, words)
        result[start:stop] = _reaches(_count([source[start:stop] for source in sources]), threshold)
    return torch.from_numpy(result.view(np.uint8)[:size])


Words = NDArray[np.uint64]
Plane = TypeVar("Plane", NDArray[np.uint64], torch.Tensor)
"""Packed bits: words of 64 on the CPU, bytes on other devices."""


def _words(packed: NDArray[np.uint8], words: int) -> Words:
    if packed.size == words * 8 and packed.ctypes.data % 8 == 0:
        return packed.view(np.uint64)
    padded = np.zeros(words * 8, dtype=np.uint8)
    padded[: packed.size] = packed
    return padded.view(np.uint64)


def _count(sources: Sequence[Plane]) -> list[Plane]:
    """The number of set bits at each position, as planes from the lowest to the highest.

    A full adder replaces three words of a plane by their sum in it and a carry in the next plane, until each plane has
    one word.
    """
    planes: list[Plane] = []
    level = list(sources)
    while level:
        carries: list[Plane] = []
        while len(level) > 2:
            a, b, c = level.pop(), level.pop(), level.pop()
            either = a ^ b
            level.append(either ^ c)
            carries.append((a & b) | (either & c))
        if len(level) == 2:
            a, b = level
            level = [a ^ b]
            carries.append(a & b)
        planes.append(level[0])
        level = carries
    return planes


def _reaches(planes: Sequence[Plane], threshold: int) -> Plane:
    """The positions at which the count in `planes` is at least `threshold`."""
    none = planes[0] ^ planes[0]
    if threshold >> len(planes):
        return none
    above, equal = none, ~none
    for place in reversed(range(len(planes))):
        plane = planes[place]
        if threshold >> place & 1:
            equal = equal & plane
        else:
            above = above | (equal & plane)
            equal = equal & ~plane
    return above | equal


# ---- other devices than the CPU


def _pack_by_operations(mask: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    return (padded << _places(mask.device)).sum(dim=1, dtype=torch.uint8)


def _unpack_by_operations(packed: torch.Tensor, numel: int) -> torch.Tensor:
    return ((packed.unsqueeze(1) >> _places(packed.device)) & 1).view(-1)[:numel].bool()


def _places(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
