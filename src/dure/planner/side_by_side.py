"""Timings of a plan, side by side on the cores of this machine, within a number of seconds.

Each core has a process, forked from this one, so that jobs need not be pickled. Figures of the model that a process
measures return to this one, for later processes. A timing that takes too long ends with its process, and another takes
its place; its result is the bound that it has reached. With an accelerator all is timed in this process, one whole
timing after another: what a fork inherits of an accelerator does not work.
"""

from __future__ import annotations

import math
import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from threading import Event, Thread
from typing import Any

import torch

from dure.core.processors import usable_processors
from dure.errors import DureError
from dure.planner.candidates import Scene
from dure.planner.timing import LeastSeconds, Timing, timed


class Deadline:
    """A time limit: it is over once `seconds` have passed on `clock`."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def over(self) -> bool:
        """Whether the seconds have passed."""
        return self._clock() > self._end

    @property
    def left(self) -> float | None:
        """The seconds that are left, at least 0; None without an end."""
        return None if math.isinf(self._end) else max(0.0, self._end - self._clock())

    def part(self, share: float) -> Deadline:
        """A limit of a share of the seconds that are left."""
        return self if self.left is None else Deadline(share * self.left, self._clock)


Wanted = tuple[int, str]
"""The number of a scene, and a strategy."""

Result = Timing | str | float
"""A timing; the reason where a strategy does not work; where the time was over, the least seconds of a step."""

MOST = 8
"""Processes at most: each has a copy of the figures of the model."""


def timings(
    scenes: Sequence[Scene], wanted: Sequence[Wanted], deadline: Deadline, share: float = 1.0
) -> Iterator[tuple[Wanted, Result]]:
    """The result of each of `wanted`, in order.

    A timing ends at the deadline, and when it has taken that `share` of the seconds that were left when it began, where
    processes can be forked.
    """
    if not _forks():
        yield from ((each, 0.0 if deadline.over else _timed(scenes, each)) for each in wanted)
        return
    team = _Team(scenes, min(MOST, usable_processors(), len(wanted)))
    try:
        yield from team.timings(wanted, deadline, share)
    finally:
        team.end()


def _timed(
    scenes: Sequence[Scene], wanted: Wanted, began: Callable[[LeastSeconds], None] = lambda least: None
) -> Timing | str:
    number, strategy = wanted
    try:
        return timed(scenes[number], strategy, began=began)
    except DureError as error:
        return str(error)


def _forks() -> bool:
    """Whether this process may be forked, and may have children."""
    return (
        "fork" in multiprocessing.get_all_start_methods()
        and not multiprocessing.current_process().daemon
        and not torch.accelerator.is_available()
    )


# ---- the processes


class _Team:
    """Processes that time what they are given, one thing each."""

    def __init__(self, scenes: Sequence[Scene], count: int) -> None:
        self._scenes = scenes
        self._free = [_Child(scenes) for _ in range(count)]
        self._busy: dict[Connection, _Child] = {}

    def timings(self, wanted: Sequence[Wanted], deadline: Deadline, share: float) -> Iterator[tuple[Wanted, Result]]:
        """As the function of this name."""
        waiting, found = deque(enumerate(wanted)), dict[int, Result]()
        for place, each in enumerate(wanted):
            while place not in found:
                while self._free and waiting and not deadline.over:
                    child = self._free.pop()
                    child.begin(*waiting.popleft(), deadline.part(share))
                    self._busy[child.pipe] = child
                if not self._busy:  # and the time is over
                    break
                found |= self._finished()
            yield each, found.get(place, 0.0)

    def _finished(self) -> dict[int, Result]:
        """Wait until a timing has ended or its time is over; the places and results of those that have."""
        lefts = [child.limit.left for child in self._busy.values()]
        ended = set(wait(list(self._busy), min((left for left in lefts if left is not None), default=None)))
        ending = [pipe for pipe, child in self._busy.items() if pipe in ended or child.limit.over]
        return dict(self._result(self._busy.pop(pipe), ended=pipe in ended) for pipe in ending)

    def _result(self, child: _Child, *, ended: bool) -> tuple[int, Result]:
        if ended:
            with suppress(EOFError, ConnectionError):
                result, figures = child.pipe.recv()
                self._scenes[child.scene].model.replica.figures.update(figures)
                self._free.append(child)
                return child.place, result
        code = child.end()
        self._free.append(_Child(self._scenes))
        reason = f"the process that timed it ended with exit code {code}, as one without enough memory does"
        return child.place, reason if ended else child.least.value

    def end(self) -> None:
        """End all processes."""
        for child in (*self._free, *self._busy.values()):
            child.end()


_ENDINGS = (signal.SIGINT, signal.SIGTERM)


KILLED = 10.0
"""Seconds in which a killed process is gone."""


class _Child:
    """A process, its pipe, and what it times now: the `place` among those wanted, the `scene`, and its `limit`.

    `least` has the least seconds of a step, in memory that both processes share.
    """

    def __init__(self, scenes: Sequence[Scene]) -> None:
        fork = multiprocessing.get_context("fork")
        self.pipe, theirs = fork.Pipe()
        self.least = fork.RawValue("d", 0.0)
        self._process = fork.Process(target=_serve, args=(theirs, scenes, self.least), daemon=True)
        # A new process inherits this one's signal handlers, so signals are blocked until `_serve`.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDINGS)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    def begin(self, place: int, wanted: Wanted, limit: Deadline) -> None:
        """Begin a timing."""
        self.place, self.scene, self.limit = place, wanted[0], limit
        with suppress(ConnectionError):  # a process that has ended is seen when its result is waited for
            self.pipe.send(wanted)

    def end(self) -> int | None:
        """End the process; its exit code."""
        self.pipe.close()
        ended = self._process.exitcode
        self._process.kill()
        self._process.join(KILLED)
        return self._process.exitcode if ended is None else ended


def _serve(pipe: Connection, scenes: Sequence[Scene], least: Any) -> None:
    """Time what comes through `pipe`, on one thread: threads do not survive a fork. An interruption is the parent's.

    An answer has the figures of the model that its timing has measured.
    """
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDINGS)
    bounds = _Bounds(least)
    with suppress(EOFError, ConnectionError):
        while _asked(pipe):
            wanted = pipe.recv()
            figures = scenes[wanted[0]].model.replica.figures
            known = set(figures)
            found = _timed(scenes, wanted, bounds.began)
            bounds.began(_nothing)
            pipe.send((found, {key: figures[key] for key in figures.keys() - known}))


def _nothing() -> float:
    return 0.0


class _Bounds:
    """A thread that writes the bound of the timing under way to `least`, every tenth of a second."""

    def __init__(self, least: Any) -> None:
        self._least = least
        self._ended = Event()  # never set: a process ends with its thread
        self.began(_nothing)
        Thread(target=self._write, daemon=True).start()

    def began(self, bound: LeastSeconds) -> None:
        """Begin to write another bound."""
        self._bound = bound

    def _write(self) -> None:
        while not self._ended.wait(0.1):
            self._least.value = self._bound()


def _asked(pipe: Connection) -> bool:
    """Wait for something to time; false if the parent has ended. Its end of the pipe is open in other children, too."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    return pipe in wait([pipe, parent.sentinel])
