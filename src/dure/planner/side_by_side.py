"""Timings of many strategies in several scenes, side by side on the cores of this machine.

Each core has a process, forked from this one, so that jobs need not be pickled. Figures of the model that a process
measures return to this one, for later processes. With an accelerator all is timed in this process: what a fork inherits
of an accelerator does not work.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from multiprocessing.pool import Pool
from typing import Any

import torch

from dure.errors import DureError
from dure.planner.deadline import Deadline
from dure.planner.scene import Scene
from dure.planner.timing import Timing, timed

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
    processes = min(MOST, _cores(), len(wanted))
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


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
