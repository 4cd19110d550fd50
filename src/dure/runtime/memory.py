"""Memory that processes of one machine share, and locks on parts of it.

The memory has no name in a file system: the system frees it when the last process that has it mapped or open exits,
however that process ends. Another process of the same user can map it by its `path` under /proc while the process that
made it runs. Locks belong to processes, so the end of a process releases its locks.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from dure.errors import DureError

LOCK_SECONDS = 300.0
"""Time limit of a wait for a lock. Locks are held for microseconds; a frozen holder is killed earlier."""

_NAP = 20e-6
_EAGER = 100
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if sys.platform == "linux" else 0


class MappedMemory:
    """`nbytes` bytes that several processes can map. `bytes` is the memory as a flat tensor of uint8.

    Raises `DureError` where the system has no such memory, or not enough.
    """

    def __init__(self, nbytes: int) -> None:
        if sys.platform != "linux":
            raise DureError("processes share memory under Linux only. Train in virtual time, or over ps.")
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if nbytes > there:  # the system would grant them, and kill a process that writes to missing pages
            raise DureError(f"{nbytes:,} bytes of memory to share are more than this machine has, {there:,}.")
        self._file = os.memfd_create("dure", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._file, max(nbytes, 1))
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._map()

    @classmethod
    def of(cls, path: str) -> MappedMemory:
        """Map the memory that another process of this machine has made, by its `path`."""
        self = cls.__new__(cls)
        self.path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            sealed = fcntl.fcntl(self._file, fcntl.F_GET_SEALS)
        except OSError as error:
            raise DureError(
                f"the memory to share is not on this machine, or of another user ({path}: {error.strerror}). "
                "Methods on shared memory need all processes on one machine."
            ) from error
        if sealed & _SEALS != _SEALS:  # a process that reads behind the end of a file is killed
            raise DureError(f"{path} may shrink while it is mapped: it is not memory that dure has made.")
        self._map()
        return self

    @property
    def file(self) -> int:
        """The descriptor that other processes open under /proc."""
        return self._file

    def close(self) -> None:
        """Close the file: no other process can map it, and its locks are released. `bytes` stays valid."""
        os.close(self._file)

    def when_unmapped(self, function: Callable[[], None]) -> None:
        """Call `function` once no tensor of this process uses `bytes`. It must not refer to `self`."""
        weakref.finalize(self._mapped, function)

    def _map(self) -> None:
        self._mapped = mmap.mmap(self._file, os.fstat(self._file).st_size)
        self.bytes = torch.frombuffer(self._mapped, dtype=torch.uint8)

    @contextmanager
    def hold(self, first: int, count: int = 1) -> Iterator[None]:
        """Hold the locks `first` to `first + count - 1`. Callers decide what each number guards."""
        self._acquire(first, count)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, count, first)

    def _acquire(self, first: int, count: int) -> None:
        deadline = None
        tries = 0
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, count, first)
            except (BlockingIOError, PermissionError):  # POSIX allows either
                tries += 1
            else:
                return
            if tries < _EAGER:
                os.sched_yield()
                continue
            now = time.monotonic()
            deadline = deadline or now + LOCK_SECONDS
            if now > deadline:
                raise DureError(f"a lock on shared memory was held for {LOCK_SECONDS:g} s: its holder is frozen.")
            time.sleep(_NAP)
