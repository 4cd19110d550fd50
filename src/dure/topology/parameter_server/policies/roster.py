"""The live workers of a policy: their clocks, and which of them wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Clocks:
    """The clock of every live worker: how many updates it has staged.

    Workers are counted per clock value, so that `minimum` costs O(1) a step, amortised, for any number of
    workers. When no worker is left, the minimum is the highest clock ever reached.
    """

    __slots__ = ("_at", "_of", "_top", "minimum")

    def __init__(self) -> None:
        self.minimum = 0
        self._of: dict[int, int] = {}
        self._at: dict[int, int] = {}
        self._top = 0

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, worker: object) -> bool:
        return worker in self._of

    def __getitem__(self, worker: int) -> int:
        return self._of[worker]

    def join(self, worker: int) -> None:
        """Start a newcomer at the slowest clock."""
        self._of[worker] = self.minimum
        self._at[self.minimum] = self._at.get(self.minimum, 0) + 1

    def leave(self, worker: int) -> None:
        self._drop(self._of.pop(worker))

    def advance(self, worker: int) -> int:
        """One more update of `worker`; its new clock."""
        clock = self._of[worker]
        self._of[worker] = clock + 1
        self._at[clock + 1] = self._at.get(clock + 1, 0) + 1
        self._top = max(self._top, clock + 1)
        self._drop(clock)
        return clock + 1

    def advance_all(self) -> None:
        """One more update of every worker, all at the same clock."""
        for worker in self._of:
            self._of[worker] += 1
        self._at = {clock + 1: count for clock, count in self._at.items()}
        self.minimum += 1
        self._top = max(self._top + 1, self.minimum)

    def _drop(self, clock: int) -> None:
        self._at[clock] -= 1
        if not self._at[clock]:
            del self._at[clock]
            if not self._of:
                self.minimum = self._top
            elif clock == self.minimum:
                while self.minimum not in self._at:
                    self.minimum += 1

    def state(self) -> dict[str, Any]:
        return {"of": sorted(self._of.items()), "minimum": self.minimum, "top": self._top}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._of = {int(worker): int(clock) for worker, clock in state["of"]}
        self._at = {}
        for clock in self._of.values():
            self._at[clock] = self._at.get(clock, 0) + 1
        self.minimum, self._top = int(state["minimum"]), int(state["top"])


class Roster:
    """The live workers of a run, and those that wait to start their next step, in the order in which they asked."""

    __slots__ = ("clocks", "waiting")

    def __init__(self) -> None:
        self.clocks = Clocks()
        self.waiting: list[int] = []

    def __len__(self) -> int:
        return len(self.clocks)

    def join(self, worker: int) -> None:
        self.clocks.join(worker)

    def leave(self, worker: int) -> None:
        self.clocks.leave(worker)
        if worker in self.waiting:
            self.waiting.remove(worker)

    def release(self) -> list[int]:
        """All that wait, which do so no longer."""
        released, self.waiting = self.waiting, []
        return released
