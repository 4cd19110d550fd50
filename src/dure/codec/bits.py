"""Bits in bytes: element i of a vector is bit i % 8, counted from the lowest, of byte i // 8; what is left over is 0.

On the CPU everything goes in blocks that stay in the cache; on other devices the same bytes come from PyTorch's
operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from dure.codec.blocks import BLOCK, blocks, no_number, require_finite

WORDS = 1 << 12
"""Words of 64 elements that are counted at a time."""


def nbytes(numel: int) -> int:
    """Bytes that hold a bit for each of `numel` elements.

    >>> [nbytes(numel) for numel in (0, 1, 8, 9)]
    [0, 1, 1, 2]
    """
    return (numel + 7) // 8


def pack_signs(values: torch.Tensor, *, look: bool = False) -> torch.Tensor:
    """Whether each element of a flat tensor is at least 0 (so both zeros are), as `nbytes` bytes; `look` as in `pack`.

    >>> pack_signs(torch.tensor([1.0, -1.0, 0.0, -2.0])).tolist()
    [5]
    """
    return pack(values, (np.greater_equal,), look=look)[0]


def pack(values: torch.Tensor, compare: Sequence[np.ufunc], *, look: bool = False) -> list[torch.Tensor]:
    """Whether each element of a flat tensor compares so with 0, as `nbytes` bytes for each of the comparisons.

    Raises `DivergedError` for NaN and infinity if it is to `look`.
    """
    if values.device.type != "cpu":
        if look:
            require_finite(values)
        return [_pack_by_operations(getattr(torch, each.__name__)(values, 0)) for each in compare]
    source = values.detach().numpy()
    packed = [np.empty(nbytes(source.size), np.uint8) for _ in compare]
    masks = np.empty(min(BLOCK, source.size), np.bool_)
    for where in blocks(values):
        block, place = source[where], slice(where.start // 8, nbytes(where.stop))
        mask = masks[: block.size]
        if look and not np.isfinite(block, out=mask).all():
            raise no_number()
        for target, each in zip(packed, compare, strict=True):
            target[place] = np.packbits(each(block, 0, out=mask), bitorder="little")
    return [torch.from_numpy(each) for each in packed]


def positive_into(values: torch.Tensor, out: torch.Tensor) -> None:
    """Write to the bools `out` whether each element is at least 0."""
    if values.device.type != "cpu":
        out.copy_(values >= 0)
    else:
        np.greater_equal(values.detach().numpy(), 0, out=out.numpy())


def pack_mask(mask: torch.Tensor) -> torch.Tensor:
    """The elements of a flat tensor of bools, as `nbytes` bytes."""
    if mask.device.type != "cpu":
        return _pack_by_operations(mask)
    return torch.from_numpy(np.packbits(mask.numpy(), bitorder="little"))


def unpack(packed: torch.Tensor, numel: int) -> torch.Tensor:
    """The first `numel` bits as bools."""
    if packed.device.type != "cpu":
        return _unpack_by_operations(packed, numel)
    return torch.from_numpy(np.unpackbits(packed.numpy(), count=numel, bitorder="little").view(np.bool_))


def unpack_into(packed: torch.Tensor, out: torch.Tensor, low: float, high: float) -> None:
    """Write `high` to the flat `out` where a bit is set and `low` where not."""
    if packed.device.type != "cpu":
        out.copy_(torch.where(_unpack_by_operations(packed, out.numel()), high, low))
        return
    target = out.numpy()
    table = _table(float(low), float(high), target.dtype.str)
    whole = target.size // 8
    # Every index is one of a byte's 256: "clip" only spares the check.
    np.take(table, packed.numpy()[:whole], axis=0, out=target[: whole * 8].reshape(whole, 8), mode="clip")
    if target.size % 8:
        target[whole * 8 :] = table[packed[whole]][: target.size % 8]


@lru_cache(maxsize=64)
def _table(low: float, high: float, dtype: str) -> NDArray[np.floating]:
    """The eight values that each byte stands for."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits, high, low).astype(dtype)


def at_least(messages: Sequence[torch.Tensor], threshold: int) -> torch.Tensor:
    """For each bit, whether at least `threshold` of the messages have it set; nothing is unpacked.

    The messages are added up in binary, a word of 64 elements at a time: plane p of the count holds its bit p. Then the
    count is compared with the threshold from the highest plane on.

    >>> votes = [pack_signs(torch.tensor(each)) for each in ([1.0, 1.0, -1.0], [1.0, -1.0, -1.0], [1.0, 1.0, 1.0])]
    >>> unpack(at_least(votes, 2), 3).tolist()
    [True, True, False]
    """
    size = messages[0].numel()
    if messages[0].device.type != "cpu":
        return _at_least_by_operations(messages, threshold)
    words = (size + 7) // 8
    result = np.zeros(words, dtype=np.uint64)
    sources = [_words(message.numpy(), words) for message in messages]
    for start in range(0, words, WORDS):
        stop = min(start + WORDS, words)
        result[start:stop] = _reaches(_count([source[start:stop] for source in sources]), threshold)
    return torch.from_numpy(result.view(np.uint8)[:size])


Words = NDArray[np.uint64]


def _words(packed: NDArray[np.uint8], words: int) -> Words:
    if packed.size == words * 8 and packed.ctypes.data % 8 == 0:
        return packed.view(np.uint64)
    padded = np.zeros(words * 8, dtype=np.uint8)
    padded[: packed.size] = packed
    return padded.view(np.uint64)


def _count(sources: Sequence[Words]) -> list[Words]:
    """The sum of the sources' bits at each place, as planes from the lowest on.

    Three words of one plane make a sum that stays and a carry that goes up, until one word is left in each.
    """
    planes: list[Words] = []
    level = list(sources)
    while level:
        carries: list[Words] = []
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


def _reaches(planes: Sequence[Words], threshold: int) -> Words:
    """Where the number in `planes` is at least `threshold`."""
    nobody = np.zeros_like(planes[0])
    if threshold >> len(planes):
        return nobody
    above, equal = nobody, ~nobody
    for place in reversed(range(len(planes))):
        plane = planes[place]
        if threshold >> place & 1:
            equal = equal & plane
        else:
            above = above | (equal & plane)
            equal = equal & ~plane
    return above | equal


# ---- on other devices than the CPU


def _pack_by_operations(mask: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    return (padded << _places(mask.device)).sum(dim=1, dtype=torch.uint8)


def _unpack_by_operations(packed: torch.Tensor, numel: int) -> torch.Tensor:
    return ((packed.unsqueeze(1) >> _places(packed.device)) & 1).view(-1)[:numel].bool()


def _at_least_by_operations(messages: Sequence[torch.Tensor], threshold: int) -> torch.Tensor:
    numel = messages[0].numel() * 8
    count = sum(_unpack_by_operations(message, numel).to(torch.int16) for message in messages)
    assert isinstance(count, torch.Tensor)
    return _pack_by_operations(count >= threshold)


def _places(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
