"""Detects and evicts workers that make no progress while other workers wait for them.

A worker is *busy* from when it may start a step until its update is staged. A worker has stopped when it is busy for
longer than `max(seconds, 10 x its median step)`. A worker in its first steps has no known pace: it may be slow or far
away, so its limit is ten times as long, and counts steps of the slowest worker. A worker that waits is never late.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable

from dure.core.node import Node

EVICT_SECONDS = 5.0
"""Least time without progress before a worker is late, whatever its pace."""

STEPS = 10
"""The same limit, in steps of the worker's own median length."""

FEW = 3
"""Least number of steps that tell a pace. The first step is untypical: the servers have applied no update yet."""

UNKNOWN = 10
"""Factor of the limit for a worker whose pace is unknown."""

RECENT = 15
"""Number of latest steps in the median."""


class ProgressMonitor:
    """Measures since when each worker is busy, and the duration of its steps. `now` gives seconds."""

    def __init__(self, now: Callable[[], float], seconds: float = EVICT_SECONDS) -> None:
        self.now = now
        self.seconds = seconds
        self._since: dict[int, float] = {}
        self._steps: dict[int, deque[float]] = {}

    def begin(self, worker: int) -> None:
        """Note that `worker` may start a step, or has just joined."""
        self._since[worker] = self.now()

    def step(self, worker: int) -> None:
        """Note that the update of `worker` is staged."""
        now = self.now()
        steps = self._steps.get(worker)
        if steps is None:
            steps = self._steps[worker] = deque(maxlen=RECENT)
        steps.append(now - self._since.get(worker, now))
        self._since[worker] = now

    def begin_again(self) -> None:
        """Start all measurements anew. This process itself was stopped: that time counts against no worker."""
        now = self.now()
        for worker in self._since:
            self._since[worker] = now

    def late(self, suspects: Iterable[int]) -> list[int]:
        """The workers among `suspects` that have stopped."""
        now = self.now()
        return [worker for worker in suspects if now >= self._deadline(worker)]

    def wait(self, suspects: Iterable[int]) -> float:
        """Seconds until the first of `suspects`, or a worker that begins now, can be late."""
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


class Watchdog:
    """Evicts workers without progress, as long as another worker waits.

    `someone_waits` tells whether a worker waits, `busy` gives the workers that it may wait for.
    """

    def __init__(
        self,
        node: Node,
        progress: ProgressMonitor,
        someone_waits: Callable[[], bool],
        busy: Callable[[], list[int]],
        evict: Callable[[int], None],
    ) -> None:
        self._node = node
        self._progress = progress
        self._someone_waits = someone_waits
        self._busy = busy
        self._evict = evict
        self._running = False

    def start(self) -> None:
        """Watch the busy workers from now on: a worker begins to wait."""
        if not self._running:
            self._running = True
            self._node.spawn(self._watch(), "the watchdog of the clock")

    async def _watch(self) -> None:
        node, progress = self._node, self._progress
        while self._someone_waits():
            for worker in progress.late(self._busy()):
                self._evict(worker)
            due = node.now() + progress.wait(self._busy())
            await node.sleep(due - node.now(), background=True)
            if node.now() > due + progress.seconds / 4:
                progress.begin_again()
        self._running = False
