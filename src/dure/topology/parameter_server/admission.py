"""Parts of the policies of admission: decisions, the clocks of live workers, and the group that updates fill."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


Decision = Accept | Refuse | Start | Close | Abort | End


class Policy(Protocol):
    """A rule of admission.

    `may_refuse` is False where every offer is accepted: then workers do not offer, and `group` is None in `staged`.
    Where updates are not `ordered` they apply on arrival, and the policy rules only which worker may start.
    `version` counts closed groups. `floor` is an older version that a Start may still name, or None.
    """

    may_refuse: bool
    ordered: bool
    clocks: Clocks
    version: int

    @property
    def floor(self) -> int | None: ...

    def join(self, worker: int) -> list[Decision]: ...

    def finish(self, worker: int) -> list[Decision]: ...

    def leave(self, worker: int) -> list[Decision]: ...

    def ask(self, worker: int) -> list[Decision]: ...

    def offer(self, worker: int, base: int) -> list[Decision]: ...

    def staged(self, worker: int, group: int | None, seq: int) -> list[Decision]: ...

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint keeps, as plain values, without the workers that wait: they ask again."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


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
        """Take all waiting workers off the list, and return them."""
        released, self.waiting = self.waiting, []
        return released


def most(workers: int) -> int:
    """The default number of workers to wait for: all but one in twenty, and at least one less than all.

    >>> [most(workers) for workers in (1, 2, 16, 100)]
    [1, 1, 15, 95]
    """
    return max(1, workers - max(1, workers // 20))


class OpenGroup:
    """The members of the open group, the K of them that complete it, and the workers that have no more to give.

    `quorum` gives K for a number of workers. If `distinct`, a worker gives one update to a group, and those workers are
    the live ones and those that have finished: the work is over once too few live ones are left for K. Otherwise a
    worker may give several, and the workers are as many as ever lived at once: the work is over when none is left.
    """

    def __init__(self, roster: Roster, quorum: Callable[[int], int], *, distinct: bool) -> None:
        self.quorum = quorum
        self.distinct = distinct
        self.members: list[tuple[int, int]] = []
        self.spent: set[int] = set()
        self._roster = roster
        self._finished = 0
        self._peak = 0

    @property
    def size(self) -> int:
        """K, with the workers of now."""
        return self.quorum(len(self._roster) + self._finished if self.distinct else self._peak)

    @property
    def is_over(self) -> bool:
        """Whether too few workers are left, because others have finished."""
        return self._finished > 0 and len(self._roster) < (self.size if self.distinct else 1)

    @property
    def has_all(self) -> bool:
        """Whether no live worker has more to give."""
        return len(self.spent) == len(self._roster)

    def join(self, worker: int) -> None:
        """Add a newcomer; one whose update of an earlier incarnation is a member has no more to give."""
        self._roster.join(worker)
        self._peak = max(self._peak, len(self._roster))
        if any(member == worker for member, _ in self.members):
            self.spent.add(worker)

    def leave(self, worker: int) -> None:
        self._roster.leave(worker)
        self.spent.discard(worker)

    def finish(self) -> None:
        """Count a worker that has done its work."""
        self._finished += 1

    def add(self, worker: int, seq: int) -> None:
        self.members.append((worker, seq))
        if self.distinct:
            self.spent.add(worker)

    def close(self, version: int) -> Close:
        """Close the group on `version` and open the next one."""
        members = tuple(sorted(self.members))
        self.members, self.spent = [], set()
        return Close(version, members)

    def state(self) -> dict[str, Any]:
        return {
            "clocks": self._roster.clocks.state(),
            "places": [self._finished, self._peak],
            "members": self.members,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        clocks = self._roster.clocks
        clocks.restore(state["clocks"])
        self._finished, self._peak = state["places"]
        self.members = [(int(worker), int(seq)) for worker, seq in state["members"]]
        self.spent = {worker for worker, _ in self.members if self.distinct and worker in clocks}
