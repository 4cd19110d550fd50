"""Memory that processes of one machine share, and locks on parts of it.

The system keeps it under no name: it is there while a process has it mapped or open, and gone with the last one,
however that ended. Another process of the same user maps it too, given its `path` under /proc, for as long as
the process that made it lives. Locks belong to processes, so that the death of one releases what it held.
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
"""How long to wait for a lock. One is held for microseconds; a frozen holder is killed before, which releases it."""

_NAP = 20e-6
_EAGER = 100
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if sys.platform == "linux" else 0


class MappedMemory:
    """`nbytes` bytes that several processes see. `bytes` is them as a flat tensor of uint8.

    Raises `DureError` where the system has no such memory, or not enough.
    """

    def __init__(self, nbytes: int) -> None:
        if sys.platform != "linux":
            raise DureError("processes share memory under Linux only. Train in virtual time, or over ps.")
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if nbytes > there:  # the system would give them, and kill whoever writes to what is missing
            raise DureError(f"{nbytes:,} bytes of memory to share are more than this machine has, {there:,}.")
        self._file = os.memfd_create("dure", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._file, max(nbytes, 1))
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._map()

    @classmethod
    def of(cls, path: str) -> MappedMemory:
        """That of another process of this machine, whose `path` it is."""
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
        if sealed & _SEALS != _SEALS:  # whoever reads behind the end of a file is killed
            raise DureError(f"{path} may shrink while it is mapped: it is not memory that dure has made.")
        self._map()
        return self

    @property
    def file(self) -> int:
        """The descriptor that others open under /proc."""
        return self._file

    def close(self) -> None:
        """Others can't find it any more, and it has no locks; what is mapped stays as long as `bytes` is used."""
        os.close(self._file)

    def when_unmapped(self, function: Callable[[], None]) -> None:
        """Call `function`, which does not know `self`, when nobody in this process uses `bytes` any more."""
        weakref.finalize(self._mapped, function)

    def _map(self) -> None:
        self._mapped = mmap.mmap(self._file, os.fstat(self._file).st_size)
        self.bytes = torch.frombuffer(self._mapped, dtype=torch.uint8)

    @contextmanager
    def hold(self, first: int, count: int = 1) -> Iterator[None]:
        """Have the locks `first` and the `count` - 1 after it to oneself: numbers, which guard what one likes."""
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
            except (BlockingIOError, PermissionError):  # what POSIX lets a system say
                tries += 1
            else:
                return
            if tries < _EAGER:
                os.sched_yield()
                continue
            now = time.monotonic()
            deadline = deadline or now + LOCK_SECONDS
            if now > deadline:
                raise DureError(f"a lock on shared memory was held for {LOCK_SECONDS:g} s: its holder stands still.")
            time.sleep(_NAP)
