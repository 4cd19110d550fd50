"""The memory of this machine, and the least memory that processes need."""

from __future__ import annotations

import os

from dure.errors import UsageError

PROCESS_NBYTES = 20_000_000
"""Bytes of a forked process without its models. A worker of `mnist-mlp` has 18 MB in /proc/PID/smaps_rollup."""

SHARD_PROCESS_NBYTES = 150_000_000
"""Bytes of a shard process without its models. It imports torch itself and has 156 MB in the same file."""

MODELS = 4
"""Vectors of the model's size in a process, at least: parameters, a gradient, and buffers of messages."""


def physical_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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
