"""Work in blocks that stay in the cache, so that what several operations look at comes from memory once.

On other devices than the CPU a block is the whole: there each operation costs a start.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from dure.errors import DivergedError

BLOCK = 1 << 16
"""Elements that are worked on at a time; a multiple of the 256 that share a scale."""


def blocks(values: torch.Tensor) -> Iterator[slice]:
    """Where the blocks of a flat tensor are."""
    step = BLOCK if values.device.type == "cpu" else max(values.numel(), 1)
    for start in range(0, values.numel(), step):
        yield slice(start, min(start + step, values.numel()))


def is_finite(block: torch.Tensor) -> bool:
    """The sum is finite unless an element is not, or it overflows: only then is each looked at."""
    total = block.sum(dtype=torch.promote_types(block.dtype, torch.float32)).item()
    return math.isfinite(total) or bool(torch.isfinite(block).all())


def all_finite(values: torch.Tensor) -> bool:
    """Whether every element of a flat tensor is a number."""
    return all(is_finite(values[where]) for where in blocks(values))


def require_finite(values: torch.Tensor) -> None:
    """Raises `DivergedError` for NaN or infinity: what a coder makes of them looks like an ordinary message."""
    if not all_finite(values):
        raise DivergedError("an update holds NaN or infinity, so it was not encoded: the training diverged.")


def empty(numel: int, like: torch.Tensor, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Memory for `numel` elements of `dtype` on the device of `like`.

    NumPy asks the system for large pages, and the first touch of small ones takes as long as filling them.
    """
    if like.device.type != "cpu" or not numel:
        return torch.empty(numel, dtype=dtype, device=like.device)
    return torch.from_numpy(np.empty(numel * dtype.itemsize, np.uint8)).view(dtype)


def viewed(message: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of a message as elements of `dtype`; copied only where they are not aligned."""
    aligned = message.storage_offset() % dtype.itemsize == 0 and message.data_ptr() % dtype.itemsize == 0
    return (message if aligned else message.clone()).view(dtype)
