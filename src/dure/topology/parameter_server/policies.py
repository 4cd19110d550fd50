"""Who may go on, what counts, and when a version is complete: admission, apart from data.

A policy is a state machine. It is told what happened and returns verdicts; it has no input or output, no
time and no randomness, so that all orders of events can be tried.

    told                       meaning                                       verdicts it may lead to
    join(worker)               a newcomer; it enters at the slowest clock    Start
    finish(worker)             it has done its work                          Close, Start, Accept, Refuse, End
    leave(worker)              dead or evicted                               Close, Start, Accept, Refuse
    ask(worker)                it stands at a step boundary                  Start, at once or later, or End
    offer(worker, base)        it has an update, computed on version `base`  Accept or Refuse, for it
    staged(worker, group, seq) its update lies on every shard                Close, Start, Abort

A *version* counts closed groups, and a *group* is the set of updates that one version applies: `Close` number v
(the first is 0) makes version v + 1. The shards apply groups in the order in which they were closed, whatever the
order in which the data came.

| policy    | a group is                       | a worker may start when                     | methods          |
|-----------|----------------------------------|---------------------------------------------|------------------|
| `Barrier` | one update of every live worker  | the group of its last update has closed     | BSP              |
| `Bounded` | one update, in order of arrival  | nobody live is over `lead` clocks behind    | SSP              |
| `FirstOf` | the newest version's first K     | the open group has a place for it           | K-sync, backup   |
| `AnyOf`   | K updates of any version         | the open group has a (or another) place     | K-async          |
| `OneFirst` | (no order)                      | one has been ahead alone for a while        | Downpour         |

A worker of `FirstOf` who is still at work when its version is over is told so (`Abort`), and those whose updates find
no place are refused before a byte of them is sent. A K that can't be had any more because of deaths closes short: a
group is complete as soon as all who are left have given what they may. Where it can't be had because others have
finished, the work of the rest is over as well, and what was given to the open group is dropped: an update of few
members, at a rate for many, would spoil the model at the very end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(slots=True)
class Accept:
    """The offered update may be sent; it will belong to `group`."""

    worker: int
    group: int


@dataclass(slots=True)
class Refuse:
    """The offered update will not count; `reason` says why."""

    worker: int
    reason: str


@dataclass(slots=True)
class Start:
    """The worker may start its next step, on exactly `version`."""

    worker: int
    version: int


@dataclass(slots=True)
class Close:
    """The group is complete: apply `members`, pairs of worker and sequence number in rank order."""

    group: int
    members: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Abort:
    """Whatever the worker computes on `version` is wasted: it should stop and ask again."""

    worker: int
    version: int


@dataclass(slots=True)
class End:
    """The work of this worker is over, since too few are left to go on."""

    worker: int


Verdict = Accept | Refuse | Start | Close | Abort | End


class Clocks:
    """The clock of every live worker: how many updates it has staged.

    Workers are counted per clock value, so that `minimum` costs O(1) a step, amortised, for any number of
    workers. When nobody is left, the minimum is the highest clock that anybody reached.
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
        """A newcomer stands where the slowest stands."""
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
        """One more of everybody, who all stand at the same clock."""
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


class Policy(Protocol):
    """A rule of admission.

    `may_refuse` is False where every offer is accepted: then nobody offers, and `group` is None in `staged`.
    Where updates are not `ordered` they apply on arrival, and only who may start is ruled.
    `version` counts closed groups. `floor` is an older version that a Start may still name, or None.
    """

    may_refuse: bool
    ordered: bool
    clocks: Clocks
    version: int

    @property
    def floor(self) -> int | None: ...

    def join(self, worker: int) -> list[Verdict]: ...

    def finish(self, worker: int) -> list[Verdict]: ...

    def leave(self, worker: int) -> list[Verdict]: ...

    def ask(self, worker: int) -> list[Verdict]: ...

    def offer(self, worker: int, base: int) -> list[Verdict]: ...

    def staged(self, worker: int, group: int | None, seq: int) -> list[Verdict]: ...

    def state(self) -> dict[str, Any]:
        """Plain values; who waits is not among them, since whoever goes on from a restart asks again."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Barrier:
    """One group per version, of one update of every live worker; an update of one who left since counts too."""

    may_refuse = False
    ordered = True
    floor = None

    def __init__(self) -> None:
        self.clocks = Clocks()
        self.version = 0
        self._staged: list[tuple[int, int]] = []
        self._waiting: list[int] = []

    def join(self, worker: int) -> list[Verdict]:
        self.clocks.join(worker)
        return []

    def leave(self, worker: int) -> list[Verdict]:
        self.clocks.leave(worker)
        if worker in self._waiting:
            self._waiting.remove(worker)
        return self._close_if_complete()

    finish = leave

    def ask(self, worker: int) -> list[Verdict]:
        if self.clocks[worker] == self.version:
            return [Start(worker, self.version)]
        self._waiting.append(worker)
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
        released = sorted(self._waiting)
        self._staged, self._waiting = [], []
        self.version += 1
        return [close, *(Start(worker, self.version) for worker in released)]

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
        """Start whoever waited for the slowest to move beyond `before`."""
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


class OneFirst:
    """One worker goes ahead alone; once it has said that it is done (by an offer), all may start, for good.

    The first to ask is the one. If it leaves, the next that waits takes its place. Version 0 is before, 1 afterwards.
    """

    may_refuse = False
    ordered = False
    floor = None

    def __init__(self) -> None:
        self.clocks = Clocks()
        self.version = 0
        self._ahead: int | None = None
        self._waiting: list[int] = []

    def join(self, worker: int) -> list[Verdict]:
        self.clocks.join(worker)
        return []

    def leave(self, worker: int) -> list[Verdict]:
        self.clocks.leave(worker)
        if worker in self._waiting:
            self._waiting.remove(worker)
        if worker != self._ahead:
            return []
        self._ahead = None
        return self.ask(self._waiting.pop(0)) if self._waiting else []

    finish = leave

    def ask(self, worker: int) -> list[Verdict]:
        if self.version == 0 and self._ahead is None:
            self._ahead = worker
        if self.version or self._ahead == worker:
            return [Start(worker, self.version)]
        self._waiting.append(worker)
        return []

    def offer(self, worker: int, base: int) -> list[Verdict]:
        self.version, released = 1, self._waiting
        self._waiting = []
        return [Accept(worker, 0), *(Start(each, 1) for each in released)]

    def staged(self, worker: int, group: int | None, seq: int) -> list[Verdict]:
        return []

    def state(self) -> dict[str, Any]:
        return {"version": self.version, "ahead": self._ahead, "clocks": self.clocks.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.version, self._ahead = int(state["version"]), state["ahead"]
        self.clocks.restore(state["clocks"])


def most(workers: int) -> int:
    """All but one worker in twenty, or all but one: as many as to wait for where nothing else is said.

    >>> [most(workers) for workers in (1, 2, 16, 100)]
    [1, 1, 15, 95]
    """
    return max(1, workers - max(1, workers // 20))


class Places:
    """How many updates a group takes, and whether so many can still be had.

    `quorum` gives K for a number of workers. If `distinct`, those are who live or have finished, and the work is over
    once K can't be had because of those who have finished. Otherwise they are as many as ever lived at once: who is
    left makes up for the others, and it is over when nobody is.
    """

    def __init__(self, quorum: Callable[[int], int], *, distinct: bool) -> None:
        self.quorum = quorum
        self.distinct = distinct
        self.finished = 0
        self.peak = 0

    def count(self, live: int) -> int:
        """K, with `live` workers."""
        return self.quorum(live + self.finished if self.distinct else self.peak)

    def are_over(self, live: int) -> bool:
        return self.finished > 0 and live < (self.count(live) if self.distinct else 1)

    def state(self) -> list[int]:
        return [self.finished, self.peak]

    def restore(self, state: Sequence[int]) -> None:
        self.finished, self.peak = state


class FirstOf:
    """The first K updates of the newest version make the next; whoever is still at work on it is stopped.

    `distinct`: no worker has two updates in one group, and all clocks are the version; otherwise a fast worker may give
    several, and clocks count mini-batches, wasted ones too. `quorum` gives K for a number of workers (`Places`).

    An accepted offer holds one of the K places until it is staged, and counts unless its worker dies. While the places
    are held, further offers wait: for one to become free, or for the group to close, when they are refused.
    """

    may_refuse = True
    ordered = True
    floor = None

    def __init__(self, quorum: Callable[[int], int], *, distinct: bool) -> None:
        self.places = Places(quorum, distinct=distinct)
        self.distinct = distinct
        self.clocks = Clocks()
        self.version = 0
        self._members: list[tuple[int, int]] = []
        self._spent: set[int] = set()  # who has no more to give to this group
        self._working: set[int] = set()
        self._accepted: set[int] = set()
        self._offering: list[int] = []
        self._asking: list[int] = []

    def join(self, worker: int) -> list[Verdict]:
        self.clocks.join(worker)
        self.places.peak = max(self.places.peak, len(self.clocks))
        if any(member == worker for member, _ in self._members):  # from its life before
            self._spent.add(worker)
        return self._go_on()

    def finish(self, worker: int) -> list[Verdict]:
        self.places.finished += 1
        return self.leave(worker)

    def leave(self, worker: int) -> list[Verdict]:
        self.clocks.leave(worker)
        for waiting in (self._offering, self._asking):
            if worker in waiting:
                waiting.remove(worker)
        for some in (self._spent, self._working, self._accepted):
            some.discard(worker)
        return self._go_on()

    def ask(self, worker: int) -> list[Verdict]:
        self._accepted.discard(worker)
        self._working.discard(worker)
        self._asking.append(worker)
        return self._go_on()

    def offer(self, worker: int, base: int) -> list[Verdict]:
        if worker in self._accepted:
            return [Accept(worker, self.version)]
        if base != self.version or worker in self._spent:
            return [Refuse(worker, f"version {base} was complete without it.")]
        self._working.discard(worker)
        self._offering.append(worker)
        return self._go_on()

    def staged(self, worker: int, group: int | None, seq: int) -> list[Verdict]:
        self._accepted.discard(worker)
        self._members.append((worker, seq))
        if self.distinct:
            self._spent.add(worker)
        else:
            self.clocks.advance(worker)
        return self._go_on()

    def _go_on(self) -> list[Verdict]:
        """Give away the places that are free, and close the group if it is complete."""
        if self.places.are_over(len(self.clocks)):
            return self._end()
        verdicts: list[Verdict] = []
        while self._offering and self._has_room():
            worker = self._offering.pop(0)
            self._accepted.add(worker)
            verdicts.append(Accept(worker, self.version))
        if self._has_room():
            verdicts += self._start([worker for worker in self._asking if worker not in self._spent])
        alone = len(self._spent) == len(self.clocks)
        if self._members and not self._accepted and (alone or not self._has_room()):
            verdicts += self._close()
        return verdicts

    def _end(self) -> list[Verdict]:
        """Release everybody; nothing more counts."""
        verdicts: list[Verdict] = [Refuse(worker, "too few workers are left.") for worker in self._offering]
        verdicts += [End(worker) for worker in self._asking]
        self._offering, self._asking = [], []
        return verdicts

    def _has_room(self) -> bool:
        return len(self._members) + len(self._accepted) < self.places.count(len(self.clocks))

    def _start(self, workers: list[int]) -> list[Verdict]:
        self._asking = [worker for worker in self._asking if worker not in workers]
        self._working.update(workers)
        return [Start(worker, self.version) for worker in workers]

    def _close(self) -> list[Verdict]:
        verdicts: list[Verdict] = [Close(self.version, tuple(sorted(self._members)))]
        verdicts += [Refuse(worker, f"version {self.version} is complete without it.") for worker in self._offering]
        verdicts += [Abort(worker, self.version) for worker in sorted(self._working)]
        if self.distinct:
            self.clocks.advance_all()
        else:
            for worker in (*self._offering, *sorted(self._working)):
                self.clocks.advance(worker)
        self.version += 1
        self._members, self._offering = [], []
        self._spent, self._working = set(), set()
        return verdicts + self._start(sorted(self._asking))

    def state(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "clocks": self.clocks.state(),
            "places": self.places.state(),
            "members": self._members,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.version = int(state["version"])
        self.clocks.restore(state["clocks"])
        self.places.restore(state["places"])
        self._members = _members(state["members"])
        self._spent = {worker for worker, _ in self._members if self.distinct and worker in self.clocks}


class AnyOf:
    """Any K updates make a version, whatever versions they were computed on; nobody is refused or stopped.

    `distinct`: a worker whose update is in the open group waits until it closes; otherwise nobody waits. `quorum` gives
    K for a number of workers (`Places`).
    """

    may_refuse = False
    ordered = True
    floor = None

    def __init__(self, quorum: Callable[[int], int], *, distinct: bool) -> None:
        self.places = Places(quorum, distinct=distinct)
        self.distinct = distinct
        self.clocks = Clocks()
        self.version = 0
        self._members: list[tuple[int, int]] = []
        self._spent: set[int] = set()  # who has no more to give to this group
        self._asking: list[int] = []

    def join(self, worker: int) -> list[Verdict]:
        self.clocks.join(worker)
        self.places.peak = max(self.places.peak, len(self.clocks))
        if any(member == worker for member, _ in self._members):  # from its life before
            self._spent.add(worker)
        return []

    def finish(self, worker: int) -> list[Verdict]:
        self.places.finished += 1
        return self.leave(worker)

    def leave(self, worker: int) -> list[Verdict]:
        self.clocks.leave(worker)
        self._spent.discard(worker)
        if worker in self._asking:
            self._asking.remove(worker)
        return self._close_if_complete()

    def ask(self, worker: int) -> list[Verdict]:
        if worker not in self._spent and not self.places.are_over(len(self.clocks)):
            return [Start(worker, self.version)]
        self._asking.append(worker)
        return self._close_if_complete()

    def offer(self, worker: int, base: int) -> list[Verdict]:
        return [Accept(worker, self.version)]

    def staged(self, worker: int, group: int | None, seq: int) -> list[Verdict]:
        self.clocks.advance(worker)
        self._members.append((worker, seq))
        if self.distinct:
            self._spent.add(worker)
        return self._close_if_complete()

    def _close_if_complete(self) -> list[Verdict]:
        live = len(self.clocks)
        if self.places.are_over(live):
            ended, self._asking = self._asking, []
            return [End(worker) for worker in ended]
        if not self._members or (len(self._members) < self.places.count(live) and len(self._spent) < live):
            return []
        close = Close(self.version, tuple(sorted(self._members)))
        released = sorted(self._asking)
        self._members, self._asking, self._spent = [], [], set()
        self.version += 1
        return [close, *(Start(worker, self.version) for worker in released)]

    def state(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "clocks": self.clocks.state(),
            "places": self.places.state(),
            "members": self._members,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.version = int(state["version"])
        self.clocks.restore(state["clocks"])
        self.places.restore(state["places"])
        self._members = _members(state["members"])
        self._spent = {worker for worker, _ in self._members if self.distinct and worker in self.clocks}


def _members(state: Any) -> list[tuple[int, int]]:
    return [(int(worker), int(seq)) for worker, seq in state]
