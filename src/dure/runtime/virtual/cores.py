"""How processes of one machine share its cores in virtual time.

`Cores` is a processor-sharing queue: each of n busy processes gets min(1, cores / n) of a core at every moment. A
`Process` serves one demand after another, as the single thread of a real process does: demands made while it is busy
wait in their order. A demand that follows from the one that has just ended (the reply to a message, the step after a
gradient) is served before the waiting ones.

    one process, s seconds of work            s
    n processes at once, s seconds each       s * max(1, n / cores)
    one process asked twice, s and t          s, then s + t

The queue counts in a time of its own: the seconds of a core that a process busy since the last idle moment would have
got. In that time the end of a demand is constant, so each change costs O(log n).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

from dure.runtime.virtual.kernel import Kernel, Timer


class Demand:
    """A request for `seconds` of a core; `done` is called at its end. `tag` is the end in the time of the cores."""

    __slots__ = ("done", "dropped", "seconds", "tag")

    def __init__(self, seconds: float, done: Callable[[], None]) -> None:
        self.seconds = seconds
        self.done = done
        self.dropped = False
        self.tag = 0.0


class Cores:
    """The cores of one machine. The demands in service share them equally."""

    def __init__(self, kernel: Kernel, cores: int) -> None:
        self.kernel = kernel
        self.cores = cores
        self._heap: list[tuple[float, int, Demand, Callable[[], None]]] = []
        self._present: set[Demand] = set()
        self._sequence = 0
        self._virtual = 0.0  # seconds of a core per demand, as of `_last`
        self._last = 0.0
        self._timer: Timer | None = None

    @property
    def rate(self) -> float:
        """Share of a core that each demand gets at present."""
        return min(1.0, self.cores / max(len(self._present), 1))

    def begin(self, demand: Demand, ended: Callable[[], None]) -> None:
        """Start to serve `demand`; `ended` is called once it has got its seconds."""
        self._advance()
        if not self._present:
            self._heap.clear()
            self._virtual = 0.0
        self._present.add(demand)
        self._sequence += 1
        demand.tag = self._virtual + demand.seconds
        heappush(self._heap, (demand.tag, self._sequence, demand, ended))
        self._schedule()

    def end(self, demand: Demand) -> float:
        """Stop serving `demand`. Return the seconds that it still needs."""
        self._advance()
        self._present.discard(demand)
        self._schedule()
        return max(demand.tag - self._virtual, 0.0)

    def _advance(self) -> None:
        now = self.kernel.now
        self._virtual += (now - self._last) * self.rate
        self._last = now

    def _first(self) -> Demand | None:
        heap = self._heap
        while heap and (heap[0][2] not in self._present or heap[0][0] != heap[0][2].tag):
            heappop(heap)
        return heap[0][2] if heap else None

    def _schedule(self) -> None:
        if self._timer is not None:
            self.kernel.void(self._timer)
            self._timer = None
        first = self._first()
        if first is not None:
            due = self._last + max(first.tag - self._virtual, 0.0) / self.rate
            self._timer = self.kernel.timer(due, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._advance()
        first = self._first()
        assert first is not None
        self._virtual = max(self._virtual, first.tag)
        _, _, demand, ended = heappop(self._heap)
        self._present.discard(demand)
        self._schedule()
        ended()


class Process:
    """One process on `cores`: serves its demands one after another.

    A paused process serves nothing and keeps its demands.
    """

    def __init__(self, cores: Cores) -> None:
        self._cores = cores
        self._queue: deque[Demand] = deque()
        self._current: Demand | None = None
        self._following: list[Demand] | None = None  # demands made at the moment at which the last one ended
        self._paused = False

    def run(self, seconds: float, done: Callable[[], None], *, last: bool = False) -> Demand:
        """Request `seconds` of a core; `done` is called at their end. A `last` demand waits for all earlier ones."""
        demand = Demand(seconds, done)
        if self._following is None or last:
            self._queue.append(demand)
        else:
            self._following.append(demand)
        self._next()
        return demand

    def drop(self, demand: Demand) -> None:
        """Remove a demand that has not ended; its `done` is never called."""
        demand.dropped = True
        if demand is self._current:
            if not self._paused:
                self._cores.end(demand)
            self._current = None
            self._next()

    def clear(self) -> None:
        """Remove all demands after a crash of the process."""
        self._queue.clear()
        self._following = None
        self._paused = False
        if self._current is not None:
            self.drop(self._current)

    def pause(self) -> None:
        """Stop serving until `go_on`."""
        if not self._paused and self._current is not None:
            self._current.seconds = self._cores.end(self._current)
        self._paused = True

    def go_on(self) -> None:
        """End a pause."""
        if self._paused:
            self._paused = False
            if self._current is not None:
                self._cores.begin(self._current, self._ended)
            self._next()

    def stretch(self, demand: Demand, factor: float) -> None:
        """Multiply what `demand` still needs by `factor`."""
        if demand is self._current and not self._paused:
            demand.seconds = self._cores.end(demand) * factor
            self._cores.begin(demand, self._ended)
        else:
            demand.seconds *= factor

    def _next(self) -> None:
        while self._current is None and self._following is None and not self._paused and self._queue:
            demand = self._queue.popleft()
            if not demand.dropped:
                self._current = demand
                self._cores.begin(demand, self._ended)

    def _ended(self) -> None:
        demand, self._current = self._current, None
        assert demand is not None
        self._following = []
        kernel = self._cores.kernel
        kernel.timer(kernel.now, self._followed)  # runs after the coroutines that `done` resumes
        demand.done()

    def _followed(self) -> None:
        self._queue.extendleft(reversed(self._following or ()))
        self._following = None
        self._next()
