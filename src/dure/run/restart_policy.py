"""Decides whether failed servers of a real run are started again from the last checkpoint, and which others with them.

| updates                              | failed server             | processes that go back to the checkpoint          |
|--------------------------------------|---------------------------|---------------------------------------------------|
| applied on arrival (Downpour)        | any but the first         | that server; the others wait for it               |
| applied on arrival                   | the first, with the clock | all                                               |
| in the clock's order, or coordinated | any                       | all: a group is on all servers, or on none        |

An acknowledged update is applied in memory. A server that is started again alone has lost the updates since the
checkpoint; no update is applied twice. If all processes go back, the steps since the checkpoint are made again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dure.core.deployment import SERVER, NodeId, WhenLost
from dure.core.folder_names import LATEST

if TYPE_CHECKING:
    from dure.run.setup import Setup

LIMIT = 5
"""Restarts of one server in a run."""

BACK_OFF_SECONDS = 0.5
"""Seconds before a server is started again the first time; twice as long each time after."""

RETURN_SECONDS = 60.0
"""Seconds in which workers wait for a failed server."""

log = logging.getLogger("dure")


class RestartPolicy:
    """Counts restarts of servers, and schedules them. `folder` holds the run's checkpoints."""

    def __init__(self, setup: Setup, folder: Path | None) -> None:
        self.folder = folder
        saving = folder is not None and bool(setup.config.checkpoint_every)
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
        """Whether a server can be started again, alone or with all processes."""
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
        """Seconds until a failed server is started again."""
        return float(BACK_OFF_SECONDS * 2 ** self.made[name])

    def together(self, failed: Collection[str]) -> float | None:
        """Seconds until all processes go back to the checkpoint after servers have failed; None if they cannot."""
        servers = sorted(name for name in failed if NodeId.of(name).kind == SERVER)
        if not servers or not all(map(self.possible, servers)):
            return None
        pause = max(map(self.back_off, servers))
        self._due.clear()
        for name in servers:
            self.count(name)
        log.warning("all processes are started again from the last checkpoint, because of %s.", ", ".join(servers))
        return pause

    def count(self, name: str) -> None:
        self.made[name] += 1
