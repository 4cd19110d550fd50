"""Search of a plan: candidates, timed side by side on the cores of this machine, within a number of seconds.

Each core has a process, forked from this one, so that jobs need not be pickled. Figures of the model that a process
measures return to this one, for later processes. With an accelerator all is timed in this process: what a fork inherits
of an accelerator does not work.
"""

from __future__ import annotations

import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.pool import Pool
from typing import Any

import torch

from dure.core.processors import usable_processors
from dure.errors import DureError
from dure.planner.candidates import PLAIN, Scene, crossed, on_servers, shape_of, single, wide
from dure.planner.ranking import Ranked, in_order, ranked
from dure.planner.timing import Timing, timed
from dure.run.strategy import by_axis


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


NEVER = Deadline(math.inf)


Wanted = tuple[int, str]
"""The number of a scene, and a strategy."""

MOST = 8
"""Processes at most: each has a copy of the figures of the model."""


def timings(
    scenes: Sequence[Scene], wanted: Sequence[Wanted], deadline: Deadline
) -> Iterator[tuple[Wanted, Timing | str | None]]:
    """The timing of each of `wanted`, in order; the reason where a strategy does not work, None after the deadline.

    At the deadline a timing under way ends, where processes can be forked.
    """
    processes = min(MOST, usable_processors(), len(wanted))
    if processes < 2 or not _forks():
        yield from ((each, _timed(scenes, each, deadline)) for each in wanted)
        return
    with _pool(processes, scenes, deadline) as pool:
        under_way = [(each, pool.apply_async(_timed_here, (each,))) for each in wanted]
        for each, result in under_way:
            try:
                found, figures = result.get(deadline.left)
            except multiprocessing.TimeoutError:
                yield each, None
            else:
                scenes[each[0]].model.replica.figures.update(figures)
                yield each, found


def _timed(scenes: Sequence[Scene], wanted: Wanted, deadline: Deadline) -> Timing | str | None:
    if deadline.over:
        return None
    number, strategy = wanted
    try:
        return timed(scenes[number], strategy)
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

_inherited: tuple[Sequence[Scene], Deadline] | None = None


_ENDINGS = (signal.SIGINT, signal.SIGTERM)


def _pool(processes: int, scenes: Sequence[Scene], deadline: Deadline) -> Pool:
    """The processes. A new process inherits this one's signal handlers, so signals are blocked until `_begin`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDINGS)
    try:
        return multiprocessing.get_context("fork").Pool(processes, _begin, (scenes, deadline))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(scenes: Sequence[Scene], deadline: Deadline) -> None:
    """Begin a process: one thread, as threads do not survive a fork, and an interruption ends the parent first."""
    global _inherited
    _inherited = scenes, deadline
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDINGS)


def _timed_here(wanted: Wanted) -> tuple[Timing | str | None, dict[Any, Any]]:
    """The timing, and the figures of the model that it has measured."""
    assert _inherited is not None
    scenes, deadline = _inherited
    figures = scenes[wanted[0]].model.replica.figures
    known = set(figures)
    found = _timed(scenes, wanted, deadline)
    return found, {key: figures[key] for key in figures.keys() - known}


Notify = Callable[[int, int | None, str], None]
"""Receives the number of timed candidates, the number of all (None: not known yet) and the strategy that is timed."""

BEST = 2
"""Partitions, methods and codecs of step 1 that are crossed in step 2."""

AXES = ("partition", "sync", "codec")


@dataclass(slots=True)
class Found:
    """The result of a search: the timed strategies in the order of rank, the refused ones with the reason.

    `order` has the candidates, the simplest first. `left` are those that were not timed, as the seconds were over.
    """

    rows: list[Ranked] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)


def search(scene: Scene, deadline: Deadline, notify: Notify = lambda done, of, strategy: None) -> Found:
    """Time the candidates of `scene` before the deadline; after it, only until one works.

    Plain data parallelism is always timed.
    """
    found = Found()
    shape = shape_of(scene)
    _time(scene, [PLAIN], NEVER, found, notify)
    steps: Sequence[Callable[[], Iterable[str]]] = (
        lambda: single(shape),
        lambda: on_servers(_servers_of(found, PLAIN), _servers_of(found, "downpour"), shape),
        lambda: crossed(*_best(found)),
        lambda: () if found.rows else wide(shape),
    )
    for made in steps:
        new = [each for each in dict.fromkeys(made()) if each not in found.order]
        _time(scene, new, deadline, found, notify)
    _until_one_works(scene, found, notify)
    found.rows = in_order(found.rows)
    return found


def _time(scene: Scene, strategies: Sequence[str], deadline: Deadline, found: Found, notify: Notify) -> None:
    found.order += [each for each in strategies if each not in found.order]
    wanted = [(0, each) for each in strategies]
    for each in strategies[:1]:
        notify(0, len(strategies), each)
    for number, ((_, strategy), timing) in enumerate(timings([scene], wanted, deadline), start=1):
        for each in strategies[number : number + 1]:
            notify(number, len(strategies), each)
        if timing is None:
            found.left.append(strategy)
        elif isinstance(timing, str):
            found.refused[strategy] = timing
        else:
            found.rows.append(ranked(strategy, timing, scene.batch))


def _until_one_works(scene: Scene, found: Found, notify: Notify) -> None:
    while found.left and not found.rows:
        _time(scene, [found.left.pop(0)], NEVER, found, notify)


def _servers_of(found: Found, method: str) -> str | None:
    """The layout of servers that is best for `method`."""
    starts = f"{method} ps"
    best = next((row.strategy for row in in_order(found.rows) if row.strategy.startswith(starts)), None)
    return None if best is None else best.removeprefix(f"{method} ")


def _best(found: Found) -> tuple[list[str], list[str], list[str]]:
    """The best partitions, methods and codecs of step 1, which differ from plain data parallelism on one axis."""
    best: Mapping[str, list[str]] = {axis: [] for axis in AXES}
    for row in in_order(found.rows):
        members = by_axis(row.strategy)
        axis = next((each for each in AXES if members.get(each, PLAIN) != PLAIN), None)
        if axis is not None and len(best[axis]) < BEST:
            best[axis].append(row.strategy)
    return best["partition"], best["sync"], best["codec"]
