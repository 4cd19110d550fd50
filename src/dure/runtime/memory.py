"""Memory of this machine: how much processes can use, memory that they share, and locks on parts of it.

Shared memory has no name in a file system: the system frees it when the last process that has it mapped or open exits,
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
from pathlib import Path

import torch

from dure.errors import DureError, UsageError

PROCESS_NBYTES = 20_000_000
"""Bytes of a forked process without its models. A worker of `mnist-mlp` has 18 MB in /proc/PID/smaps_rollup."""

SHARD_PROCESS_NBYTES = 150_000_000
"""Bytes of a shard process without its models. It imports torch itself and has 156 MB in the same file."""

MODELS = 4
"""Vectors of the model's size in a process, at least: parameters, a gradient, and buffers of messages."""


def physical_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


UNLIMITED = 1 << 62
"""The least value by which version 1 of control groups says that there is no limit."""

_MEMBERSHIP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def memory_limit(membership: Path = _MEMBERSHIP, groups: Path = _GROUPS) -> int | None:
    """Bytes of memory that the control groups of this process allow; None without a limit (and without Linux).

    A line of `membership` is NUMBER:CONTROLLERS:PATH. Version 2 has number 0 and the limit `memory.max`; version 1 has
    the controller memory and `memory.limit_in_bytes`. The limit of a group holds for the groups in it.
    """
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = []
    for number, controllers, path in (line.split(":", 2) for line in lines):
        if number == "0" and not controllers:
            found += _limits(groups, path, "memory.max")
        elif "memory" in controllers.split(","):
            found += _limits(groups / "memory", path, "memory.limit_in_bytes")
    return min((limit for limit in found if limit < UNLIMITED), default=None)


def _limits(root: Path, path: str, name: str) -> list[int]:
    """The limits of a group and of those around it. In a container some of them cannot be seen."""
    group, found = root / path.strip("/"), []
    for each in (group, *group.parents):
        if each != root and root not in each.parents:
            break
        file = each / name
        text = file.read_text(encoding="utf-8").strip() if file.exists() else "max"
        found += [int(text)] if text != "max" else []
    return found


def usable_memory() -> int:
    """Bytes of memory that the processes of this control group can use together."""
    return min(physical_memory(), memory_limit() or physical_memory())


def check_memory(processes: int, nbytes: int, memory: int, *, own: int = PROCESS_NBYTES, instead: str = "") -> None:
    """Raise `UsageError` if the processes, with a model of `nbytes` bytes each, cannot fit in `memory` bytes.

    `own` is the size of a process without its model; `instead` is the advice in the message.
    """
    needed = processes * (own + MODELS * nbytes)
    if needed > memory:
        right = instead or 'take fewer workers and shards, or simulate them (on="virtual")'
        raise UsageError(
            f"{processes} processes take {needed / 1e9:.0f} GB at least, and this machine has {memory / 1e9:.0f}: "
            f"{right}."
        )


LOCK_SECONDS = 300.0
"""Time limit of a wait for a lock. Locks are held for microseconds; a frozen holder is killed earlier."""

_EAGER = 100  # tries of a lock that only yield the processor: it is mostly free again within microseconds
_NAP = 20e-6  # seconds between later tries
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if sys.platform == "linux" else 0


class MappedMemory:
    """`nbytes` bytes that several processes can map. `bytes` is the memory as a flat tensor of uint8.

    Raises `DureError` where the system has no such memory, or not enough.
    """

    def __init__(self, nbytes: int) -> None:
        if sys.platform != "linux":
            raise DureError("processes share memory under Linux only. Train in virtual time, or over ps.")
        there = physical_memory()
        if nbytes > there:  # the system would grant them, and kill a process that writes to missing pages
            raise DureError(f"{nbytes:,} bytes of memory to share are more than this machine has, {there:,}.")
        self._file = os.memfd_create("dure", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._file, max(nbytes, 1))  # an empty file cannot be mapped
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
        weakref.finalize(self._mapped, function)  # each tensor of `bytes` refers to the map

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
        # Tries in place of one call that waits: such a call has no time limit.
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
