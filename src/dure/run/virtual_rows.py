"""The rows of the history that one segment of a virtual run adds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dure.job.metrics import check_row

if TYPE_CHECKING:
    import torch

    from dure.job.companions import Grader
    from dure.run.callbacks import Callbacks, Row
    from dure.run.gathering import Gathering
    from dure.run.outcome import Totals
    from dure.run.setup import Setup
    from dure.run.stage_gathering import StageGathering
    from dure.run.virtual_attendance import Attendance
    from dure.run.virtual_model import VirtualModel
    from dure.sync.worker import Worker


@dataclass(slots=True)
class VirtualRows:
    """Grades models when they are due and appends rows to `history`; without an `evaluator` there are none.

    | method                                 | graded at                            | model                       |
    |----------------------------------------|--------------------------------------|-----------------------------|
    | synchronous, all have the same model   | the first worker's due boundary      | its own                     |
    | synchronous, models differ, or buffers | the last worker's due boundary       | the mean of all, gathered   |
    | any other                              | so many boundaries of all workers    | servers', or mean of peers  |

    `now` gives the virtual time and `bytes_sent` the bytes that workers have sent in this segment,
    `more` what a row has besides.
    """

    setup: Setup
    callbacks: Callbacks
    evaluator: Grader | None
    history: list[Row]
    model: VirtualModel
    attendance: Attendance
    totals: Totals
    now: Callable[[], float]
    bytes_sent: Callable[[], int]
    more: Callable[[], Row] = dict
    gathering: Gathering | StageGathering = field(init=False)

    def __post_init__(self) -> None:
        self.gathering = self.setup.gathering()

    def at_boundary(self, worker: Worker) -> None:
        """Record that a worker begins its next step; a boundary at which a checkpoint is taken counts once."""
        rank, clock, attendance = worker.number, worker.clock, self.attendance
        before = attendance.at.get(rank)
        attendance.at[rank] = clock
        attendance.away.discard(rank)
        if before is None or clock <= before:
            return
        if not self.setup.synchronous:
            self.count_passed()
            return
        due = clock % self.setup.eval_every == 0 and clock > self._last
        if self.model.shards and not self.model.at_servers:
            if due and self._slowest() == clock:
                self.add()  # the last worker is here: servers have applied this step, and no later gradient
        elif (
            due
            and self.setup.stages is None
            and worker.buffers is None
            and self.setup.delivery.is_common(worker, clock)
        ):
            self._add_common(worker)
        else:
            if due:
                self._gather(worker)
            self.grade_means()

    def count_passed(self) -> None:
        """Count a step boundary of a method without common steps, and add a row after every so many of them."""
        self.attendance.passed += 1
        if self.attendance.passed % (self.setup.eval_every * self.setup.workers) == 0:
            self.add()

    def grade_means(self) -> None:
        """Grade the means of all steps that every worker has made."""
        if self.gathering:
            for found in self.gathering.complete(self._slowest()):
                updates = self.model.updates_at_servers() + found.updates
                self._append(found.values, found.buffers, found.step, updates)

    def add(self, *, final: bool = False) -> None:
        """Grade the model that the method delivers now; `final`, when all work is done and counted."""
        if self.evaluator is not None:
            model = self.model
            self._append(model.delivered(), model.buffers(), self._slowest(), model.updates(), final=final)

    @property
    def _last(self) -> int:
        return self.history[-1]["step"] if self.history else 0

    def _slowest(self) -> int:
        return self.attendance.slowest(self._last)

    def _add_common(self, worker: Worker) -> None:
        """Grade the model that all workers have, as this worker has it."""
        delivery, model = self.setup.delivery, self.model
        updates = model.updates_at_servers() if model.at_servers else delivery.gradients_in_common(worker)
        self._append(delivery.shown(worker), None, worker.clock, updates)

    def _gather(self, worker: Worker) -> None:
        """Add a worker's model after this step to the mean that is graded."""
        delivery = self.setup.delivery
        updates = worker.clock - worker.given if self.model.at_servers else delivery.gradients_in(worker)
        self.gathering.add(
            worker.clock,
            worker.number,
            delivery.shown(worker),
            updates=updates,
            weight=delivery.weight(self.setup.replica_of(worker.number)),
            buffers=worker.buffers,
        )

    def _append(
        self, values: torch.Tensor, buffers: torch.Tensor | None, step: int, updates: int, *, final: bool = False
    ) -> None:
        assert self.evaluator is not None
        with self.callbacks.evaluating():
            grade = self.evaluator.grade(values, buffers)
        row = {
            "seconds": self.totals.seconds if final else self.now(),
            "step": max(step, self._last),  # also where a newcomer has just begun
            "updates": updates,
            "samples": self.totals.counts["samples"],
            "loss": grade.loss,
            "accuracy": grade.accuracy,
            "bytes": self.totals.counts["bytes_sent"] + (0 if final else self.bytes_sent()),
            **self.model.consensus(),
            **grade.figures,
            **self.more(),
        }
        self.history.append(row)
        self.callbacks.row(row)
        check_row(row)
