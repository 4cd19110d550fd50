"""Servers of a real run that are started again after their death, from the run's last checkpoint.

| updates                              | who died             | who goes back to the checkpoint                  |
|--------------------------------------|----------------------|--------------------------------------------------|
| applied on arrival (Downpour)        | not the first        | that server alone; the others wait for it        |
| applied on arrival                   | the first: the clock | everybody                                        |
| in the clock's order, or coordinated | any                  | everybody: a group is on all servers, or on none |

Acknowledged means applied, in memory: updates since the checkpoint are lost on a server that comes back alone, and
none is applied twice. Where everybody goes back, the steps since then are made again.
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
"""How often a server is started again in one run."""

BACK_OFF_SECONDS = 0.5
"""How long a server stays down the first time; twice as long each time after."""

RETURN_SECONDS = 60.0
"""How long workers wait for a server that is gone."""

log = logging.getLogger("dure")


class RestartPolicy:
    """Who has been started again, and who will be. `folder` holds the run's checkpoints."""

    def __init__(self, setup: Setup, folder: Path | None) -> None:
        self.folder = folder
        saving = folder is not None and bool(setup.config.checkpoint_every)
        self.alone = saving and setup.topology.server_lost is WhenLost.RESTART_ALONE
        self.made: Counter[str] = Counter()
        self._due: dict[str, float] = {}

    @property
    def return_seconds(self) -> float:
        """How long workers wait for a server that is gone; 0 where none comes back alone."""
        return RETURN_SECONDS if self.alone else 0.0

    @property
    def awaited(self) -> Collection[str]:
        """Servers that are down and come back alone."""
        return self._due.keys()

    def possible(self, name: str) -> bool:
        """Whether a server can be started again, alone or with everybody."""
        saved = self.folder is not None and (self.folder / LATEST).exists()
        return saved and self.made[name] < LIMIT

    def failed(self, name: str, now: float) -> None:
        """A server is gone: have it come back, if it can do so alone."""
        if self.alone and name != "server 0" and self.possible(name):
            self._due[name] = now + self.back_off(name)

    def due(self, now: float, exited: Mapping[str, int]) -> list[str]:
        """Servers to be started now; their processes have certainly ended."""
        found = [name for name, when in self._due.items() if when <= now and name in exited]
        for name in found:
            del self._due[name]
            self.count(name)
            log.warning("%s is started again from the last checkpoint: updates since then are lost on it.", name)
        return found

    def back_off(self, name: str) -> float:
        """Seconds to wait before it is started again."""
        return float(BACK_OFF_SECONDS * 2 ** self.made[name])

    def together(self, dead: Collection[str]) -> float | None:
        """In how many seconds everybody goes back to the checkpoint, for dead servers; None if nobody can."""
        servers = sorted(name for name in dead if NodeId.of(name).kind == SERVER)
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
