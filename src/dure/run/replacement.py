"""Processes that a run can lose, and that are started again alone: companions, and workers of methods that go on.

A failure is *in vain* if the process was not killed, or has reported no progress since its start. Each failure in vain
doubles the pause before the next start, and progress resets it. After too many in a row the process is given up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

AGAIN_SECONDS = 0.05
"""Seconds until a process is started again; twice as long for each failure in vain before."""

GONE_SECONDS = 10.0
"""Seconds after which a failed process without a reported exit is gone: under torchrun, only rank 0 reports exits."""


class Replacements:
    """Says which failed processes are to be started now. `progress` gives what a process has reported so far."""

    def __init__(self, progress: Callable[[str], Any]) -> None:
        self._progress = progress
        self._at_start: dict[str, Any] = {}
        self._in_vain: Counter[str] = Counter()
        self._due: dict[str, float] = {}

    @property
    def awaited(self) -> Collection[str]:
        """Failed processes that will be started again."""
        return self._due.keys()

    def begin(self, name: str) -> None:
        """Note that a process begins to work."""
        self._at_start[name] = self._progress(name)

    def failed(self, name: str, now: float) -> None:
        """Schedule the start of a process that has failed."""
        self._due[name] = now + AGAIN_SECONDS * 2 ** self._in_vain[name]

    def gone(self, now: float, exited: Mapping[str, int]) -> list[str]:
        """The failed processes whose exit nobody reports."""
        return [name for name, when in self._due.items() if when + GONE_SECONDS <= now and name not in exited]

    def give_up(self, name: str) -> None:
        """Do not start a process again."""
        self._due.pop(name, None)

    def due(self, now: float, exited: Mapping[str, int]) -> list[str]:
        """The processes to be started now: their back-off is over, and their earlier processes have ended."""
        found = [name for name, when in self._due.items() if when <= now and name in exited]
        for name in found:
            del self._due[name]
            killed = exited[name] < 0
            progressed = self._progress(name) != self._at_start.get(name, self._progress(name))
            self._in_vain[name] = 0 if killed and progressed else self._in_vain[name] + 1
            self._at_start[name] = self._progress(name)  # it may fail before it begins
        return found

    def in_vain(self, name: str) -> int:
        """The last failures of a process in a row that were in vain."""
        return self._in_vain[name]
