"""Block-wise work on flat tensors: several operations on one block read it from memory once, then from the cache.

On other devices than the CPU there is one block, since every operation there costs a launch. The host waits for the
device where it reads a number from it, so that a check reads one number. `to_host` checks with the copy that is needed
anyhow, and `to_device` copies to the device without waiting.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dure.errors import DivergedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK = 1 << 17
"""Elements of a block: half of a second-level cache of 1 MiB, and a multiple of the 256 elements that share a scale."""

_INFINITY = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80}
"""The bit pattern of infinity: all bits of the exponent, which are set in NaN too."""


def blocks(values: torch.Tensor) -> Iterator[slice]:
    """The slices of a flat tensor's blocks."""
    step = BLOCK if values.device.type == "cpu" else max(values.numel(), 1)
    for start in range(0, values.numel(), step):
        yield slice(start, min(start + step, values.numel()))


def is_finite(block: torch.Tensor) -> bool:
    """Whether no element is NaN or infinity. A finite sum proves it; only an infinite sum needs a second pass."""
    if block.device.type != "cpu":
        return math.isfinite(largest_magnitude(block).item())  # one read, also where a sum would overflow
    infinity = _INFINITY.get(block.dtype)
    if infinity is not None:  # sums of 16-bit floats are slow on a CPU
        return bool((block.view(torch.int16).numpy() & infinity).max(initial=0) < infinity)
    return math.isfinite(block.sum().item()) or bool(torch.isfinite(block).all())


def all_finite(values: torch.Tensor) -> bool:
    """Whether no element of a flat tensor is NaN or infinity."""
    return all(is_finite(values[where]) for where in blocks(values))


def largest_magnitude(values: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of a flat tensor, as a tensor without dimensions on its device; NaN if an element is."""
    return torch.linalg.vector_norm(values, math.inf) if values.numel() else values.new_zeros(())


def to_host(found: torch.Tensor, values: torch.Tensor) -> NDArray[Any]:
    """Copy the integers `found`, computed from `values`, to the host.

    Raises `DivergedError` for NaN and infinity. The result of this check is the last element of the copy, so that the
    host waits for the device once. On the CPU, where coders check before they compute, gives a view of `found`.
    """
    if found.device.type == "cpu":
        return found.numpy()
    finite = torch.isfinite(largest_magnitude(values)).reshape(1)
    copied: NDArray[Any] = torch.cat([found, finite.to(found.dtype)]).cpu().numpy()
    if not copied[-1]:
        raise not_finite()
    return copied[:-1]


def to_device(array: NDArray[Any] | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Copy an array or tensor of the host to the device of `like`; on the CPU, a view of it.

    The host does not wait: it may change or drop `array` after the call, since that is no pinned memory.
    """
    tensor = array if isinstance(array, torch.Tensor) else torch.from_numpy(array)
    return tensor.to(like.device, non_blocking=True)


def scratch(numel: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Uninitialized memory for the results of one block of a tensor of `numel` elements, to be used for every block."""
    return empty(min(BLOCK, numel) if like.device.type == "cpu" else numel, like, dtype)


def require_finite(values: torch.Tensor) -> None:
    """Raise `DivergedError` for NaN or infinity, since a receiver could not tell their message from an ordinary one."""
    if not all_finite(values):
        raise not_finite()


def not_finite() -> DivergedError:
    """The error for an update that holds NaN or infinity."""
    return DivergedError("an update holds NaN or infinity, so it was not encoded: the training diverged.")


def require_in_float32(values: torch.Tensor) -> None:
    """Raise `DivergedError` for a float64 number outside of the range of float32, the type on the wire."""
    most = torch.finfo(torch.float32).max
    if values.dtype == torch.float64 and values.numel() and float(values.abs().max()) > most:
        raise DivergedError(
            f"an update holds {float(values.abs().max()):.3g}, and its codec sends float32, whose largest number is "
            f"{most:.3g}, so it was not encoded: the training diverged, or needs fp32, which sends float64 unchanged."
        )


def empty(numel: int, like: torch.Tensor, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Uninitialized memory for `numel` elements of `dtype` on the device of `like`.

    NumPy allocates in large pages. PyTorch's small pages take as long at their first touch as the work itself.
    """
    if like.device.type != "cpu" or not numel:
        return torch.empty(numel, dtype=dtype, device=like.device)
    return torch.from_numpy(np.empty(numel * dtype.itemsize, np.uint8)).view(dtype)


def viewed(message: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A message as a tensor of `dtype`: a view, or a copy where its bytes are not aligned."""
    aligned = message.storage_offset() % dtype.itemsize == 0 and message.data_ptr() % dtype.itemsize == 0
    return (message if aligned else message.clone()).view(dtype)
