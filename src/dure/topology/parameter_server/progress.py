"""How long the others wait for a worker that shows no progress.

A worker is *busy* from when it may start a step until its update is staged. It has stopped when it is busy for longer
than `max(seconds, 10 x its median step)`. One whose pace nobody knows yet, from its first steps, may be slow or far
away: it is given ten times as long, counted from the slowest of all. Who waits for others is never late itself.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable

EVICT_SECONDS = 5.0
"""How long a worker may show no progress, whatever its pace."""

STEPS = 10
"""... and in steps of its own median length."""

FEW = 3
"""Fewer steps than this tell no pace: the first is made before a server has applied anything."""

UNKNOWN = 10
"""How many times as long for a worker that has made few steps."""

RECENT = 15
"""Steps that the median is taken of."""


class ProgressMonitor:
    """Since when each worker is busy, and how long its steps take. `now` gives seconds."""

    def __init__(self, now: Callable[[], float], seconds: float = EVICT_SECONDS) -> None:
        self.now = now
        self.seconds = seconds
        self._since: dict[int, float] = {}
        self._steps: dict[int, deque[float]] = {}

    def begin(self, worker: int) -> None:
        """It may start a step, or has just come."""
        self._since[worker] = self.now()

    def step(self, worker: int) -> None:
        """Its update is staged."""
        now = self.now()
        steps = self._steps.get(worker)
        if steps is None:
            steps = self._steps[worker] = deque(maxlen=RECENT)
        steps.append(now - self._since.get(worker, now))
        self._since[worker] = now

    def begin_again(self) -> None:
        """Time has passed in which we stood still ourselves: it counts against nobody."""
        now = self.now()
        for worker in self._since:
            self._since[worker] = now

    def late(self, suspects: Iterable[int]) -> list[int]:
        """Those of `suspects` who have stopped."""
        now = self.now()
        return [worker for worker in suspects if now >= self._deadline(worker)]

    def wait(self, suspects: Iterable[int]) -> float:
        """Seconds until the first of `suspects`, or one who begins now, can be late."""
        first = min(map(self._deadline, suspects), default=math.inf)
        return min(max(0.0, first - self.now()), self.seconds)

    def _deadline(self, worker: int) -> float:
        if worker not in self._since:
            return math.inf
        steps = self._steps.get(worker, ())
        if len(steps) >= FEW:
            limit = max(self.seconds, STEPS * statistics.median(steps))
        else:
            slowest = max(map(statistics.median, self._steps.values()), default=math.inf)
            limit = UNKNOWN * max(self.seconds, STEPS * slowest)
        return self._since[worker] + limit
