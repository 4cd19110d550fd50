"""One checkpoint of a real run: all workers stop, all processes write their parts, and the driver commits them.

workers   suspended -----> all stopped? -> write the part -> saved -----> all written?
servers                    save <-------- the driver calls                     |
driver                        writes its own part  ----------------------> commit -> all continue
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dure.core.log import log
from dure.core.state import State
from dure.errors import CheckpointError, RemoteError
from dure.run import checkpoint

if TYPE_CHECKING:
    from dure.core.node import Operation
    from dure.runtime.process.node import ProcessNode


class CheckpointRound:
    """The state of one checkpoint. `living` gives the workers that it must wait for at the moment.

    All workers stop and continue together, also after an error: a part that cannot be written costs this checkpoint,
    not the run.
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
        """Note that a worker has written its part, or could not because of `problem`."""
        self._written.add(worker)
        self.problem = self.problem or problem
        self.look()

    def waits_for(self) -> set[str]:
        """The workers that have not stopped yet."""
        return self._living() - self._stopped

    def look(self) -> None:
        """Continue if the missing workers have failed or finished. A worker that comes later is not part of it."""
        if not self.all_stopped.done and not self.waits_for():
            self.all_stopped.resolve()
        if self.all_stopped.done and self._stopped & self._living() <= self._written:
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
        self.committed.resolve()

    def _remove_failed(self) -> None:
        """Remove the part of a worker that failed after it had stopped: when it comes back it is a new worker."""
        for name in self._stopped - self._living():
            for path in self.draft.glob(f"{name.replace(' ', '-')}.*"):
                path.unlink()

    @contextmanager
    def _noting_problems(self) -> Iterator[None]:
        try:
            yield
        except (CheckpointError, RemoteError) as error:
            self.problem = self.problem or str(error)
