"""No worker leads the slowest by more than a bound."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dure.topology.parameter_server.policies.base import Accept, Close, Start, Verdict
from dure.topology.parameter_server.policies.roster import Clocks


class Bounded:
    """A worker may start its clock c once every live clock is at least c - lead; each update is a group.

    With ``lead=0`` a worker that starts clock c gets the version made when the slowest reached c: the snapshot
    of all updates up to there and of no other. With more, it gets the newest. ``lead=inf`` never waits.

    Raises:
        ValueError: `lead` is negative or no number.
    """

    may_refuse = False
    ordered = True

    def __init__(self, lead: float) -> None:
        if not lead >= 0:
            raise ValueError(f"lead counts clocks and must be >= 0, got {lead}. Use 0 for BSP or math.inf for ASP.")
        self.lead = lead if lead == math.inf else math.floor(lead)
        self.clocks = Clocks()
        self.version = 0
        self._snapshot = 0
        self._waiting: dict[float, list[int]] = {}

    @property
    def floor(self) -> int | None:
        return None if self.lead else self._snapshot

    def join(self, worker: int) -> list[Verdict]:
        self.clocks.join(worker)
        return []

    def leave(self, worker: int) -> list[Verdict]:
        needed = self.clocks[worker] - self.lead
        if worker in self._waiting.get(needed, ()):
            self._waiting[needed].remove(worker)
        slowest = self.clocks.minimum
        self.clocks.leave(worker)
        return self._release(slowest)

    finish = leave

    def ask(self, worker: int) -> list[Verdict]:
        needed = self.clocks[worker] - self.lead
        if self.clocks.minimum >= needed:
            return [self._start(worker)]
        self._waiting.setdefault(needed, []).append(worker)
        return []

    def offer(self, worker: int, base: int) -> list[Verdict]:
        return [Accept(worker, self.version)]

    def staged(self, worker: int, group: int | None, seq: int) -> list[Verdict]:
        close = Close(self.version, ((worker, seq),))
        self.version += 1
        slowest = self.clocks.minimum
        self.clocks.advance(worker)
        return [close, *self._release(slowest)]

    def _start(self, worker: int) -> Verdict:
        return Start(worker, self.version if self.lead else self._snapshot)

    def _release(self, before: int) -> list[Verdict]:
        """Start the workers that waited for the slowest clock to move beyond `before`."""
        if self.clocks.minimum == before:
            return []
        self._snapshot = self.version
        reached = range(before + 1, self.clocks.minimum + 1) if self._waiting else ()
        return [self._start(worker) for needed in reached for worker in self._waiting.pop(needed, ())]

    def state(self) -> dict[str, Any]:
        return {"version": self.version, "clocks": self.clocks.state(), "snapshot": self._snapshot}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.version = int(state["version"])
        self.clocks.restore(state["clocks"])
        self._snapshot = int(state["snapshot"])
