"""The checkpoints of a real run: when each is due, its round over all processes, and the last one after a signal.

| checkpoint  | method                         | where workers stop                                                    |
|-------------|--------------------------------|-----------------------------------------------------------------------|
| that is due | all workers at one clock       | at the clock that is due                                              |
|             | workers at clocks of their own | the first at the clock that is due, the others at their next boundary |
| before that | all workers at one clock       | at a clock that none has reached; a worker that has passed it, or has |
|             |                                | begun the mini-batch after it, refuses, and a later one is tried      |
|             | workers at clocks of their own | each at its next step boundary                                        |

workers   suspended -----> all stopped? -> write the part -> saved -----> all written?
servers                    save <-------- the driver calls                     |
driver                        writes its own part  ----------------------> commit -> all continue
"""

from __future__ import annotations

import math
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dure.core.node import Address, Call, Reply
from dure.core.protocol import COUNT, TEXT, WORKERS, nullable, remote
from dure.core.state import State
from dure.core.text import log
from dure.errors import CheckpointError, DureError, Refused, RemoteError
from dure.run import checkpoint
from dure.run.roster import DriverService

if TYPE_CHECKING:
    from dure.core.node import Operation, Task
    from dure.run.roster import Commands, ProcessRoster, RunProgress
    from dure.run.setup import Setup
    from dure.runtime.launch.interruption import Interruption
    from dure.runtime.process.node import ProcessNode


class CheckpointRound:
    """The state of one checkpoint. `working` gives the workers that it must wait for at the moment.

    A worker that only starts is none of them: it may wait for a machine. One that begins before all have stopped stops
    too, and a later one waits for the end.

    All workers stop and continue together, also after an error: a part that cannot be written costs this checkpoint,
    not the run.
    """

    def __init__(self, node: ProcessNode, folder: Path, step: int, working: Callable[[], set[str]]) -> None:
        self.folder = folder
        self.step = step
        self.draft = folder / f"step-{step}.tmp"
        self.problem: str | None = None
        self._node = node
        self._working = working
        self._stopped: set[str] = set()
        self._failed: set[str] = set()
        self._written: set[str] = set()
        self.interrupted: Operation[None] = node.promise("the next generation")
        self.all_stopped: Operation[None] = node.promise("all workers to stop for the checkpoint")
        self.all_written: Operation[None] = node.promise("all workers to write their parts of the checkpoint")
        self.committed: Operation[None] = node.promise("the checkpoint to be complete")

    def stopped(self, worker: str) -> None:
        self._stopped.add(worker)
        self._failed.discard(worker)
        self.look()

    def written(self, worker: str, problem: str | None) -> None:
        """Note that a worker has written its part, or could not because of `problem`."""
        self._written.add(worker)
        self.problem = self.problem or problem
        self.look()

    def waits_for(self) -> set[str]:
        """The workers that have not stopped yet."""
        return self._working() - self._stopped

    def interrupt(self) -> None:
        """Let the workers that have stopped go on: one that has not needs them to come here."""
        waiting, self.interrupted = self.interrupted, self._node.promise("the next generation")
        self._stopped.clear()
        waiting.resolve()

    def look(self) -> None:
        """Continue if the missing workers have failed or finished. A worker that comes later is not part of it."""
        gone = self._stopped - self._working()
        self._stopped -= gone  # for good: it may be started again before the others have written
        self._failed |= gone
        if not self.all_stopped.done and not self.waits_for():
            self.all_stopped.resolve()
        if self.all_stopped.done and self._stopped <= self._written:
            self.all_written.resolve()

    async def carry_out(
        self,
        suspend: Callable[[], Awaitable[None]],
        save_servers: Callable[[Path], Awaitable[None]],
        driver_part: Callable[[], State],
    ) -> None:
        """Carry out the round, once the first worker has stopped."""
        with self._noting_problems():
            checkpoint.begin(self.folder, self.step)
        await suspend()
        await self.all_stopped
        with self._noting_problems():
            await save_servers(self.draft)
            checkpoint.write_part(self.draft, "run", driver_part())
        await self.all_written
        with self._noting_problems():
            if self.problem is None:
                self._remove_failed()
                checkpoint.commit(self.folder, self.step)
                checkpoint.prune(self.folder)
        if self.problem is not None:
            checkpoint.discard(self.folder, self.step)
            log.warning("checkpoint %d was not written: %s", self.step, self.problem)

    def _remove_failed(self) -> None:
        """Remove the part of a worker that failed after it had stopped: when it comes back it is a new worker."""
        for name in self._failed:
            for path in self.draft.glob(f"{name.replace(' ', '-')}.*"):
                path.unlink()

    @contextmanager
    def _noting_problems(self) -> Iterator[None]:
        try:
            yield
        except (CheckpointError, RemoteError) as error:
            self.problem = self.problem or str(error)


AHEAD_SECONDS = 0.2
"""Seconds from the choice of a common clock to the stop at it: longer than a message takes."""

AHEAD_STEPS = 20
"""Additional steps: workers may have made some that they have not reported yet."""

ATTEMPTS = 3
"""Attempts to find a clock that no worker has passed."""

BETWEEN_ATTEMPTS = 0.2
"""Seconds in which each worker reports its progress again."""


CHECKPOINTS = Address("driver", "checkpoints")


class CheckpointSchedule(DriverService):
    """Runs one checkpoint round after another: `due` is the clock of the next, `round` the one that goes on.

    Checkpoints are written to `folder`; without it there are none. `part` gives the driver's own part. `may_stop` says
    whether workers may stop now, and `reached` how far they are.
    """

    called = "the checkpoints"

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
        super().__init__(roster)
        self.every = setup.config.checkpoint_every or 0
        self.due = self.every
        self.round: CheckpointRound | None = None
        self.node = node
        self._last_round: CheckpointRound | None = None
        self._folder = folder
        self._lockstep, self._period = setup.lockstep, setup.period
        self._in_flight = setup.parts - 1  # the first stage of a pipeline is so many mini-batches ahead of its clock
        self._commands = commands
        self._part = part
        self.may_stop: Callable[[], bool] = lambda: True
        self.reached = progress.highest

    # ---- called by workers

    @remote(WORKERS, step=COUNT)
    async def suspended(self, call: Call) -> Reply:
        """Note that a worker has stopped, and wait until all have. `draft` is None if it must go on before."""
        if not self.may_stop():
            return Reply({"draft": None})
        current = self.round or self._begin_round(self.due)
        interrupted = current.interrupted
        current.stopped(call.caller)
        await self.node.first(current.all_stopped, interrupted)
        if not current.all_stopped.done:
            return Reply({"draft": None})
        return Reply({"draft": str(current.draft)})

    @remote(WORKERS, problem=nullable(TEXT))
    async def saved(self, call: Call) -> Reply:
        """Note that a worker has written its part, and wait until the checkpoint is complete."""
        current = self.round
        if current is not None:  # else it was evicted meanwhile, and the others have not waited for it
            current.written(call.caller, call.fields["problem"])
            await current.committed
        return Reply({"checkpoint": self.due})

    # ---- called by the driver

    @property
    def is_writing(self) -> bool:
        """Whether all workers have stopped for a checkpoint that is not complete."""
        return self.round is not None and self.round.all_stopped.done and not self.round.committed.done

    def interrupt(self) -> None:
        """Let the workers that have stopped for a checkpoint go on, and stop again later."""
        if self.round is not None and not self.round.all_stopped.done:
            self.round.interrupt()

    @property
    def can_write(self) -> bool:
        """Whether a checkpoint can be written before the next one is due."""
        return self._folder is not None and bool(self.every) and bool(self.roster.working())

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
            current = self._begin_round(min(self.due, max(self.due - self.every + 1, self.reached())))
            current.look()
        await current.committed

    async def _stop_together(self) -> None:
        """Have all workers of a method in lockstep stop at one clock, and wait until each has agreed to it.

        Raises:
            Refused: in every attempt a worker had passed the clock already.
        """
        ahead, scheduled = AHEAD_SECONDS, self.due
        for attempt in range(ATTEMPTS):
            reached = self.reached()
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
        self.round = self._last_round = CheckpointRound(self.node, self._folder, step, self.roster.working)
        self.node.spawn(self._carry_out(self.round), "the checkpoint")
        return self.round

    async def _carry_out(self, current: CheckpointRound) -> None:
        await current.carry_out(self._suspend_others, self._commands.save_servers, self._part)
        self.round = None
        self.due += self.every
        current.committed.resolve()

    async def _suspend_others(self) -> None:
        """Tell the other workers to stop, unless the method is in lockstep: then all stop at the same clock."""
        assert self.round is not None
        if not self._lockstep:
            for name in sorted(self.round.waits_for()):  # a frozen one gives no answer
                self._commands.call(name, "suspend", step=self.due)


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
