"""The memory of tensors that live at the same time, counted at each operation of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Peak(TorchDispatchMode):
    """Counts the bytes of tensors made inside that live, at each operation; `nbytes` is the largest count.

    A tensor counts from `least` bytes on, so that activations of one sample need not.
    """

    def __init__(self, least: int = 1 << 12) -> None:
        super().__init__()
        self.nbytes = 0
        self._least = least
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self._before: set[int] = set()

    def without(self, *tensors: torch.Tensor) -> Peak:
        """Leave out the memory of tensors that exist."""
        self._before |= {tensor.untyped_storage()._cdata for tensor in tensors}
        return self

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        gave = func(*args, **kwargs or {})
        for each in gave if isinstance(gave, list | tuple) else [gave]:
            if isinstance(each, torch.Tensor) and each.layout == torch.strided and each.device.type == "cpu":
                storage = each.untyped_storage()
                if storage.nbytes() >= self._least and storage._cdata not in self._before:
                    self._seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._seen = {key: (ref, size) for key, (ref, size) in self._seen.items() if not ref.expired()}
        self.nbytes = max(self.nbytes, sum(size for _, size in self._seen.values()))
        return gave
