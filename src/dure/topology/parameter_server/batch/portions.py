"""Who evaluates which part of a batch: many small portions, so that nobody waits long for a slow worker.

Dean et al., "Large Scale Distributed Deep Networks", NeurIPS 2012, section 4.2.

    free        |0 ---------- 9|10 -------- 19|20 -------- 29|     each worker begins at a place of its own
    worker 0     ==>            |              |                    and goes on where it left off (affinity)
    worker 1                     ======>       |
    worker 2                                    =============|      has no more: goes to the middle of the
                                    x=>                             longest stretch that is left
    nothing is free             what others still work on is given out again; the first result counts

A worker gets several portions at once, as many as it can do in half of the time that is left, judging by its last
ones: so the last ones are given out one by one. All of this is decided here, without input or output.
"""

from __future__ import annotations

from collections import Counter

Run = tuple[int, int]
"""Portions from the first up to but without the second."""


class Portions:
    """The portions of one batch after another, for `workers` ranks; at most `most` are given out at a time.

    `left` counts those that have no result yet. Times are in seconds, of any clock.
    """

    def __init__(self, workers: int, most: int = 1) -> None:
        self.workers = workers
        self.most = most
        self._pace: dict[int, float] = {}
        self.begin(0)

    def begin(self, count: int) -> None:
        """A new batch of `count` portions. What was given out of the last one is forgotten."""
        self.count = self.left = count
        self._free: list[Run] = [(0, count)] if count else []
        self._finished = bytearray(count)
        self._copies: Counter[int] = Counter()
        self._given: dict[int, tuple[Run, float]] = {}
        self._next: dict[int, int] = {}

    def give(self, worker: int, now: float) -> Run | None:
        """What `worker` does next; it works on nothing else any more. None if there is nothing to do."""
        self.drop(worker)
        run = self._take(worker) if self._free else self._backup()
        if run is not None:
            self._given[worker] = (run, now)
            self._copies.update(range(*run))
            self._next[worker] = run[1]
        return run

    def finish(self, worker: int, run: Run, now: float) -> bool:
        """A worker's sum over `run` is there. Whether it counts: not if any part of it has been counted already."""
        given = self._given.get(worker)
        if given is not None and given[0] == run:
            self._pace[worker] = max((now - given[1]) / (run[1] - run[0]), 1e-9)
        if any(self._finished[portion] for portion in range(*run)):
            return False
        for portion in range(*run):
            self._finished[portion] = 1
        self.left -= run[1] - run[0]
        return True

    def drop(self, worker: int) -> None:
        """What `worker` was given is done by others, unless it is finished."""
        run, _ = self._given.pop(worker, ((0, 0), 0.0))
        for portion in range(*run):
            self._copies[portion] -= 1
            if not self._copies[portion] and not self._finished[portion]:
                self._put_back(portion)

    def leave(self, worker: int) -> None:
        """It is gone."""
        self.drop(worker)
        self._pace.pop(worker, None)
        self._next.pop(worker, None)

    def _put_back(self, portion: int) -> None:
        joined: list[Run] = []
        for low, high in sorted([*self._free, (portion, portion + 1)]):
            if joined and joined[-1][1] == low:
                joined[-1] = (joined[-1][0], high)
            else:
                joined.append((low, high))
        self._free = joined

    def _take(self, worker: int) -> Run:
        """Free portions: from where it left off, else from the middle of the longest stretch."""
        start = self._next.get(worker, worker % self.workers * self.count // self.workers)
        place = next((i for i, (low, high) in enumerate(self._free) if low <= start < high), None)
        if place is None:
            place = max(range(len(self._free)), key=lambda i: self._free[i][1] - self._free[i][0])
            start = sum(self._free[place]) // 2
        low, high = self._free[place]
        stop = min(start + self._share(worker), high)
        self._free[place : place + 1] = [run for run in ((low, start), (stop, high)) if run[0] < run[1]]
        return start, stop

    def _share(self, worker: int) -> int:
        """How many portions it can do in half of the time that all need for the free ones; one if nobody knows."""
        pace = self._pace.get(worker)
        if pace is None:
            return 1
        free = sum(high - low for low, high in self._free)
        seconds = free / sum(1 / each for each in self._pace.values())
        return max(1, min(self.most, int(seconds / 2 / pace)))

    def _backup(self) -> Run | None:
        """A portion that others work on: the one that fewest do, the oldest first."""
        out = [p for run, _ in self._given.values() for p in range(*run) if not self._finished[p]]
        portion = min(out, key=lambda portion: self._copies[portion], default=None)
        return None if portion is None else (portion, portion + 1)
