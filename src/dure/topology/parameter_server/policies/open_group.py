"""The group that workers are filling, for policies that close it at K updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dure.topology.parameter_server.policies.base import Close

if TYPE_CHECKING:
    from dure.topology.parameter_server.policies.roster import Roster


def most(workers: int) -> int:
    """All but one worker in twenty, or all but one: as many as to wait for where nothing else is said.

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
