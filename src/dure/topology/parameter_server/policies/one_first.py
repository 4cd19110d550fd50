"""One worker is ahead before all others start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dure.topology.parameter_server.policies.base import Accept, Start, Verdict
from dure.topology.parameter_server.policies.roster import Roster


class OneFirst:
    """The first worker that asks goes ahead alone; once it makes an offer, all may start, for good.

    If it leaves before, the next that waits takes its place. Version 0 is before the offer, version 1 after it.
    """

    may_refuse = False
    ordered = False
    floor = None

    def __init__(self) -> None:
        self._roster = Roster()
        self.clocks = self._roster.clocks
        self.version = 0
        self._ahead: int | None = None

    def join(self, worker: int) -> list[Verdict]:
        self._roster.join(worker)
        return []

    def leave(self, worker: int) -> list[Verdict]:
        self._roster.leave(worker)
        if worker != self._ahead:
            return []
        self._ahead = None
        waiting = self._roster.waiting
        return self.ask(waiting.pop(0)) if waiting else []

    finish = leave

    def ask(self, worker: int) -> list[Verdict]:
        if self.version == 0 and self._ahead is None:
            self._ahead = worker
        if self.version or self._ahead == worker:
            return [Start(worker, self.version)]
        self._roster.waiting.append(worker)
        return []

    def offer(self, worker: int, base: int) -> list[Verdict]:
        self.version = 1
        return [Accept(worker, 0), *(Start(each, 1) for each in self._roster.release())]

    def staged(self, worker: int, group: int | None, seq: int) -> list[Verdict]:
        return []

    def state(self) -> dict[str, Any]:
        return {"version": self.version, "ahead": self._ahead, "clocks": self.clocks.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.version, self._ahead = int(state["version"]), state["ahead"]
        self.clocks.restore(state["clocks"])
