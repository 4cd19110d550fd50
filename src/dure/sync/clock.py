"""Who may go on, what counts, and when a version is complete: admission, apart from data.

A policy is a state machine. It is told what happened and returns verdicts; it has no input or output, no
time and no randomness, so that all orders of events can be tried.

    told                       meaning                                       verdicts it may lead to
    join(worker)               a newcomer; it enters at the slowest clock    Start
    leave(worker)              finished, dead or evicted                     Close, Start, Accept, Refuse
    ask(worker)                it stands at a step boundary                  Start, at once or later
    offer(worker, base)        it has an update, computed on version `base`  Accept or Refuse, for it
    staged(worker, group, seq) its update lies on every shard                Close, Start, Abort

A *version* counts closed groups, and a *group* is the set of updates that one version applies: `Close` number v
(the first is 0) makes version v + 1. The shards apply groups in the order in which they were closed, whatever the
order in which the data came.

| policy    | a group is                        | a worker may start when                    | method |
|-----------|-----------------------------------|--------------------------------------------|--------|
| `Barrier` | one update of every live worker   | the group of its last update has closed    | BSP    |
| `Bounded` | one update, in order of arrival   | nobody live is more than `lead` clocks behind | SSP |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Accept:
    """The offered update may be sent; it will belong to `group`."""

    worker: int
    group: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """The offered update will not count; `reason` says why."""

    worker: int
    reason: str


@dataclass(frozen=True, slots=True)
class Start:
    """The worker may start its next step, on exactly `version`."""

    worker: int
    version: int


@dataclass(frozen=True, slots=True)
class Close:
    """The group is complete: apply `members`, pairs of worker and sequence number in rank order."""

    group: int
    members: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Whatever the worker computes on `version` is wasted: it should stop and ask again."""

    worker: int
    version: int


Verdict = Accept | Refuse | Start | Close | Abort


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
    `version` counts closed groups. `floor` is an older version that a Start may still name, or None.
    """

    may_refuse: bool
    clocks: Clocks
    version: int

    @property
    def floor(self) -> int | None: ...

    def join(self, worker: int) -> list[Verdict]: ...

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
        reached = range(before + 1, self.clocks.minimum + 1)
        return [self._start(worker) for needed in reached for worker in self._waiting.pop(needed, ())]

    def state(self) -> dict[str, Any]:
        return {"version": self.version, "clocks": self.clocks.state(), "snapshot": self._snapshot}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.version = int(state["version"])
        self.clocks.restore(state["clocks"])
        self._snapshot = int(state["snapshot"])
