"""Any updates make a version, stale ones too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dure.topology.parameter_server.policies.base import Accept, End, Start, Verdict
from dure.topology.parameter_server.policies.open_group import OpenGroup
from dure.topology.parameter_server.policies.roster import Roster


class AnyOf:
    """Any K updates make a version, whatever versions they were computed on; no update is refused or aborted.

    `distinct`: a worker whose update is in the open group waits until it closes; otherwise no worker waits. `quorum`
    gives K for a number of workers (`OpenGroup`).
    """

    may_refuse = False
    ordered = True
    floor = None

    def __init__(self, quorum: Callable[[int], int], *, distinct: bool) -> None:
        self._roster = Roster()
        self.clocks = self._roster.clocks
        self.group = OpenGroup(self._roster, quorum, distinct=distinct)
        self.version = 0

    def join(self, worker: int) -> list[Verdict]:
        self.group.join(worker)
        return []

    def finish(self, worker: int) -> list[Verdict]:
        self.group.finish()
        return self.leave(worker)

    def leave(self, worker: int) -> list[Verdict]:
        self.group.leave(worker)
        return self._close_if_complete()

    def ask(self, worker: int) -> list[Verdict]:
        if worker not in self.group.spent and not self.group.is_over:
            return [Start(worker, self.version)]
        self._roster.waiting.append(worker)
        return self._close_if_complete()

    def offer(self, worker: int, base: int) -> list[Verdict]:
        return [Accept(worker, self.version)]

    def staged(self, worker: int, group: int | None, seq: int) -> list[Verdict]:
        self.clocks.advance(worker)
        self.group.add(worker, seq)
        return self._close_if_complete()

    def _close_if_complete(self) -> list[Verdict]:
        group = self.group
        if group.is_over:
            return [End(worker) for worker in self._roster.release()]
        if not group.members or (len(group.members) < group.size and not group.has_all):
            return []
        close = group.close(self.version)
        self.version += 1
        return [close, *(Start(worker, self.version) for worker in sorted(self._roster.release()))]

    def state(self) -> dict[str, Any]:
        return {"version": self.version, **self.group.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.version = int(state["version"])
        self.group.restore(state)
