"""The wait of a thread, as another thread of the process sees it: in dure, or in a collective of others.

Ranks that wait in both wait for each other for ever, as where one has ended its loop and has come to a barrier behind
it. No message tells that, but the stack of the thread does.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

PACKAGE = str(Path(__file__).parents[2])
ENGINE = str(Path(torch.distributed.__file__).parent / "distributed_c10d.py")
TORCH = str(Path(torch.__file__).parent)
LIBRARY = str(Path(threading.__file__).parent)
WAITS = ("run_until", "agree_on")
"""Functions of dure in which a thread waits for other ranks, and calls `RankMonitor.check`."""

RAY_TRAIN = "ray.train.v2._internal.execution"
MEETINGS = {
    (f"{RAY_TRAIN}.context", "_sync_checkpoint_dir_name_across_ranks"): "ray.train.report",
    (f"{RAY_TRAIN}.collective_impl", "barrier"): "ray.train.collective.barrier",
    (f"{RAY_TRAIN}.collective_impl", "broadcast_from_rank_zero"): "ray.train.collective.broadcast_from_rank_zero",
}
"""Functions of Ray Train (module, name) in which a worker waits for all others, and the public names of these waits.
An upload is outside of them: it may take long, and nobody is needed for it."""


class Wait(NamedTuple):
    """A wait in dure (`ours`) or in a collective of others, with its line of the user's code, in words."""

    ours: bool
    text: str


class WatchedThread:
    """The thread that makes this object. Any thread may ask for its wait."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._frame: FrameType | None = None
        self._since = 0.0

    def wait_of(self, seconds: float) -> Wait | None:
        """The wait that has lasted for `seconds` or longer, as far as earlier calls have seen it."""
        frames = list(_outward(sys._current_frames().get(self._thread)))
        waiting = _ours(frames) or _engines(frames) or _rays(frames)
        if waiting is not self._frame:
            self._frame, self._since = waiting, time.monotonic()
        if waiting is None or time.monotonic() - self._since < seconds:
            return None
        name = MEETINGS.get(_function(waiting), "dure")
        if waiting.f_code.co_filename == ENGINE:
            name = f"torch.distributed.{waiting.f_code.co_name}"
        return Wait(name == "dure", f"{name}{_place(frames[frames.index(waiting) :])}")


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _ours(frames: list[FrameType]) -> FrameType | None:
    """The frame in which dure waits for an operation, or for notes of all ranks."""
    return next((f for f in frames if f.f_code.co_name in WAITS and f.f_code.co_filename.startswith(PACKAGE)), None)


def _engines(frames: list[FrameType]) -> FrameType | None:
    """The frame of the collective that the thread has called, the outermost one of the engine's module."""
    return next((f for f in reversed(frames) if f.f_code.co_filename == ENGINE and f.f_code.co_name != "wrapper"), None)


def _rays(frames: list[FrameType]) -> FrameType | None:
    """The frame in which Ray Train waits for all workers."""
    return next((frame for frame in frames if _function(frame) in MEETINGS), None)


def _function(frame: FrameType) -> tuple[str, str]:
    return frame.f_globals.get("__name__", ""), frame.f_code.co_name


def _place(frames: list[FrameType]) -> str:
    """The line that called, the first outside of dure, torch, Ray and Python's own modules."""
    for frame in frames:
        file = frame.f_code.co_filename
        if not file.startswith((PACKAGE, TORCH, LIBRARY)) and not _function(frame)[0].startswith("ray."):
            return f" ({Path(file).name}:{frame.f_lineno})"
    return ""
