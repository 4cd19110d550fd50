"""Evaluates snapshots of the model on a thread while a real run goes on."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from dure.job.evaluation import grader_of
from dure.job.metrics import Metrics

if TYPE_CHECKING:
    from dure.run.callbacks import Callbacks, Row
    from dure.run.setup import Setup


class Snapshot(NamedTuple):
    """The delivered parameters at one moment, with their row of the history."""

    row: Row
    values: torch.Tensor
    buffers: torch.Tensor | None


class SnapshotEvaluator:
    """Evaluates snapshots one after another on a thread of the lowest priority, so that workers come first.

    `finished` is called with each row, once its loss and accuracy are known.
    """

    def __init__(self, setup: Setup, finished: Callable[[Row], None], callbacks: Callbacks) -> None:
        self._evaluator = grader_of(setup.job, setup.config.eval_samples, seed=setup.config.seeded)
        self._finished = finished
        self._newest_only = setup.job.companions is not None  # an episode may take longer than the time between two
        self._evaluating = callbacks.evaluating
        self._waiting: deque[Snapshot] = deque()
        self._evaluated: deque[Row] = deque()
        self._wake = threading.Semaphore(0)
        self._closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="dure evaluator", daemon=True)
        self._thread.start()

    def submit(self, snapshot: Snapshot) -> None:
        if self._newest_only:
            self._waiting.clear()
        self._waiting.append(snapshot)
        self._wake.release()

    def look(self) -> None:
        """Hand over the rows that are finished. Raises the error of the thread, if any."""
        if self._error is not None:
            raise self._error
        while self._evaluated:
            self._finished(self._evaluated.popleft())

    def close(self) -> None:
        """Evaluate the snapshots that are left, and hand their rows over."""
        self._end()
        self.look()

    def abandon(self) -> None:
        """End without evaluating the snapshots that are left."""
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
                self._wake.acquire()  # released by `submit` and `_end`
                if not self._waiting:
                    if self._closing:
                        return
                    continue
                snapshot = self._waiting.popleft()
                with self._evaluating():
                    metrics: Metrics = self._evaluator.grade(snapshot.values, snapshot.buffers)
                self._evaluated.append(
                    {**snapshot.row, "loss": metrics.loss, "accuracy": metrics.accuracy, **metrics.figures}
                )
        except BaseException as error:  # noqa: BLE001  (raised again on the driver's thread, by `look`)
            self._error = error
