"""The rows of a real run's history: models of the workers, evaluated on a thread while the run goes on."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dure.core.deployment import NodeId
from dure.core.meter import Span
from dure.core.node import Call, Reply
from dure.job.evaluation import grader_of
from dure.job.metrics import Metrics, check_row
from dure.run.gathering import Gathering

if TYPE_CHECKING:
    from dure.run.callbacks import Callbacks, Row
    from dure.run.roster import RunProgress
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


class History:
    """Makes the rows of a run. The snapshots of `evaluating_worker` count; `now` gives the seconds
    of the run, `more` what a row has besides at such seconds.
    """

    def __init__(
        self,
        setup: Setup,
        callbacks: Callbacks,
        progress: RunProgress,
        now: Callable[[], float],
        more: Callable[[float], Row],
    ) -> None:
        self.rows: list[Row] = []
        self.spans: list[Span] = []
        self.evaluating_worker = ""
        self.evaluator = SnapshotEvaluator(setup, self._add, callbacks)
        self._setup = setup
        self._callbacks = callbacks
        self._progress = progress
        self._now = now
        self._more = more
        self._gathering = Gathering(setup)
        self._at_servers: dict[int, int] = {}  # gradients that are in all parts of a step
        self._last_step = 0

    def restore(self, rows: list[Row]) -> None:
        """Go on from the rows of a checkpoint."""
        self.rows = [dict(row) for row in rows]
        self._last_step = self.rows[-1]["step"] if self.rows else 0

    def snapshot(self, call: Call) -> Reply:
        """Evaluate a snapshot of the model."""
        if call.caller == self.evaluating_worker:
            fields = call.fields
            values, *buffers = [tensor.clone() for tensor in call.tensors]
            row = self._row(fields["seconds"], fields["steps"], fields["updates"], fields["bytes"])
            self.evaluator.submit(Snapshot(row, values, buffers[0] if buffers else None))
        return Reply()

    def part(self, call: Call) -> Reply:
        """Add a worker's model to the mean of all workers' models at its step."""
        fields, (values, *buffers) = call.fields, call.tensors
        step, rank = fields["steps"], NodeId.of(call.caller).rank
        if step > self._last_step:
            self._at_servers[step] = fields["at_servers"]
            more: dict[str, Any] = {
                "updates": fields["updates"],
                "weight": self._setup.delivery.weight(self._setup.replica_of(rank)),
            }
            self._gathering.add(step, rank, values, buffers=buffers[0] if buffers else None, **more)
        self._progress.at[call.caller] = fields["at"]
        self.evaluate_means()
        return Reply()

    def add_spans(self, call: Call) -> Reply:
        self.spans.extend(Span(*span) for span in call.fields["spans"])
        return Reply()

    def evaluate_means(self) -> None:
        """Evaluate the means of all steps that every worker has made."""
        if self._gathering:
            for found in self._gathering.complete(self._progress.lowest()):
                updates = found.updates + self._at_servers.pop(found.step)
                row = self._row(self._now(), found.step, updates)
                self.evaluator.submit(Snapshot(row, found.values, found.buffers))

    def end(self, values: torch.Tensor, buffers: torch.Tensor | None, *, step: int, updates: int) -> None:
        """Evaluate the result of the run, and wait until all rows are there."""
        totals = self._progress.totals
        row = {
            "seconds": totals.seconds,
            "step": max(self._last_step, step),
            "updates": updates,
            "samples": totals.counts["samples"],
            "bytes": totals.counts["bytes_sent"],
            **self._more(totals.seconds),
        }
        self.evaluator.submit(Snapshot(row, values, buffers))
        self.evaluator.close()

    def _row(self, seconds: float, step: int, updates: int, nbytes: int = 0) -> Row:
        """The row of a snapshot, not evaluated yet."""
        self._last_step = max(step, self._last_step)  # also where a newcomer has just begun
        return {
            "seconds": seconds,
            "step": self._last_step,
            "updates": updates,
            "samples": self._progress.samples(),
            "loss": None,
            "accuracy": None,
            "bytes": max(self._progress.bytes_sent(), nbytes),
            **self._more(seconds),
        }

    def _add(self, row: Row) -> None:
        if self.rows:
            check_row(self.rows[-1])  # the thread may have evaluated more rows before the run ends
        self.rows.append(row)
        self._callbacks.row(row)
        check_row(row)
