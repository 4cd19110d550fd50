"""The processors of this machine."""

from __future__ import annotations

import os


def usable_processors() -> int:
    """The number of processors that this process may use; `taskset` and control groups for processors limit it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
