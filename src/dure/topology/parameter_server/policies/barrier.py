"""All workers wait for each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dure.topology.parameter_server.policies.base import Accept, Close, Start, Verdict
from dure.topology.parameter_server.policies.roster import Roster


class Barrier:
    """A group is one update of every live worker, and those that workers staged before they left."""

    may_refuse = False
    ordered = True
    floor = None

    def __init__(self) -> None:
        self._roster = Roster()
        self.clocks = self._roster.clocks
        self.version = 0
        self._staged: list[tuple[int, int]] = []

    def join(self, worker: int) -> list[Verdict]:
        self._roster.join(worker)
        return []

    def leave(self, worker: int) -> list[Verdict]:
        self._roster.leave(worker)
        return self._close_if_complete()

    finish = leave

    def ask(self, worker: int) -> list[Verdict]:
        if self.clocks[worker] == self.version:
            return [Start(worker, self.version)]
        self._roster.waiting.append(worker)
        return []

    def offer(self, worker: int, base: int) -> list[Verdict]:
        return [Accept(worker, self.version)]

    def staged(self, worker: int, group: int | None, seq: int) -> list[Verdict]:
        self._staged.append((worker, seq))
        self.clocks.advance(worker)
        return self._close_if_complete()

    def _close_if_complete(self) -> list[Verdict]:
        if self.clocks.minimum == self.version:
            return []
        close = Close(self.version, tuple(sorted(self._staged)))
        self._staged = []
        self.version += 1
        return [close, *(Start(worker, self.version) for worker in sorted(self._roster.release()))]

    def state(self) -> dict[str, Any]:
        return {"version": self.version, "clocks": self.clocks.state(), "staged": self._staged}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.version = int(state["version"])
        self.clocks.restore(state["clocks"])
        self._staged = [(int(worker), int(seq)) for worker, seq in state["staged"]]
