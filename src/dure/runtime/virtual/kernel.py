"""The event loop of virtual time: a clock and a queue of callbacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

from dure.core.node import Loop, Task
from dure.errors import DeadlockError

Callback = Callable[[], None]

Timer = tuple[float, int, Callback]
"""A callback that can be cancelled: its time, its position among the callbacks of that time, and the callback."""


class Kernel(Loop):
    """Runs callbacks in the order of their virtual times; at equal times, in the order in which they were scheduled.

    The heap holds each time once. Where workers are alike, many callbacks share a time; all but the first of them are
    in a list. Taking the next item of a list costs the same for any number of workers, popping a heap does not.
    """

    def __init__(self, now: float = 0.0) -> None:
        super().__init__()
        self.now = now
        self.events = 0  # callbacks run so far; counted when `run` returns
        self._times: list[float] = []  # a heap
        self._first: dict[float, Callback | None] = {}  # callback of each time; None if it was cancelled
        self._more: dict[float, list[Callback | None]] = {}  # of times with several callbacks, all but the first
        self._external: list[tuple[float, int, Callback]] = []
        self._sequence = 0

    def at(self, time: float, callback: Callback) -> None:
        """Call `callback` at virtual `time` (seconds)."""
        first = self._first
        if time not in first:
            first[time] = callback
            heappush(self._times, time)
            return
        more = self._more.get(time)
        if more is None:
            self._more[time] = [callback]
        else:
            more.append(callback)

    def timer(self, time: float, callback: Callback) -> Timer:
        """Schedule as `at` does; the result cancels the callback when given to `void`."""
        self.at(time, callback)
        return time, len(self._more.get(time, ())), callback

    def void(self, timer: Timer) -> None:
        """Cancel a timer. A cancelled timer does not keep the simulation alive."""
        time, place, callback = timer
        # The entry may be gone, or belong to another timer of the same time since: then there is nothing to cancel.
        if place:
            more = self._more.get(time, ())
            if len(more) >= place and more[place - 1] is callback:
                self._more[time][place - 1] = None
        elif self._first.get(time) is callback:
            self._first[time] = None

    def external_event(self, time: float, callback: Callback) -> None:
        """Schedule an external event (crash, pause).

        It runs before other callbacks of the same time and does not keep the simulation alive.
        """
        self._sequence += 1
        heappush(self._external, (time, self._sequence, callback))

    def run(self) -> None:
        """Run callbacks until only external events are left."""
        times, first, more, external, ready = self._times, self._first, self._more, self._external, self.ready
        events = 0
        while True:
            while ready:
                ready.popleft()()
            if not times:
                break
            time = heappop(times)
            # A time without callbacks (all were cancelled) must neither advance the clock nor let an external event
            # run: a run whose last timer was cancelled has ended.
            callback = first[time]
            if callback is None and not any(more.get(time, ())):
                del first[time]
                more.pop(time, None)
                continue
            if external and external[0][0] <= time:
                # Back onto the heap: the external event comes first, and may schedule something before `time`.
                heappush(times, time)
                events += 1
                self.next_external_event()
                continue
            self.now = time
            if callback is not None:
                events += 1
                callback()
            if time in more:  # what is ready now can add callbacks to this time
                while ready:
                    ready.popleft()()
                events += self._run_more(more[time])
                del more[time]
            # Last: while the callbacks ran, `at` of the present time had to find it here, and append to the list.
            del first[time]
        self.events += events

    def _run_more(self, callbacks: list[Callback | None]) -> int:
        """Run the later callbacks of the current time, also those added meanwhile. Return how many events ran."""
        external, ready, now = self._external, self.ready, self.now
        events = 0
        for place, callback in enumerate(callbacks):
            while external and external[0][0] <= now and callbacks[place] is not None:
                events += 1
                self.next_external_event()
                self.run_ready()
                callback = callbacks[place]  # an external event may have cancelled it
            if callback is not None:
                events += 1
                callback()
                while ready:
                    ready.popleft()()
        return events

    def next_external_event(self) -> bool:
        """Advance to the next external event and run it, after `run` has returned; False if there is none."""
        if self._external:
            self.now, _, callback = heappop(self._external)
            callback()
            return True
        return False

    def check_deadlock(self, expected: Sequence[Task[Any]]) -> None:
        """Raise `DeadlockError` if one of the tasks `expected` has not ended. Called when no callback is left."""
        stuck = [task for task in expected if not task.done]
        if stuck:
            waits = "; ".join(f"{s.name} waits for {s.waits_for.label if s.waits_for else 'nothing'}" for s in stuck)
            raise DeadlockError(f"no task can continue at {self.now:.6g} virtual seconds: {waits}")
