"""Evaluation of snapshots while a real run goes on."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from dure.job.evaluation import Evaluator, Metrics

if TYPE_CHECKING:
    from dure.run.setup import Setup
    from dure.run.virtual import Callbacks, Row


class Snapshot(NamedTuple):
    """The delivered parameters at one moment."""

    row: Row
    values: torch.Tensor
    buffers: torch.Tensor | None


class Grader:
    """Grades snapshots on a thread of its own, at the lowest priority: the workers come first."""

    def __init__(self, setup: Setup, finished: Callable[[Row], None], watch: Callbacks) -> None:
        self._examiner = Evaluator(setup.job, setup.config.eval_samples)
        self._finished = finished
        self._evaluating = watch.evaluating
        self._waiting: deque[Snapshot] = deque()
        self._graded: deque[Row] = deque()
        self._wake = threading.Semaphore(0)
        self._closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="dure grader", daemon=True)
        self._thread.start()

    def give(self, snapshot: Snapshot) -> None:
        self._waiting.append(snapshot)
        self._wake.release()

    def look(self) -> None:
        """Hand over what has been graded."""
        if self._error is not None:
            raise self._error
        while self._graded:
            self._finished(self._graded.popleft())

    def close(self) -> None:
        """Grade what is left."""
        self._end()
        self.look()

    def abandon(self) -> None:
        """Grade nothing more."""
        self._waiting.clear()
        self._end()

    def _end(self) -> None:
        self._closing = True
        self._wake.release()
        while self._thread.is_alive():
            self._thread.join(1.0)

    def _work(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        torch.set_num_threads(1)
        try:
            while True:
                self._wake.acquire()  # released by `give` and `close`
                if not self._waiting:
                    if self._closing:
                        return
                    continue
                snapshot = self._waiting.popleft()
                with self._evaluating():
                    grade: Metrics = self._examiner.grade(snapshot.values, snapshot.buffers)
                self._graded.append({**snapshot.row, "loss": grade.loss, "accuracy": grade.accuracy})
        except BaseException as error:  # noqa: BLE001  (raised again on the launcher's thread, by `look`)
            self._error = error
