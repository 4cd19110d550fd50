"""What the system says of a process of this machine: whether it is stopped, and its processor time (Linux)."""

from __future__ import annotations

import os
from pathlib import Path

_STOPPED = ("T", "t")  # by a signal, by a debugger
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped the process; False where the system does not tell."""
    fields = _fields(pid)
    return bool(fields) and fields[0] in _STOPPED


def cpu_seconds(pid: int) -> float:
    """Processor seconds that the process has used; 0 where the system does not tell."""
    fields = _fields(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS if fields else 0.0


def _fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name of the program; none where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
