"""The rows of a real run's history: snapshots and means of the workers' models, evaluated while the run goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from dure.core.deployment import NodeId
from dure.core.meter import Span
from dure.core.node import Call, Reply
from dure.job.metrics import check_row
from dure.run.snapshot_evaluator import Snapshot, SnapshotEvaluator

if TYPE_CHECKING:
    from dure.run.callbacks import Callbacks, Row
    from dure.run.progress import RunProgress
    from dure.run.setup import Setup


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
        self._gathering = setup.gathering()
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
