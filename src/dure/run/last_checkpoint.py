"""The checkpoint that a run writes after SIGINT or SIGTERM, before it ends."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from dure.core.log import log
from dure.errors import DureError

if TYPE_CHECKING:
    from dure.core.node import Operation, Task
    from dure.run.checkpoint_schedule import CheckpointSchedule
    from dure.runtime.launch.interruption import Interruption


class LastCheckpoint:
    """Has `schedule` write a checkpoint once `interruption` has come, in at most `grace` seconds.

    Before the run has `begun` there is nothing to write.
    """

    def __init__(
        self, schedule: CheckpointSchedule, begun: Operation[None], interruption: Interruption, grace: float
    ) -> None:
        self._schedule = schedule
        self._begun = begun
        self._interruption = interruption
        self._grace = grace
        self._writing: Task[None] | None = None

    def look(self) -> None:
        """Raise `Interrupted` once the checkpoint is written, or there will be none."""
        number = self._interruption.number
        if number is None:
            return
        if self._writing is None:
            if not (self._begun.done and self._schedule.can_write and self._grace):
                self._interruption.check()
            log.warning("%s: the run ends with a checkpoint, within %g s.", signal.Signals(number).name, self._grace)
            self._writing = self._schedule.node.spawn(self._schedule.write_now(), "the last checkpoint")
            self._writing.when_done(lambda: None)  # its error is raised below
        if self._writing.done:
            try:
                self._writing.result()
            except DureError as error:
                log.warning("no checkpoint was written: %s", error)
            self._interruption.check()
        if self._interruption.seconds > self._grace:
            log.warning("no checkpoint was written within %g s; --grace gives a run more time.", self._grace)
            self._interruption.check()
