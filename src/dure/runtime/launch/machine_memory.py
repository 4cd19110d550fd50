"""The memory of this machine, and what processes need of it at least."""

from __future__ import annotations

import os

from dure.errors import UsageError

PROCESS_NBYTES = 20_000_000
"""Bytes of a forked process, its models apart: of a worker of `mnist-mlp`, 18 MB in /proc/PID/smaps_rollup."""

SHARD_PROCESS_NBYTES = 150_000_000
"""Bytes of a helper process, its models apart: 156 MB of a server, which imports torch anew, in the same file."""

MODELS = 4
"""Vectors of the model's size that a process has at least: parameters, a gradient, and room for what comes and goes."""


def physical_memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_memory(processes: int, nbytes: int, memory: int, *, own: int = PROCESS_NBYTES, instead: str = "") -> None:
    """Raise `UsageError` if so many processes, with a model of `nbytes` bytes each, cannot fit in `memory` bytes.

    `own` are the bytes of a process without its model; `instead` is said to be right.
    """
    needed = processes * (own + MODELS * nbytes)
    if needed > memory:
        right = instead or 'take fewer workers and shards, or simulate them (on="virtual")'
        raise UsageError(
            f"{processes} processes take {needed / 1e9:.0f} GB at least, and this machine has {memory / 1e9:.0f}: "
            f"{right}."
        )
