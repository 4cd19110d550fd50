"""The context of one computation: gradients, random generators and threads."""

from __future__ import annotations

import hashlib
from typing import Any

import torch


def seed_of(*parts: int) -> int:
    """A seed for the random layers of one computation, of the 32 bits that PyTorch's CPU generator uses.

    >>> seed_of(0, 1, 2) == seed_of(0, 1, 2), seed_of(0, 1, 2) == seed_of(0, 2, 1)
    (True, False)
    """
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


class Isolated:
    """Context of one computation: enables gradients, seeds PyTorch's generators, and uses one thread if `exact`.

    On exit it restores the previous settings. With `seed=None` the generators stay as they are. It is a class, since
    three nested `contextmanager` functions take a tenth of a small model's step.
    """

    __slots__ = ("_device", "_exact", "_fork", "_grad", "_on_host", "_seed", "_state", "_threads")

    def __init__(self, exact: bool, seed: int | None, device: torch.device) -> None:
        self._exact = exact
        self._seed = seed
        self._device = device
        self._on_host = device.type in ("cpu", "meta")

    def __enter__(self) -> None:
        self._threads = torch.get_num_threads() if self._exact else 1
        if self._threads != 1:
            torch.set_num_threads(1)
        self._grad = torch.is_grad_enabled()
        if not self._grad:
            torch.set_grad_enabled(True)
        if self._seed is None:
            return
        if self._on_host:
            self._state = torch.get_rng_state()  # costs a fiftieth of fork_rng
            torch.default_generator.manual_seed(self._seed)
        else:
            self._fork = torch.random.fork_rng([self._device], device_type=self._device.type)
            self._fork.__enter__()
            torch.default_generator.manual_seed(self._seed)  # `torch.manual_seed` would seed all devices, also others
            with torch.accelerator.device_index(self._device.index):
                torch.get_device_module(self._device).manual_seed(self._seed)

    def __exit__(self, *error: Any) -> None:
        if self._seed is not None and self._on_host:
            torch.set_rng_state(self._state)
        elif self._seed is not None:
            self._fork.__exit__(*error)
        if not self._grad:
            torch.set_grad_enabled(False)
        if self._threads != 1:
            torch.set_num_threads(self._threads)
