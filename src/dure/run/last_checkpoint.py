"""The checkpoint that a run writes after SIGINT or SIGTERM, before it ends.

| method                          | where its workers stop                                                            |
|---------------------------------|-----------------------------------------------------------------------------------|
| workers at clocks of their own  | each at its next step boundary, as for a checkpoint that is due                   |
| all workers at one clock        | at a clock that none has reached; a worker that has refuses, and a later one is   |
|                                 | tried                                                                             |
"""

from __future__ import annotations

import logging
import math
import signal
from typing import TYPE_CHECKING, Any, Protocol

from dure.errors import DureError, Refused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine, Mapping

    from dure.core.node import Task
    from dure.run.checkpoint_round import CheckpointRound
    from dure.run.setup import Setup
    from dure.runtime.launch.interruption import Interruption
    from dure.runtime.process.node import ProcessNode

AHEAD_SECONDS = 0.2
"""Time in which workers make the steps up to the clock at which they stop together: longer than a message takes."""

AHEAD_STEPS = 20
"""Short steps beyond that, of which the driver may not know: between two meetings, workers report nothing."""

ATTEMPTS = 3
"""Clocks that are tried."""

BETWEEN_ATTEMPTS = 0.2
"""Seconds in which each worker reports its progress again."""

log = logging.getLogger("dure")


class Checkpointing(Protocol):
    """What is used of the driver of a run."""

    node: ProcessNode
    setup: Setup
    checkpoint_due: int
    round: CheckpointRound | None

    @property
    def progress(self) -> Mapping[str, Mapping[str, Any]]: ...

    @property
    def can_checkpoint(self) -> bool: ...

    def checkpoint_now(self) -> Coroutine[Any, Any, None]: ...

    def stop_at(self, step: int) -> Awaitable[None]: ...


class LastCheckpoint:
    """Has the run of `driver` write a checkpoint once `interruption` has come, in at most `grace` seconds."""

    def __init__(self, driver: Checkpointing, interruption: Interruption, grace: float) -> None:
        self._driver = driver
        self._interruption = interruption
        self._grace = grace
        self._writing: Task[None] | None = None

    def look(self) -> None:
        """Raise `Interrupted` once the checkpoint is written, or there will be none."""
        number = self._interruption.number
        if number is None:
            return
        if self._writing is None:
            if not self._driver.can_checkpoint or not self._grace:
                self._interruption.check()
            log.warning("%s: the run ends with a checkpoint, within %g s.", signal.Signals(number).name, self._grace)
            self._writing = self._driver.node.spawn(self._driver.checkpoint_now(), "the last checkpoint")
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


async def stop_together(driver: Checkpointing) -> None:
    """Have all workers of a method in lockstep stop at one clock, and wait until each has agreed to it.

    Raises:
        Refused: in every attempt a worker had passed the clock already.
    """
    ahead, scheduled = AHEAD_SECONDS, driver.checkpoint_due
    for attempt in range(ATTEMPTS):
        reached = max((int(said["steps"]) for said in driver.progress.values()), default=0)
        rate = reached / max(driver.node.now(), ahead)
        unseen = 2 * driver.setup.period if driver.setup.period > 1 else min(AHEAD_STEPS, math.ceil(rate))
        step = reached + 1 + math.ceil(ahead * rate) + unseen
        if step >= scheduled or driver.round is not None:
            return  # the checkpoint that is due anyway comes first
        try:
            await driver.stop_at(step)
        except Refused:
            driver.checkpoint_due = scheduled
            if attempt == ATTEMPTS - 1:
                raise
            ahead *= 3
            await driver.node.sleep(BETWEEN_ATTEMPTS)
        else:
            return
