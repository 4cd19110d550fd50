"""Policies of admission: which worker may start, which updates count, and when a version is complete.

A policy is a state machine. It takes events and returns decisions; it has no input or output, no time and no
randomness, so that tests can try all orders of events.

    event                      meaning                                       decisions it may lead to
    join(worker)               a newcomer; it enters at the slowest clock    Start
    finish(worker)             it has done its work                          Close, Start, Accept, Refuse, End
    leave(worker)              it has failed, or was evicted                 Close, Start, Accept, Refuse
    ask(worker)                it is at a step boundary                      Start, at once or later, or End
    offer(worker, base)        it has an update, computed on version `base`  Accept or Refuse, for it
    staged(worker, group, seq) every shard has staged its update             Close, Start, Abort

A *version* counts closed groups, and a *group* is the set of updates that one version applies: `Close` number v
(the first is 0) makes version v + 1. The shards apply groups in the order in which they were closed, whatever the
order in which the updates came.

| policy     | a group is                       | a worker may start when                     | methods          |
|------------|----------------------------------|---------------------------------------------|------------------|
| `Barrier`  | one update of every live worker  | the group of its last update has closed     | BSP              |
| `Bounded`  | one update, in order of arrival  | no live worker is over `lead` clocks behind | SSP              |
| `FirstOf`  | the newest version's first K     | the open group has a place for it           | K-sync, backup   |
| `AnyOf`    | K updates of any version         | the open group has a (or another) place     | K-async          |
| `OneFirst` | (no order)                       | one worker has been ahead alone             | Downpour         |

`FirstOf` stops a worker that still computes on a version that is over (`Abort`), and refuses an update that finds no
place before a byte of it is sent. If failures leave too few workers for K, the group closes short: it is complete as
soon as all live workers have given what they may. If too few are left because others have finished, the work of the
rest is over as well, and the open group is dropped: an update of few members, at a rate for many, would spoil the model
at the very end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from dure.topology.parameter_server.admission import (
    Abort,
    Accept,
    Clocks,
    Close,
    Decision,
    End,
    OpenGroup,
    Refuse,
    Roster,
    Start,
)


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

    def join(self, worker: int) -> list[Decision]:
        self._roster.join(worker)
        return []

    def leave(self, worker: int) -> list[Decision]:
        self._roster.leave(worker)
        return self._close_if_complete()

    finish = leave

    def ask(self, worker: int) -> list[Decision]:
        if self.clocks[worker] == self.version:
            return [Start(worker, self.version)]
        self._roster.waiting.append(worker)
        return []

    def offer(self, worker: int, base: int) -> list[Decision]:
        return [Accept(worker, self.version)]

    def staged(self, worker: int, group: int | None, seq: int) -> list[Decision]:
        self._staged.append((worker, seq))
        self.clocks.advance(worker)
        return self._close_if_complete()

    def _close_if_complete(self) -> list[Decision]:
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

    def join(self, worker: int) -> list[Decision]:
        self.clocks.join(worker)
        return []

    def leave(self, worker: int) -> list[Decision]:
        needed = self.clocks[worker] - self.lead
        if worker in self._waiting.get(needed, ()):
            self._waiting[needed].remove(worker)
        slowest = self.clocks.minimum
        self.clocks.leave(worker)
        return self._release(slowest)

    finish = leave

    def ask(self, worker: int) -> list[Decision]:
        needed = self.clocks[worker] - self.lead
        if self.clocks.minimum >= needed:
            return [self._start(worker)]
        self._waiting.setdefault(needed, []).append(worker)
        return []

    def offer(self, worker: int, base: int) -> list[Decision]:
        return [Accept(worker, self.version)]

    def staged(self, worker: int, group: int | None, seq: int) -> list[Decision]:
        close = Close(self.version, ((worker, seq),))
        self.version += 1
        slowest = self.clocks.minimum
        self.clocks.advance(worker)
        return [close, *self._release(slowest)]

    def _start(self, worker: int) -> Decision:
        return Start(worker, self.version if self.lead else self._snapshot)

    def _release(self, before: int) -> list[Decision]:
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

    def join(self, worker: int) -> list[Decision]:
        self.group.join(worker)
        return self._go_on()

    def finish(self, worker: int) -> list[Decision]:
        self.group.finish()
        return self.leave(worker)

    def leave(self, worker: int) -> list[Decision]:
        self.group.leave(worker)
        if worker in self._offering:
            self._offering.remove(worker)
        self._working.discard(worker)
        self._accepted.discard(worker)
        return self._go_on()

    def ask(self, worker: int) -> list[Decision]:
        self._accepted.discard(worker)
        self._working.discard(worker)
        self._roster.waiting.append(worker)
        return self._go_on()

    def offer(self, worker: int, base: int) -> list[Decision]:
        if worker in self._accepted:
            return [Accept(worker, self.version)]
        if base != self.version or worker in self.group.spent:
            return [Refuse(worker, f"version {base} was complete without it.")]
        self._working.discard(worker)
        self._offering.append(worker)
        return self._go_on()

    def staged(self, worker: int, group: int | None, seq: int) -> list[Decision]:
        self._accepted.discard(worker)
        self.group.add(worker, seq)
        if not self.group.distinct:
            self.clocks.advance(worker)
        return self._go_on()

    def _go_on(self) -> list[Decision]:
        """Give free places to offers, start workers if places are left, and close the group if it is complete."""
        if self.group.is_over:
            return self._end()
        decisions: list[Decision] = []
        while self._offering and self._has_room():
            worker = self._offering.pop(0)
            self._accepted.add(worker)
            decisions.append(Accept(worker, self.version))
        if self._has_room():
            decisions += self._start([worker for worker in self._roster.waiting if worker not in self.group.spent])
        if self.group.members and not self._accepted and (self.group.has_all or not self._has_room()):
            decisions += self._close()
        return decisions

    def _end(self) -> list[Decision]:
        """End the work of all that wait; no further update counts."""
        decisions: list[Decision] = [Refuse(worker, "too few workers are left.") for worker in self._offering]
        decisions += [End(worker) for worker in self._roster.release()]
        self._offering = []
        return decisions

    def _has_room(self) -> bool:
        return len(self.group.members) + len(self._accepted) < self.group.size

    def _start(self, workers: list[int]) -> list[Decision]:
        self._roster.waiting = [worker for worker in self._roster.waiting if worker not in workers]
        self._working.update(workers)
        return [Start(worker, self.version) for worker in workers]

    def _close(self) -> list[Decision]:
        decisions: list[Decision] = [self.group.close(self.version)]
        decisions += [Refuse(worker, f"version {self.version} is complete without it.") for worker in self._offering]
        decisions += [Abort(worker, self.version) for worker in sorted(self._working)]
        if self.group.distinct:
            self.clocks.advance_all()
        else:
            for worker in (*self._offering, *sorted(self._working)):
                self.clocks.advance(worker)
        self.version += 1
        self._offering, self._working = [], set()
        return decisions + self._start(sorted(self._roster.waiting))

    def state(self) -> dict[str, Any]:
        return {"version": self.version, **self.group.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.version = int(state["version"])
        self.group.restore(state)


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

    def join(self, worker: int) -> list[Decision]:
        self.group.join(worker)
        return []

    def finish(self, worker: int) -> list[Decision]:
        self.group.finish()
        return self.leave(worker)

    def leave(self, worker: int) -> list[Decision]:
        self.group.leave(worker)
        return self._close_if_complete()

    def ask(self, worker: int) -> list[Decision]:
        if worker not in self.group.spent and not self.group.is_over:
            return [Start(worker, self.version)]
        self._roster.waiting.append(worker)
        return self._close_if_complete()

    def offer(self, worker: int, base: int) -> list[Decision]:
        return [Accept(worker, self.version)]

    def staged(self, worker: int, group: int | None, seq: int) -> list[Decision]:
        self.clocks.advance(worker)
        self.group.add(worker, seq)
        return self._close_if_complete()

    def _close_if_complete(self) -> list[Decision]:
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

    def join(self, worker: int) -> list[Decision]:
        self._roster.join(worker)
        return []

    def leave(self, worker: int) -> list[Decision]:
        self._roster.leave(worker)
        if worker != self._ahead:
            return []
        self._ahead = None
        waiting = self._roster.waiting
        return self.ask(waiting.pop(0)) if waiting else []

    finish = leave

    def ask(self, worker: int) -> list[Decision]:
        if self.version == 0 and self._ahead is None:
            self._ahead = worker
        if self.version or self._ahead == worker:
            return [Start(worker, self.version)]
        self._roster.waiting.append(worker)
        return []

    def offer(self, worker: int, base: int) -> list[Decision]:
        self.version = 1
        return [Accept(worker, 0), *(Start(each, 1) for each in self._roster.release())]

    def staged(self, worker: int, group: int | None, seq: int) -> list[Decision]:
        return []

    def state(self) -> dict[str, Any]:
        return {"version": self.version, "ahead": self._ahead, "clocks": self.clocks.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.version, self._ahead = int(state["version"]), state["ahead"]
        self.clocks.restore(state["clocks"])
