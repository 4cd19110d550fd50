"""Sequence numbers of updates, by which a repeated message has no second effect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dure.errors import Evicted, Refused

AHEAD = 1000
"""Most sequence numbers that a worker may skip. More cannot be explained by lost messages."""


class SequenceTracker:
    """Tracks the updates that have been seen of each worker, exactly, in a few numbers per worker.

    A worker numbers its updates 1, 2, 3, ... in each incarnation. Messages may be repeated, lost, or sent again later;
    numbers that are missing below the highest are kept as holes. After a restart, updates that are missing before the
    first new update of a worker never arrive: they were acknowledged before the restart and are lost.
    """

    __slots__ = ("_holes", "_incarnation", "_last", "_resumed")

    def __init__(self) -> None:
        self._resumed: set[int] | None = None
        self._incarnation: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._holes: dict[int, set[int]] = {}

    def first_time(self, worker: int, incarnation: int, seq: int) -> bool:
        """Record an update. Returns whether it is new. Raises `Evicted` for an earlier incarnation."""
        self.check(worker, incarnation)
        last = self._last.get(worker, 0)
        if self._resumed is not None and worker not in self._resumed and seq > last:
            self._resumed.add(worker)
            last = seq - 1
        if seq == last + 1:
            self._last[worker] = seq
            return True
        if seq <= last:
            holes = self._holes.get(worker, ())
            if seq not in holes:
                return False
            self._holes[worker].remove(seq)
            return True
        if seq > last + AHEAD:
            raise Refused(f"update {seq} of worker {worker} comes after {last}: more than {AHEAD} cannot be missing.")
        self._holes.setdefault(worker, set()).update(range(last + 1, seq))
        self._last[worker] = seq
        return True

    def check(self, worker: int, incarnation: int) -> None:
        """Raise `Evicted` for an incarnation older than the newest known one; record a newer one."""
        known = self._incarnation.get(worker)
        if known == incarnation:
            return
        if known is not None and incarnation < known:
            raise Evicted(f"incarnation {incarnation} of worker {worker} is over, {known} is known: join again.")
        self.fence(worker, incarnation)

    def fence(self, worker: int, incarnation: int) -> None:
        """Accept only `incarnation` and later ones from now on."""
        if incarnation > self._incarnation.get(worker, -1):
            self._incarnation[worker] = incarnation
            self._last.pop(worker, None)
            self._holes.pop(worker, None)

    def last(self) -> dict[int, int]:
        """The highest sequence number of each worker."""
        return dict(self._last)

    def state(self) -> list[list[Any]]:
        workers = sorted(self._incarnation)
        return [[w, self._incarnation[w], self._last.get(w, 0), sorted(self._holes.get(w, ()))] for w in workers]

    def restore(self, state: Sequence[Sequence[Any]]) -> None:
        self._resumed = set()
        self._incarnation = {int(worker): int(incarnation) for worker, incarnation, _, _ in state}
        self._last = {int(worker): int(last) for worker, _, last, _ in state}
        self._holes = {int(worker): set(holes) for worker, _, _, holes in state if holes}
