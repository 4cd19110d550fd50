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
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dure.errors import DureError

LOCK_SECONDS = 30.0
"""How long to wait for a lock: they are held for microseconds, so that whoever holds one as long is frozen."""

_NAP = 20e-6
_EAGER = 100


class Memory:
    """`nbytes` bytes that several processes see. `bytes` is them as a flat tensor of uint8.

    Raises `DureError` where the system has no such memory, or not enough.
    """

    def __init__(self, nbytes: int) -> None:
        if sys.platform != "linux":
            raise DureError("processes share memory under Linux only. Train in virtual time, or over ps.")
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if nbytes > there:  # the system would give them, and kill whoever writes to what is missing
            raise DureError(f"{nbytes:,} bytes of memory to share are more than this machine has, {there:,}.")
        self._file = os.memfd_create("dure", os.MFD_CLOEXEC)
        os.ftruncate(self._file, max(nbytes, 1))
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._map()

    @classmethod
    def of(cls, path: str) -> Memory:
        """That of another process of this machine, whose `path` it is."""
        self = cls.__new__(cls)
        self.path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise DureError(
                f"the memory to share is not on this machine, or of another user ({path}: {error.strerror}). "
                "Methods on shared memory need all processes on one machine."
            ) from error
        self._map()
        return self

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
