"""The memory of this machine, and the least memory that processes need."""

from __future__ import annotations

import os
from pathlib import Path

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
