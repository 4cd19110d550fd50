"""The bytes of all tensors' storages that exist at once, and the resident memory of this process.

Shared by the scripts that hold measured memory beside a formula.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from traceback import extract_stack
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WITH_ORIGIN = 1 << 20
"""Least bytes of a storage whose origin is noted: the stack of a call costs as much as a small operation."""


class Stored(NamedTuple):
    """A storage at the peak: its bytes, and the lines of code that made it, the innermost last."""

    nbytes: int
    origin: str


class LiveStorage(TorchDispatchMode):
    """While entered, sums the bytes of the storages that operations have made and that still exist.

    The sum is taken after each operation, those of backward included. `peak` is the largest sum since `begin`.
    A storage counts once, with the bytes that it has at that moment: one that was resized to nothing counts as nothing.
    Storages that an operation makes and frees again inside are not seen, nor those from before.
    """

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], str]] = {}
        self.begin()

    def begin(self) -> None:
        """Forget the peak, not the storages."""
        self.peak, self._at_peak = 0, list[Stored]()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # then it calls operations of its local tensors, which come here
        found = func(*args, **kwargs or {})
        for each in tree_leaves(found):
            if isinstance(each, Tensor) and each.untyped_storage().device.type != "meta":  # shapes take no memory
                self._note(each.untyped_storage())
        self.sample()
        return found

    def sample(self) -> int:
        """The bytes of all storages now."""
        stored = [
            (storage.nbytes(), origin) for each, origin in list(self._live.values()) if (storage := each()) is not None
        ]
        total = sum(nbytes for nbytes, _ in stored)
        if total > self.peak:
            self.peak = total
            self._at_peak = [Stored(*each) for each in stored]
        return total

    def largest(self, count: int) -> list[Stored]:
        """The largest storages at the peak."""
        return sorted(self._at_peak, reverse=True)[:count]

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key not in self._live:
            origin = _origin() if storage.nbytes() >= WITH_ORIGIN else ""
            self._live[key] = weakref.ref(storage, lambda _: self._live.pop(key, None)), origin

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._live.clear()


def _origin() -> str:
    lines = [each for each in extract_stack() if "/torch/" not in each.filename and each.filename != __file__]
    return " > ".join(f"{Path(each.filename).stem}:{each.lineno}" for each in lines[-3:])


class Resident:
    """The resident memory of a process in bytes, this one by default, as Linux counts it."""

    def __init__(self, pid: int | str = "self") -> None:
        self._folder = Path(f"/proc/{pid}")

    def begin(self) -> None:
        """Forget the most so far."""
        (self._folder / "clear_refs").write_text("5", encoding="ascii")

    @property
    def now(self) -> int:
        """The pages of the process that are in memory."""
        return self._field("status", "VmRSS")

    @property
    def peak(self) -> int:
        """The most since `begin`, or since the process began."""
        return self._field("status", "VmHWM")

    @property
    def share(self) -> int:
        """The pages in memory, each divided by the number of processes that have it."""
        return self._field("smaps_rollup", "Pss")

    def _field(self, file: str, name: str) -> int:
        text = (self._folder / file).read_text(encoding="ascii")
        return int(text.partition(f"{name}:")[2].split()[0]) * 1024


def peak_of(live: LiveStorage, work: Callable[[], Any]) -> int:
    """The most bytes of storages during `work`."""
    live.begin()
    work()
    live.sample()
    return live.peak
