"""Heartbeats: a thread of each process sends its observer a beat once a second while the process runs.

    process of the launcher's machine ── number, clock, waiting ──> `BeatPipe` of the launcher
    process of another machine ── the same ── connection of its own ──> monitor of rank 0 ── the same ──> `BeatPipe`

A process that is stopped (SIGSTOP, a debugger, a failed machine) sends none. During a computation, `time.sleep` and a
loop in Python the thread can send. During native code that keeps the interpreter's lock it cannot: on the observer's
machine `cpu_seconds` distinguishes such code from a stopped process.

No other user can write to a pipe, or fill it. A beat waits behind no other message, and is dropped where the pipe is
full: the next one follows in a second. The number belongs to one incarnation of one process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

PERIOD_SECONDS = 1.0
"""Longest time between two heartbeats."""

LONGEST_GAP_SECONDS = 2.0
"""Longest silence that one look can add: an observer that looks later was stopped itself."""

_BEAT = struct.Struct("!QQ?")  # far below PIPE_BUF: a pipe takes all of it or nothing


class Beat(NamedTuple):
    """A heartbeat: the steps that a worker has made, and whether the process waits for others."""

    name: str
    clock: int
    waiting: bool


class Heartbeat:
    """Calls `send` on a thread of its own, once in `period` seconds, until `stop`.

    `send` gets the clock, and whether the process waits for others: the result of `state`. It returns within `period`.
    """

    def __init__(self, send: Callable[[int, bool], None], state: Callable[[], tuple[int, bool]], period: float) -> None:
        self._send = send
        self._state = state
        self._period = period
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="dure heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop sending."""
        self._stopped.set()
        self._thread.join(PERIOD_SECONDS)

    def _beat(self) -> None:
        while not self._stopped.is_set():
            due = time.monotonic() + self._period
            self._send(*self._state())
            self._stopped.wait(max(0.0, due - time.monotonic()))


class BeatPipe:
    """A pipe that carries the heartbeats of all processes of a launcher; they inherit its end `sink`.

    The pipe outlives the incarnations of processes: a beat of an earlier one is ignored. `source` is readable when
    beats have arrived.
    """

    def __init__(self) -> None:
        self.source, self.sink = os.pipe()
        for end in (self.source, self.sink):
            os.set_blocking(end, False)
        self._names: dict[int, str] = {}
        self._numbers = itertools.count()

    def admit(self, name: str) -> int:
        """Return the number of a new incarnation of the process `name`. Its earlier number becomes invalid."""
        number = next(self._numbers)
        self._names = {other: known for other, known in self._names.items() if known != name} | {number: name}
        return number

    def received(self) -> Iterator[Beat]:
        """Yield the heartbeats that have arrived since the last call."""
        with contextlib.suppress(BlockingIOError):
            while True:
                for number, clock, waiting in _BEAT.iter_unpack(os.read(self.source, _BEAT.size << 10)):
                    if number in self._names:
                        yield Beat(self._names[number], clock, waiting)

    def close(self) -> None:
        os.close(self.source)
        os.close(self.sink)


def put(sink: int, number: int, clock: int, waiting: bool) -> None:
    """Write a heartbeat to the end `sink` of a `BeatPipe`; drop it if the pipe is full, or its reader has ended."""
    with contextlib.suppress(OSError):
        os.write(sink, _BEAT.pack(number, clock, waiting))


class Silence:
    """Seconds since the last sign of each process, counted while this observer runs.

    `pass_time` is called several times a second. Time for which the observer itself was stopped (the machine slept, or
    all processes were stopped) counts against no process.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._seconds: dict[str, float] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._seconds

    @property
    def names(self) -> tuple[str, ...]:
        """The processes that have shown a sign."""
        return tuple(self._seconds)

    def heard(self, name: str) -> None:
        """Reset the silence of a process that has shown that it runs. The first call starts the count."""
        self._seconds[name] = 0.0

    def forget(self, name: str) -> None:
        self._seconds.pop(name, None)

    def pass_time(self) -> None:
        """Add the seconds since the last call to the silence of each process."""
        now = self._clock()
        gap, self._last = min(now - self._last, LONGEST_GAP_SECONDS), now
        for name in self._seconds:
            self._seconds[name] += gap

    def seconds(self, name: str) -> float:
        """Seconds of silence of the process; 0 before its first sign."""
        return self._seconds.get(name, 0.0)


_STOPPED = ("T", "t")  # by a signal, by a debugger
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped the process; False where /proc does not exist."""
    fields = _fields(pid)
    return bool(fields) and fields[0] in _STOPPED


def cpu_seconds(pid: int) -> float:
    """Processor seconds that the process has used; 0 where /proc does not exist."""
    fields = _fields(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS if fields else 0.0


def _fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name of the program; none if the process does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
