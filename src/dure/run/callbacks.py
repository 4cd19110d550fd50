"""Receivers of the reports of a running run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dure.run.checkpoint import Parts

if TYPE_CHECKING:
    from dure.sync.worker_state import WorkerState

Row = dict[str, Any]
"""A row of the history."""


@dataclass(slots=True)
class Callbacks:
    """Receivers of a run's rows, progress, checkpoints and notices; each does nothing if left out.

    `stepped` receives a worker, the seconds at which its gradient was complete, and a function for the payload bytes
    that workers have sent so far (virtual runs).
    """

    row: Callable[[Row], None] = lambda row: None
    progress: Callable[[int, int, float, int], None] = lambda step, steps, loss, samples: None
    evaluating: Callable[[], AbstractContextManager[None]] = nullcontext
    checkpoint: Callable[[int, Parts], None] = lambda step, parts: None
    rewind: Callable[[int], None] = lambda rows: None
    notice: Callable[[str], None] = lambda text: None
    stepped: Callable[[WorkerState, float, Callable[[], int]], None] = lambda worker, seconds, sent: None
