"""One checkpoint of a real run: everybody stops, everybody writes its part, then it counts.

workers   suspended -----> all there? -> go and write -> saved -----> all there?
servers                    save <------ the driver asks                    |
driver                        writes its own part  ------------------> commit -> go on
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dure.errors import CheckpointError, RemoteError
from dure.run import checkpoint
from dure.run.checkpoint import Part

if TYPE_CHECKING:
    from dure.core.node import Operation
    from dure.runtime.process.node import ProcessNode

log = logging.getLogger("dure")


class CheckpointRound:
    """The state of one checkpoint. `living` says which workers it must wait for, as of now.

    Whatever goes wrong, all stop and go on together: what cannot be written costs this checkpoint, not the run.
    """

    def __init__(self, node: ProcessNode, folder: Path, step: int, living: Callable[[], set[str]]) -> None:
        self.folder = folder
        self.step = step
        self.draft = folder / f"step-{step}.tmp"
        self.problem: str | None = None
        self._living = living
        self._stopped: set[str] = set()
        self._written: set[str] = set()
        self.all_stopped: Operation[None] = node.promise("all workers to stop for the checkpoint")
        self.all_written: Operation[None] = node.promise("all workers to write their parts of the checkpoint")
        self.committed: Operation[None] = node.promise("the checkpoint to be complete")

    def stopped(self, worker: str) -> None:
        self._stopped.add(worker)
        self.look()

    def written(self, worker: str, problem: str | None) -> None:
        """A worker has written its part, or could not, because of `problem`."""
        self._written.add(worker)
        self.problem = self.problem or problem
        self.look()

    def waits_for(self) -> set[str]:
        """Who has not stopped yet."""
        return self._living() - self._stopped

    def look(self) -> None:
        """Go on if those who are still missing have died or finished. Who comes later is not part of it."""
        if not self.all_stopped.done and not self.waits_for():
            self.all_stopped.resolve()
        if self.all_stopped.done and self._stopped & self._living() <= self._written:
            self.all_written.resolve()

    async def carry_out(
        self,
        suspend: Callable[[], Awaitable[None]],
        save_servers: Callable[[Path], Awaitable[None]],
        driver_part: Callable[[], Part],
    ) -> None:
        """The round, from the first worker's stop on."""
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
                self._leave_out_the_dead()
                checkpoint.commit(self.folder, self.step)
                checkpoint.prune(self.folder)
        if self.problem is not None:
            checkpoint.discard(self.folder, self.step)
            log.warning("checkpoint %d was not written: %s", self.step, self.problem)
        self.committed.resolve()

    def _leave_out_the_dead(self) -> None:
        """Who died after it had stopped comes back as a newcomer, not as who it was."""
        for name in self._stopped - self._living():
            for path in self.draft.glob(f"{name.replace(' ', '-')}.*"):
                path.unlink()

    @contextmanager
    def _noting_problems(self) -> Iterator[None]:
        try:
            yield
        except (CheckpointError, RemoteError) as error:
            self.problem = self.problem or str(error)
