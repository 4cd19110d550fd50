"""The rows of a run's history. Those of a real run are evaluated on a thread while the run goes on."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from dure.core.deployment import NodeId
from dure.core.meter import Span
from dure.core.node import Call, Reply
from dure.job.evaluation import grader_of
from dure.job.metrics import check_row
from dure.run.gathering import Gathering

if TYPE_CHECKING:
    from dure.job.companions import Grader
    from dure.run.outcome import Totals
    from dure.run.prebuilt import Callbacks, Row
    from dure.run.roster import RunProgress
    from dure.run.setup import Setup


class Snapshot(NamedTuple):
    """The delivered parameters at one moment, with their row of the history."""

    row: Row
    values: torch.Tensor
    buffers: torch.Tensor | None

    def graded(self, grader: Grader) -> Row:
        """The row with the loss and the accuracy of the model."""
        metrics = grader.grade(self.values, self.buffers)
        return {**self.row, "loss": metrics.loss, "accuracy": metrics.accuracy, **metrics.figures}


class SnapshotEvaluator:
    """Evaluates snapshots one after another on a thread of the lowest priority, so that workers come first.

    `finished` is called with each row, once its loss and accuracy are known.
    """

    def __init__(self, setup: Setup, finished: Callable[[Row], None], callbacks: Callbacks) -> None:
        self._evaluator = grader_of(setup.job, setup.config.eval_samples, seed=setup.config.seeded)
        self._finished = finished
        self._evaluating = callbacks.evaluating
        # Of agents the newest only: an episode may take longer than the time between two snapshots. `append` drops the
        # older one at once: the thread never finds an empty queue between a removal and an insertion.
        self._waiting: deque[Snapshot] = deque(maxlen=None if setup.job.companions is None else 1)
        self._evaluated: deque[Row] = deque()
        self._wake = threading.Semaphore(0)
        self._closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="dure evaluator", daemon=True)
        self._thread.start()

    def submit(self, snapshot: Snapshot) -> None:
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
                if not self._waiting:  # a newer snapshot has replaced that of this release, or the run ends
                    if self._closing:
                        return
                    continue
                snapshot = self._waiting.popleft()
                with self._evaluating():
                    self._evaluated.append(snapshot.graded(self._evaluator))
        except BaseException as error:  # noqa: BLE001  (raised again on the driver's thread, by `look`)
            self._error = error


class RunCounts(NamedTuple):
    """The present seconds of a run, samples and bytes of all workers, and the last step that every worker has made."""

    seconds: Callable[[], float]
    samples: Callable[[], int]
    bytes_sent: Callable[[], int]
    slowest: Callable[[], int]


class History(ABC):
    """Makes the rows of a run, in virtual time and on processes; `more` gives further entries of a row, by its seconds.

    | method                                 | model               | in virtual time         | on processes           |
    |----------------------------------------|---------------------|-------------------------|------------------------|
    | synchronous, all have the same model   | of any worker       | at the first worker's   | one that `evaluates`   |
    |                                        |                     | due boundary            | sends its own          |
    | synchronous, models differ, or buffers | mean of all workers | at the last worker's    | every worker sends its |
    |                                        |                     | due boundary            | own, as a part         |
    | any other                              | servers', or mean   | after so many           | one that `evaluates`   |
    |                                        | of all peers        | boundaries of all       | asks for it            |
    """

    def __init__(self, setup: Setup, callbacks: Callbacks, counts: RunCounts, more: Callable[[float], Row]) -> None:
        self.rows: list[Row] = []
        self._setup, self._callbacks, self._counts, self._more = setup, callbacks, counts, more
        self._gathering = Gathering(setup)
        self._at_servers: dict[int, int] = {}  # gradients that are in all parts of a step
        self._last_step = 0
        self.missing = 0

    def restore(self, rows: list[Row], missing: int = 0) -> None:
        """Go on from `rows`; so many of the gradients that workers count are `missing` in the model.

        A run that goes on with more copies of the model counts as if it had had them from the start.
        """
        self.rows, self.missing = rows, missing
        self._last_step = rows[-1]["step"] if rows else 0

    @abstractmethod
    def evaluate(self, snapshot: Snapshot) -> None:
        """Evaluate a snapshot, and pass its row to `add`, now or later."""

    def add_part(
        self, rank: int, step: int, values: torch.Tensor, buffers: torch.Tensor | None, *, updates: int, at_servers: int
    ) -> None:
        """Add the model of worker `rank` to the mean of all workers' models at its step.

        It holds `updates` gradients that no server had, and `at_servers` of all workers.
        """
        weight = self._setup.delivery.weight(self._setup.replica_of(rank))
        self._at_servers[step] = at_servers
        self._gathering.add(step, rank, values, updates=updates, weight=weight, buffers=buffers)

    def evaluate_means(self) -> None:
        """Evaluate the means of all steps that every worker has made."""
        if self._gathering:
            for found in self._gathering.complete(self._counts.slowest()):
                updates = found.updates + self._in_all_parts(found.step)
                if found.step > self._last_step:  # else a message was late: a later model has its row already
                    self.evaluate_now(found.step, updates, found.values, found.buffers)

    def _in_all_parts(self, step: int) -> int:
        """The number of gradients that all parts of a step have in common."""
        return self._at_servers.pop(step)

    def evaluate_now(self, step: int, updates: int, values: torch.Tensor, buffers: torch.Tensor | None = None) -> None:
        """Evaluate a model of this moment, after `step`, with `updates` gradients in it."""
        self.evaluate(Snapshot(self.row(self._counts.seconds(), step, updates), values, buffers))

    def evaluate_result(
        self, totals: Totals, values: torch.Tensor, buffers: torch.Tensor | None, *, step: int, updates: int
    ) -> None:
        """Evaluate the result of the run, whose `totals` are complete."""
        counts = totals.counts
        row = self._row(totals.seconds, step, updates, counts["samples"], counts["bytes_sent"])
        self.evaluate(Snapshot(row, values, buffers))

    def row(self, seconds: float, step: int, updates: int, nbytes: int = 0) -> Row:
        """The row of a snapshot, not evaluated yet; a worker has reported `nbytes` that it has sent."""
        return self._row(seconds, step, updates, self._counts.samples(), max(self._counts.bytes_sent(), nbytes))

    def _row(self, seconds: float, step: int, updates: int, samples: int, nbytes: int) -> Row:
        self._last_step = max(step, self._last_step)  # also where a newcomer has just begun
        return {
            "seconds": seconds,
            "step": self._last_step,
            "updates": updates - self.missing,
            "samples": samples,
            "loss": None,
            "accuracy": None,
            "bytes": nbytes,
            **self._more(seconds),
        }

    def add(self, row: Row) -> None:
        """Append a row that has been evaluated. Raises `DivergedError` for a loss that is NaN or infinite."""
        if self.rows:
            check_row(self.rows[-1])  # a thread may have evaluated more rows before the run ends
        self.rows.append(row)
        self._callbacks.row(row)
        check_row(row)


class DriverHistory(History):
    """The history of a real run, from the messages of its workers. The snapshots of `evaluating_worker` count.

    `gradients` gives the number of gradients in the model after a step, where a group is formed again: members that
    have failed, or that began with a copy of another's model, do not report them.
    """

    def __init__(
        self,
        setup: Setup,
        callbacks: Callbacks,
        progress: RunProgress,
        now: Callable[[], float],
        more: Callable[[float], Row],
    ) -> None:
        super().__init__(setup, callbacks, RunCounts(now, progress.samples, progress.bytes_sent, progress.lowest), more)
        self.spans: list[Span] = []
        self.evaluating_worker = ""
        self.gradients: Callable[[int], int] | None = None
        self.evaluator = SnapshotEvaluator(setup, self.add, callbacks)
        self._progress = progress

    def evaluate(self, snapshot: Snapshot) -> None:
        self.evaluator.submit(snapshot)

    def snapshot(self, call: Call, missing: int = 0) -> Reply:
        """Evaluate a snapshot of the model; `missing` gradients are not in it, as their workers were away."""
        if call.caller == self.evaluating_worker:
            fields = call.fields
            values, *buffers = [tensor.clone() for tensor in call.tensors]
            row = self.row(fields["seconds"], fields["steps"], fields["updates"] - missing, fields["bytes"])
            self.evaluate(Snapshot(row, values, buffers[0] if buffers else None))
        return Reply()

    def part(self, call: Call) -> Reply:
        """Add a worker's model to the mean of all workers' models at its step."""
        fields, (values, *buffers) = call.fields, call.tensors
        step, rank = fields["steps"], NodeId.of(call.caller).rank
        if step > self._last_step:
            updates = fields["updates"] if self.gradients is None else -fields["refused"]
            counts = {"updates": updates, "at_servers": fields["at_servers"]}
            self.add_part(rank, step, values, buffers[0] if buffers else None, **counts)
        self._progress.at[call.caller] = fields["at"]
        self.evaluate_means()
        return Reply()

    def _in_all_parts(self, step: int) -> int:
        held = super()._in_all_parts(step)
        return held if self.gradients is None else self.gradients(step)

    def add_spans(self, call: Call) -> Reply:
        self.spans.extend(Span(*span) for span in call.fields["spans"])
        return Reply()
