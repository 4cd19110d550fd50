"""Schedules the checkpoints of a real run, and the step boundaries at which its workers stop for them.

| checkpoint  | method                         | where workers stop                                                    |
|-------------|--------------------------------|-----------------------------------------------------------------------|
| that is due | all workers at one clock       | at the clock that is due                                              |
|             | workers at clocks of their own | the first at the clock that is due, the others at their next boundary |
| before that | all workers at one clock       | at a clock that none has reached; a worker that has passed it, or has |
|             |                                | begun the mini-batch after it, refuses, and a later one is tried      |
|             | workers at clocks of their own | each at its next step boundary                                        |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dure.core.node import Call, Reply
from dure.errors import Refused
from dure.run.checkpoint_round import CheckpointRound

if TYPE_CHECKING:
    from dure.core.state import State
    from dure.run.commands import Commands
    from dure.run.progress import RunProgress
    from dure.run.roster import ProcessRoster
    from dure.run.setup import Setup
    from dure.runtime.process.node import ProcessNode

AHEAD_SECONDS = 0.2
"""Seconds from the choice of a common clock to the stop at it: longer than a message takes."""

AHEAD_STEPS = 20
"""Additional steps: workers may have made some that they have not reported yet."""

ATTEMPTS = 3
"""Attempts to find a clock that no worker has passed."""

BETWEEN_ATTEMPTS = 0.2
"""Seconds in which each worker reports its progress again."""


class CheckpointSchedule:
    """Runs one checkpoint round after another: `due` is the clock of the next, `round` the one that goes on.

    Checkpoints are written to `folder`; without it there are none. `part` gives the driver's own part.
    """

    def __init__(
        self,
        setup: Setup,
        node: ProcessNode,
        roster: ProcessRoster,
        *,
        progress: RunProgress,
        commands: Commands,
        folder: Path | None,
        part: Callable[[], State],
    ) -> None:
        self.every = setup.config.checkpoint_every or 0
        self.due = self.every
        self.round: CheckpointRound | None = None
        self.node = node
        self._last_round: CheckpointRound | None = None
        self._folder = folder
        self._lockstep, self._period = setup.lockstep, setup.period
        self._in_flight = setup.parts - 1  # the first stage of a pipeline is so many mini-batches ahead of its clock
        self._roster = roster
        self._progress = progress
        self._commands = commands
        self._part = part

    # ---- called by workers

    async def suspended(self, call: Call) -> Reply:
        """Note that a worker has stopped, and wait until all have."""
        current = self.round or self._begin_round(self.due)
        current.stopped(call.caller)
        await current.all_stopped
        return Reply({"draft": str(current.draft)})

    async def saved(self, call: Call) -> Reply:
        """Note that a worker has written its part, and wait until the checkpoint is complete."""
        assert self.round is not None
        current = self.round
        current.written(call.caller, call.fields["problem"])
        await current.committed
        if self.round is current:
            self.round = None
            self.due += self.every
        return Reply({"checkpoint": self.due})

    # ---- called by the driver

    @property
    def can_write(self) -> bool:
        """Whether a checkpoint can be written before the next one is due."""
        return self._folder is not None and bool(self.every) and bool(self._roster.living())

    @property
    def suspending(self) -> bool:
        """Whether a worker that begins now must stop at its next step boundary."""
        return self.round is not None and not self.round.all_stopped.done and not self._lockstep

    async def wait(self) -> None:
        """Wait for the end of a round in which all workers have stopped: a new process is not part of it."""
        if self.round is not None and self.round.all_stopped.done:
            await self.round.committed

    def look(self) -> None:
        """Continue the round if the workers that it waits for have failed or finished."""
        if self.round is not None:
            self.round.look()

    async def write_now(self) -> None:
        """Write a checkpoint before the next one is due."""
        before, current = self._last_round, self.round
        if current is None and self._lockstep:
            await self._stop_together()
            while self._last_round is before:  # a round of a few milliseconds may be over by now
                await self.node.sleep(0.01)
            current = self._last_round
        if current is None:
            current = self._begin_round(min(self.due, max(self.due - self.every + 1, self._progress.highest())))
            current.look()
        await current.committed

    async def _stop_together(self) -> None:
        """Have all workers of a method in lockstep stop at one clock, and wait until each has agreed to it.

        Raises:
            Refused: in every attempt a worker had passed the clock already.
        """
        ahead, scheduled = AHEAD_SECONDS, self.due
        for attempt in range(ATTEMPTS):
            reached = self._progress.highest()
            rate = reached / max(self.node.now(), ahead)
            unseen = self._in_flight
            unseen += 2 * self._period if self._period > 1 else min(AHEAD_STEPS, math.ceil(rate))
            step = reached + 1 + math.ceil(ahead * rate) + unseen
            if step >= scheduled or self.round is not None:
                return  # the checkpoint that is due anyway comes first
            try:
                self.due = step
                await self._commands.stop_at(step)
            except Refused:
                self.due = scheduled
                if attempt == ATTEMPTS - 1:
                    raise
                ahead *= 3
                await self.node.sleep(BETWEEN_ATTEMPTS)
            else:
                return

    def _begin_round(self, step: int) -> CheckpointRound:
        assert self._folder is not None
        self.round = self._last_round = CheckpointRound(self.node, self._folder, step, self._roster.living)
        work = self.round.carry_out(self._suspend_others, self._commands.save_servers, self._part)
        self.node.spawn(work, "the checkpoint")
        return self.round

    async def _suspend_others(self) -> None:
        """Tell the other workers to stop, unless the method is in lockstep: then all stop at the same clock."""
        assert self.round is not None
        if not self._lockstep:
            for name in sorted(self.round.waits_for()):  # a frozen one gives no answer
                self._commands.call(name, "suspend", step=self.due)
