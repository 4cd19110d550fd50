"""The clock of virtual time and its queue of events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

from dure.core.node import Loop, Task
from dure.errors import DeadlockError


class Kernel(Loop):
    """Runs callbacks in the order of their virtual times; at equal times, in the order they were asked for."""

    def __init__(self, now: float = 0.0) -> None:
        super().__init__()
        self.now = now
        self.events = 0  # that have happened when `run` ends
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._weather: list[tuple[float, int, Callable[[], None]]] = []
        self._void: set[int] = set()
        self._sequence = 0

    def at(self, time: float, callback: Callable[[], None]) -> None:
        """Call `callback` at virtual `time` (seconds)."""
        self._sequence += 1
        heappush(self._heap, (time, self._sequence, callback))

    def timer(self, time: float, callback: Callable[[], None]) -> int:
        """As `at`; its number, by which it can be called off (`void`) before its time."""
        self._sequence += 1
        heappush(self._heap, (time, self._sequence, callback))
        return self._sequence

    def void(self, timer: int) -> None:
        """Call off a timer that has not come: no run goes on for its sake."""
        self._void.add(timer)

    def external_event(self, time: float, callback: Callable[[], None]) -> None:
        """As `at`, before all else of that time, for what befalls a run from outside: no run goes on to meet it."""
        self._sequence += 1
        heappush(self._weather, (time, self._sequence, callback))

    def run(self) -> None:
        """Until nothing is left to happen but the weather."""
        heap, external_event, ready, void = self._heap, self._weather, self.ready, self._void
        events = 0
        while True:
            while ready:
                ready.popleft()()
            if not heap:
                break
            if void and heap[0][1] in void:
                void.remove(heappop(heap)[1])
                continue
            events += 1
            self.now, _, callback = heappop(
                external_event if external_event and external_event[0][0] <= heap[0][0] else heap
            )
            callback()
        self.events += events

    def next_weather(self) -> bool:
        """Go on to the weather, since nothing else is left to happen; False if there is none."""
        if self._weather:
            self.now, _, callback = heappop(self._weather)
            callback()
            return True
        return False

    def check_deadlock(self, expected: Sequence[Task[Any]]) -> None:
        """Raise `DeadlockError` if one of `expected` has not ended though nothing is left to happen."""
        stuck = [task for task in expected if not task.done]
        if stuck:
            waits = "; ".join(f"{s.name} waits for {s.waits_for.label if s.waits_for else 'nothing'}" for s in stuck)
            raise DeadlockError(f"nobody can go on at {self.now:.6g} virtual seconds: {waits}")
