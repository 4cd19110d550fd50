"""The first updates of a version make the next one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dure.topology.parameter_server.policies.base import Abort, Accept, End, Refuse, Start, Verdict
from dure.topology.parameter_server.policies.open_group import OpenGroup
from dure.topology.parameter_server.policies.roster import Roster


class FirstOf:
    """The first K updates of the newest version make the next; workers that still compute on it are stopped.

    `distinct`: no worker has two updates in one group, and all clocks are the version; otherwise a fast worker may give
    several, and clocks count mini-batches, wasted ones too. `quorum` gives K for a number of workers (`OpenGroup`).

    An accepted offer holds one of the K places until it is staged, and counts unless its worker fails. While the places
    are held, further offers wait: for a place to become free, or for the group to close, which refuses them.
    """

    may_refuse = True
    ordered = True
    floor = None

    def __init__(self, quorum: Callable[[int], int], *, distinct: bool) -> None:
        self._roster = Roster()
        self.clocks = self._roster.clocks
        self.group = OpenGroup(self._roster, quorum, distinct=distinct)
        self.version = 0
        self._working: set[int] = set()
        self._accepted: set[int] = set()
        self._offering: list[int] = []

    def join(self, worker: int) -> list[Verdict]:
        self.group.join(worker)
        return self._go_on()

    def finish(self, worker: int) -> list[Verdict]:
        self.group.finish()
        return self.leave(worker)

    def leave(self, worker: int) -> list[Verdict]:
        self.group.leave(worker)
        if worker in self._offering:
            self._offering.remove(worker)
        self._working.discard(worker)
        self._accepted.discard(worker)
        return self._go_on()

    def ask(self, worker: int) -> list[Verdict]:
        self._accepted.discard(worker)
        self._working.discard(worker)
        self._roster.waiting.append(worker)
        return self._go_on()

    def offer(self, worker: int, base: int) -> list[Verdict]:
        if worker in self._accepted:
            return [Accept(worker, self.version)]
        if base != self.version or worker in self.group.spent:
            return [Refuse(worker, f"version {base} was complete without it.")]
        self._working.discard(worker)
        self._offering.append(worker)
        return self._go_on()

    def staged(self, worker: int, group: int | None, seq: int) -> list[Verdict]:
        self._accepted.discard(worker)
        self.group.add(worker, seq)
        if not self.group.distinct:
            self.clocks.advance(worker)
        return self._go_on()

    def _go_on(self) -> list[Verdict]:
        """Give free places to offers, start workers if places are left, and close the group if it is complete."""
        if self.group.is_over:
            return self._end()
        verdicts: list[Verdict] = []
        while self._offering and self._has_room():
            worker = self._offering.pop(0)
            self._accepted.add(worker)
            verdicts.append(Accept(worker, self.version))
        if self._has_room():
            verdicts += self._start([worker for worker in self._roster.waiting if worker not in self.group.spent])
        if self.group.members and not self._accepted and (self.group.has_all or not self._has_room()):
            verdicts += self._close()
        return verdicts

    def _end(self) -> list[Verdict]:
        """End the work of all that wait; no further update counts."""
        verdicts: list[Verdict] = [Refuse(worker, "too few workers are left.") for worker in self._offering]
        verdicts += [End(worker) for worker in self._roster.release()]
        self._offering = []
        return verdicts

    def _has_room(self) -> bool:
        return len(self.group.members) + len(self._accepted) < self.group.size

    def _start(self, workers: list[int]) -> list[Verdict]:
        self._roster.waiting = [worker for worker in self._roster.waiting if worker not in workers]
        self._working.update(workers)
        return [Start(worker, self.version) for worker in workers]

    def _close(self) -> list[Verdict]:
        verdicts: list[Verdict] = [self.group.close(self.version)]
        verdicts += [Refuse(worker, f"version {self.version} is complete without it.") for worker in self._offering]
        verdicts += [Abort(worker, self.version) for worker in sorted(self._working)]
        if self.group.distinct:
            self.clocks.advance_all()
        else:
            for worker in (*self._offering, *sorted(self._working)):
                self.clocks.advance(worker)
        self.version += 1
        self._offering, self._working = [], set()
        return verdicts + self._start(sorted(self._roster.waiting))

    def state(self) -> dict[str, Any]:
        return {"version": self.version, **self.group.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.version = int(state["version"])
        self.group.restore(state)
