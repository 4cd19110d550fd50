"""State of a process of this machine, from the system (Linux): whether it is stopped, and its processor time."""

from __future__ import annotations

import os
from pathlib import Path

_STOPPED = ("T", "t")  # by a signal, by a debugger
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped the process; False where /proc does not exist."""
    fields = _fields(pid)
    return bool(fields) and fields[0] in _STOPPED


def cpu_seconds(pid: int) -> float:
    """Processor seconds that the process has used; 0 where /proc does not exist."""
    fields = _fields(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS if fields else 0.0


def _fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name of the program; none if the process does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
