"""Which updates have been seen: what makes a repeated message harmless."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dure.errors import Evicted, Refused

AHEAD = 1000
"""How many sequence numbers a worker may skip: what is further ahead is no lost message but nonsense."""


class SequenceTracker:
    """Which updates of each worker have been seen: exact, in a few numbers per worker.

    A worker numbers its updates 1, 2, 3, ... in each incarnation. Messages may be repeated, lost and sent again
    later; what is missing below the highest number is kept as a hole. After a restart, what is missing before the
    first new update of a worker will never come: it was acknowledged, and is lost.
    """

    __slots__ = ("_heard", "_holes", "_incarnation", "_last")

    def __init__(self) -> None:
        self._heard: set[int] | None = None
        self._incarnation: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._holes: dict[int, set[int]] = {}

    def first_time(self, worker: int, incarnation: int, seq: int) -> bool:
        """Whether this update has not been seen before; now it has. Raises `Evicted` for one of a past life."""
        self.check(worker, incarnation)
        last = self._last.get(worker, 0)
        if self._heard is not None and worker not in self._heard and seq > last:
            self._heard.add(worker)
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
        """Refuse an incarnation older than the newest known; meet a newer one."""
        known = self._incarnation.get(worker)
        if known == incarnation:
            return
        if known is not None and incarnation < known:
            raise Evicted(f"incarnation {incarnation} of worker {worker} is over, {known} is known: join again.")
        self.fence(worker, incarnation)

    def fence(self, worker: int, incarnation: int) -> None:
        """From now on only `incarnation` and later ones count."""
        if incarnation > self._incarnation.get(worker, -1):
            self._incarnation[worker] = incarnation
            self._last.pop(worker, None)
            self._holes.pop(worker, None)

    def last(self) -> dict[int, int]:
        """The highest number seen of each worker."""
        return dict(self._last)

    def state(self) -> list[list[Any]]:
        workers = sorted(self._incarnation)
        return [[w, self._incarnation[w], self._last.get(w, 0), sorted(self._holes.get(w, ()))] for w in workers]

    def restore(self, state: Sequence[Sequence[Any]]) -> None:
        self._heard = set()
        self._incarnation = {int(worker): int(incarnation) for worker, incarnation, _, _ in state}
        self._last = {int(worker): int(last) for worker, _, last, _ in state}
        self._holes = {int(worker): set(holes) for worker, _, _, holes in state if holes}
