"""Work in blocks that stay in the cache, so that what several operations look at comes from memory once.

On other devices than the CPU a block is the whole: there each operation costs a start.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from dure.errors import DivergedError

BLOCK = 1 << 17
"""Elements that are worked on at a time: half of a second-level cache of 1 MiB, and a multiple of the 256 that share a
scale."""

_INFINITY = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80}
"""The bits of infinity: those of the exponent, all of which are set in what is no number too."""


def blocks(values: torch.Tensor) -> Iterator[slice]:
    """Where the blocks of a flat tensor are."""
    step = BLOCK if values.device.type == "cpu" else max(values.numel(), 1)
    for start in range(0, values.numel(), step):
        yield slice(start, min(start + step, values.numel()))


def is_finite(block: torch.Tensor) -> bool:
    """Whether every element is a number: then their sum is one, or overflows, and only then is each looked at."""
    infinity = _INFINITY.get(block.dtype)
    if infinity is not None and block.device.type == "cpu":  # where sums of short types are slow
        return bool((block.view(torch.int16).numpy() & infinity).max(initial=0) < infinity)
    return math.isfinite(block.sum().item()) or bool(torch.isfinite(block).all())


def all_finite(values: torch.Tensor) -> bool:
    """Whether every element of a flat tensor is a number."""
    return all(is_finite(values[where]) for where in blocks(values))


def scratch(numel: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Memory for what is worked out of one of the blocks of `numel` elements, made once for all of them."""
    return empty(min(BLOCK, numel) if like.device.type == "cpu" else numel, like, dtype)


def require_finite(values: torch.Tensor) -> None:
    """Raises `DivergedError` for NaN or infinity: what a coder makes of them looks like an ordinary message."""
    if not all_finite(values):
        raise no_number()


def no_number() -> DivergedError:
    """What is raised for an update that is not to be encoded."""
    return DivergedError("an update holds NaN or infinity, so it was not encoded: the training diverged.")


def require_in_float32(values: torch.Tensor) -> None:
    """Raises `DivergedError` for a number that float32, in which it is to travel, does not reach."""
    most = torch.finfo(torch.float32).max
    if values.dtype == torch.float64 and values.numel() and float(values.abs().max()) > most:
        raise DivergedError(
            f"an update holds {float(values.abs().max()):.3g}, beyond {most:.3g}, the largest number of the float32 in "
            "which its codec sends, so it was not encoded: the training diverged, or needs fp32, which sends float64 "
            "as it is."
        )


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
