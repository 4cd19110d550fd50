"""Decides which processes of a real run are started again from the last checkpoint after a failure.

| updates                              | failed process                   | processes that go back to the checkpoint   |
|--------------------------------------|----------------------------------|--------------------------------------------|
| applied on arrival (Downpour)        | any server but the first         | that server; the others wait for it        |
| applied on arrival                   | the first server, with the clock | all                                        |
| in the clock's order, or coordinated | any server                       | all: a group is on all servers, or on none |
| of the stages of a pipeline          | a worker that was killed         | all                                        |

An acknowledged update is applied in memory. A server that is started again alone has lost the updates since the
checkpoint; no update is applied twice. If all processes go back, the steps since the checkpoint are made again.

A worker that has raised an error would raise it again, so nothing is started again after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dure.core.deployment import SERVER, NodeId, WhenLost
from dure.core.folder_names import LATEST
from dure.core.log import log

if TYPE_CHECKING:
    from dure.run.setup import Setup

LIMIT = 5
"""Restarts of one process in a run."""

BACK_OFF_SECONDS = 0.5
"""Seconds before a process is started again the first time; twice as long each time after."""

RETURN_SECONDS = 60.0
"""Seconds in which workers wait for a failed server."""


class RestartPolicy:
    """Counts restarts of processes, and schedules them. `folder` holds the run's checkpoints."""

    def __init__(self, setup: Setup, folder: Path | None) -> None:
        self.folder = folder
        saving = folder is not None and bool(setup.config.checkpoint_every)
        self._deployment = setup.deployment
        self.alone = saving and setup.topology.server_lost is WhenLost.RESTART_ALONE
        self.made: Counter[str] = Counter()
        self._due: dict[str, float] = {}

    @property
    def return_seconds(self) -> float:
        """Seconds in which workers wait for a failed server; 0 if no server is started again alone."""
        return RETURN_SECONDS if self.alone else 0.0

    @property
    def awaited(self) -> Collection[str]:
        """Failed servers that will be started again alone."""
        return self._due.keys()

    def possible(self, name: str) -> bool:
        """Whether a process can be started again, alone or with all others."""
        saved = self.folder is not None and (self.folder / LATEST).exists()
        return saved and self.made[name] < LIMIT

    def failed(self, name: str, now: float) -> None:
        """Schedule the restart of a failed server, if it can be started alone."""
        if self.alone and name != "server 0" and self.possible(name):
            self._due[name] = now + self.back_off(name)

    def due(self, now: float, exited: Mapping[str, int]) -> list[str]:
        """The servers to be started now; their processes have ended."""
        found = [name for name, when in self._due.items() if when <= now and name in exited]
        for name in found:
            del self._due[name]
            self.count(name)
            log.warning("%s is started again from the last checkpoint: updates since then are lost on it.", name)
        return found

    def back_off(self, name: str) -> float:
        """Seconds until a failed process is started again."""
        return float(BACK_OFF_SECONDS * 2 ** self.made[name])

    def together(self, failed: Collection[str], killed: Collection[str]) -> float | None:
        """Seconds until all processes go back to the checkpoint after some have failed; None if they cannot.

        `killed` are those that no error of their own has ended.
        """
        causes = sorted(name for name in failed if self._takes_back(name, name in killed))
        if not causes or not all(map(self.possible, causes)):
            return None
        pause = max(map(self.back_off, causes))
        self._due.clear()
        for name in causes:
            self.count(name)
        log.warning("all processes are started again from the last checkpoint, because of %s.", ", ".join(causes))
        return pause

    def _takes_back(self, name: str, killed: bool) -> bool:
        """Whether all processes go back after the failure of one."""
        serves = NodeId.of(name).kind == SERVER
        return serves or (killed and self._deployment[name].when_lost is WhenLost.ROLL_BACK)

    def count(self, name: str) -> None:
        self.made[name] += 1
