"""The event loop of a process."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from typing import TypeVar

from dure.core.node import Loop, Operation, nothing
from dure.runtime.wire import Wire

T = TypeVar("T")

IDLE_SECONDS = 1.0
"""Longest sleep of the loop between two checks."""


class ProcessLoop(Loop):
    """The event loop of a process: runs tasks, and sleeps in the wire until a message, a timer or a lost connection.

    `waiting` is true while the loop sleeps. `check` is called at least once a second of a wait; an exception that it
    raises ends the wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wire: Wire
        self.waiting = False
        self.check: Callable[[], None] = nothing
        self._polled: list[Callable[[], bool]] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._timers, (time.monotonic() + seconds, self._sequence, callback))

    def poll(self, callback: Callable[[], bool]) -> None:
        """Call `callback` in each round from now on, for as long as it returns True. The loop does not sleep then."""
        self._polled.append(callback)

    def yield_once(self) -> Operation[None]:
        """Yield once: resolves after all ready tasks and the transport have run. For busy-waiting code."""
        operation: Operation[None] = Operation(self, "its turn")
        self.after(0.0, operation.resolve)
        return operation

    def run_until(self, operation: Operation[T]) -> T:
        """Run the loop until `operation` is done. Return its value."""
        while True:
            self.run_ready()
            if operation.done:
                return operation.result()
            self.turn(IDLE_SECONDS)
            self.check()

    def turn(self, longest: float) -> None:
        """Run one round: wait at most `longest` seconds for the wire or a timer, then run what is due."""
        if self._timers:
            longest = min(longest, max(0.0, self._timers[0][0] - time.monotonic()))
        self.waiting = True
        self.wire.poll(0.0 if self.ready or self._polled else longest)
        self.waiting = False
        if self._polled:
            polled, self._polled = self._polled, []
            self._polled += [callback for callback in polled if callback()]
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()
        self.run_ready()
