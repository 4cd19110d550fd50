"""Pinned memory for copies between a device and the host: few buffers, which are used again.

Memory on the host names the CPU here and elsewhere: a user may have set another default device of PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

SLOTS = 2
"""Buffers per key: one travels while the next is copied."""

ALIGNMENT = 64  # bytes


class PinnedPool:
    """Pinned buffers, at most `SLOTS` for each key. A buffer grows to the largest message of its key, and no further.

    `nbytes` counts the bytes of all buffers.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._idle: dict[str, list[torch.Tensor]] = {}

    def take(self, key: str, nbytes: int) -> torch.Tensor | None:
        """A buffer of at least `nbytes` bytes; None while all buffers of `key` are in use."""
        idle = self._idle.setdefault(key, [torch.empty(0, dtype=torch.uint8, device="cpu")] * SLOTS)
        if not idle:
            return None
        buffer = idle.pop()
        if buffer.numel() < nbytes:
            self.nbytes -= buffer.numel()
            size = 1 << (nbytes - 1).bit_length()
            buffer = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
            self.nbytes += buffer.numel()
        return buffer

    def give_back(self, key: str, buffer: torch.Tensor) -> None:
        """Return a buffer that nobody reads or writes any more."""
        self._idle[key].append(buffer)


def aligned_nbytes(tensors: Sequence[torch.Tensor]) -> int:
    """The bytes of a buffer that `cut` divides into memory for `tensors`."""
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def cut(buffer: torch.Tensor | None, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Divide a buffer into flat tensors of the sizes and dtypes of `tensors`; None if those have no elements."""
    buffer = torch.empty(0, dtype=torch.uint8, device="cpu") if buffer is None else buffer
    parts, start = [], 0
    for tensor in tensors:
        parts.append(buffer[start : start + tensor.nbytes].view(tensor.dtype))
        start += _aligned(tensor.nbytes)
    return parts


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
