"""SIGINT and SIGTERM of a `dure` command: they end its work, at once or after a checkpoint.

    first signal    raises `Interrupted` in the running code; in a `deferred` block it is only noted, and the block
                    calls `check` when it can end
    second signal   raises in a `deferred` block too
    third signal    the system's default: the process is killed

An exception that a signal handler raises can be lost: Python ignores it inside `__del__`, a weak reference's callback
or a callback of native code. So the signal is noted as well, and loops call `check` in each turn.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NUMBERS = (signal.SIGINT, signal.SIGTERM)

SAME_SECONDS = 1.0
"""Signals within this time count as one: Ctrl-C reaches a rank from the terminal and again from torchrun."""


LOOK_SECONDS = 0.1
"""Period in which a wait looks for its condition."""


class Interrupted(BaseException):
    """Raised by the signal `number`, to end the work."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by signal {number} ({signal.Signals(number).name}).")
        self.number = number


class Interruption:
    """The first of the signals `NUMBERS` that arrives while `heard` is open: `number`, None before.

    Only the main thread can handle signals: on another thread `heard` does nothing.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._came = 0.0
        self._times = 0
        self._deferred = False

    @property
    def seconds(self) -> float:
        """Seconds since the signal; 0 before it."""
        return time.monotonic() - self._came if self.number is not None else 0.0

    def check(self) -> None:
        """Raise `Interrupted` if a signal has arrived."""
        if self.number is not None:
            raise Interrupted(self.number)

    def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until `condition` holds, at most `seconds`; whether it holds. Raises `Interrupted` after a signal."""
        last = time.monotonic() + seconds
        while not (held := condition()) and time.monotonic() < last:
            self.check()
            time.sleep(LOOK_SECONDS)
        return held

    def warned(self) -> None:
        """Go on as after a first SIGTERM, of which `check` knows: this machine will be taken away."""
        if self.number is None:
            self.number, self._came = signal.SIGTERM, time.monotonic()

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Handle the signals while open, except for ignored ones; afterwards restore the earlier handlers."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in NUMBERS}
        before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
        for number in before:
            signal.signal(number, self._arrived)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Only note the first signal while open. Raises `Interrupted` at once if a signal has arrived before."""
        self._deferred = True
        try:
            self.check()
            yield
        finally:
            self._deferred = False

    def _arrived(self, number: int, _: object) -> None:
        now = time.monotonic()
        if self.number is None:
            # Noted as well as raised: an exception in a signal handler may be lost (see above).
            self.number, self._came = number, now
        elif now < self._came + SAME_SECONDS:
            return
        self._times += 1
        if self._times > 1:
            for each in NUMBERS:
                # From the third on the system decides: this code may be what hangs.
                signal.signal(each, signal.SIG_DFL)
        if self._times > 1 or not self._deferred:
            raise Interrupted(self.number)
