"""The clock of virtual time and its queue of events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

from dure.core.node import Loop, Task
from dure.errors import DeadlockError

Callback = Callable[[], None]

Timer = tuple[float, int, Callback]
"""A callback that can be called off: its time, its place among those of that time, and the callback itself."""


class Kernel(Loop):
    """Runs callbacks in the order of their virtual times; at equal times, in the order they were asked for.

    The heap has each time once. Many callbacks share a time where workers are alike, and all but the first of them
    wait in a list: taking the next of a list costs the same for any number of workers, taking it from a heap does not.
    """

    def __init__(self, now: float = 0.0) -> None:
        super().__init__()
        self.now = now
        self.events = 0  # that have happened when `run` ends
        self._times: list[float] = []  # a heap
        self._first: dict[float, Callback | None] = {}  # of each time; None if it was called off
        self._more: dict[float, list[Callback | None]] = {}  # of the times that have several, those after the first
        self._external: list[tuple[float, int, Callback]] = []
        self._sequence = 0

    def at(self, time: float, callback: Callback) -> None:
        """Call `callback` at virtual `time` (seconds)."""
        if time not in self._first:
            self._first[time] = callback
            heappush(self._times, time)
        elif time in self._more:
            self._more[time].append(callback)
        else:
            self._more[time] = [callback]

    def timer(self, time: float, callback: Callback) -> Timer:
        """As `at`; what calls it off (`void`) before its time."""
        self.at(time, callback)
        return time, len(self._more.get(time, ())), callback

    def void(self, timer: Timer) -> None:
        """Call off a timer that has not come: no run goes on for its sake."""
        time, place, callback = timer
        if place:
            more = self._more.get(time, ())
            if len(more) >= place and more[place - 1] is callback:
                self._more[time][place - 1] = None
        elif self._first.get(time) is callback:
            self._first[time] = None

    def external_event(self, time: float, callback: Callback) -> None:
        """As `at`, before all else of that time, for what befalls a run from outside: no run goes on to meet it."""
        self._sequence += 1
        heappush(self._external, (time, self._sequence, callback))

    def run(self) -> None:
        """Until nothing is left to happen but the weather."""
        times, first, more, external_event, ready = self._times, self._first, self._more, self._external, self.ready
        events = 0
        while True:
            while ready:
                ready.popleft()()
            if not times:
                break
            time = times[0]
            callback = first[time]
            if callback is None and not any(more.get(time, ())):
                del first[heappop(times)]
                more.pop(time, None)
                continue
            if external_event and external_event[0][0] <= time:
                events += 1
                self.next_external_event()
                continue
            self.now = heappop(times)
            if callback is not None:
                events += 1
                callback()
                while ready:
                    ready.popleft()()
            if time in more:
                events += self._run_more(more[time])
                del more[time]
            del first[time]
        self.events += events

    def _run_more(self, callbacks: list[Callback | None]) -> int:
        """Run the callbacks of this time after the first, also those that are added meanwhile; how many events."""
        external_event, ready, now = self._external, self.ready, self.now
        events = 0
        for place, callback in enumerate(callbacks):
            while external_event and external_event[0][0] <= now and callbacks[place] is not None:
                events += 1
                self.next_external_event()
                self.run_ready()
                callback = callbacks[place]  # the weather may have called it off
            if callback is not None:
                events += 1
                callback()
                while ready:
                    ready.popleft()()
        return events

    def next_external_event(self) -> bool:
        """Go on to the weather, since nothing else is left to happen; False if there is none."""
        if self._external:
            self.now, _, callback = heappop(self._external)
            callback()
            return True
        return False

    def check_deadlock(self, expected: Sequence[Task[Any]]) -> None:
        """Raise `DeadlockError` if one of `expected` has not ended though nothing is left to happen."""
        stuck = [task for task in expected if not task.done]
        if stuck:
            waits = "; ".join(f"{s.name} waits for {s.waits_for.label if s.waits_for else 'nothing'}" for s in stuck)
            raise DeadlockError(f"nobody can go on at {self.now:.6g} virtual seconds: {waits}")
