"""Decides the consequence of a failed or frozen process for a real run.

| process                        | its connection ends         | it sends no heartbeats                                |
|--------------------------------|-----------------------------|-------------------------------------------------------|
| worker that others can lose    | the others go on without it | it is evicted and may come back; where it writes to   |
|                                |                             | memory of others, it is killed                        |
| worker that others cannot lose | the run ends                | it is killed, and the run ends                        |
| server                         | it is started again, or the | it is killed; then as if its connection had ended     |
|                                | run ends (`restart_policy`) |                                                       |
| companion                      | an actor is started again;  | it is killed; then as if its connection had ended     |
|                                | for a replay, as a server   |                                                       |
| fork server                    | the run ends (by launcher)  | the run ends                                          |
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dure.core.deployment import WhenLost
from dure.core.log import log
from dure.errors import DureError
from dure.run.liveness import FORK_SERVER

if TYPE_CHECKING:
    from dure.core.node import Operation
    from dure.run.commands import Commands
    from dure.run.companion_tracker import CompanionTracker
    from dure.run.failures import FailureTracker
    from dure.run.launcher import Launcher
    from dure.run.liveness import LivenessMonitor
    from dure.run.progress import RunProgress
    from dure.run.restart_policy import RestartPolicy
    from dure.run.roster import ProcessRoster
    from dure.run.setup import Setup
    from dure.runtime.wire import Loss


@dataclass(slots=True, kw_only=True)
class Supervisor:
    """Decides what follows from failures and freezes.

    `go_on_without` is called with the name of a worker that is not waited for any longer. `begun` is done once all
    processes were ready.
    """

    setup: Setup
    launcher: Launcher
    roster: ProcessRoster
    progress: RunProgress
    commands: Commands
    failures: FailureTracker
    restarts: RestartPolicy
    liveness: LivenessMonitor
    begun: Operation[None]
    now: Callable[[], float]
    go_on_without: Callable[[str], None]
    companions: CompanionTracker

    def can_lose(self, name: str) -> bool:
        """Whether the run can continue without a process."""
        return self.setup.deployment[name].when_lost is WhenLost.GO_ON

    def disconnected(self, loss: Loss) -> None:
        """Note the end of a connection: the process has failed, unless that incarnation is over already."""
        if loss.incoming and not loss.finished and self.roster.is_current(loss.peer, loss.incarnation):
            self.failed(loss.peer, loss.reason)

    def failed(self, name: str, reason: str) -> None:
        """Note that a process or its connection has ended."""
        if self.roster.is_over(name):
            return
        self.failures.failed(name, reason)
        self.roster.present.discard(name)
        self.progress.at.pop(name, None)
        if name in self.roster.servers and self.begun.done:
            self.restarts.failed(name, self.now())
        if not self.can_lose(name) or name in self.failures.reported:
            return
        self.roster.evicted.pop(name, None)
        self.progress.totals.failures_survived += 1
        if name in self.roster.companions:
            self.companions.failed(name, self.now())
            return
        self.progress.count_lost(name)
        if name not in self.roster.ready and self.roster.servers:
            self.commands.tell_clock("lost", name)
        self.go_on_without(name)

    def evicted_by_clock(self, name: str) -> None:
        """Note that the clock has evicted a worker that makes no progress."""
        if name in self.roster.living():
            log.warning("%s makes no progress: the others go on without it until it comes back.", name)
            self._evict(name, "no progress while others waited for it")

    def look_for_frozen(self) -> str:
        """Evict or kill the processes that have sent no heartbeats for long; returns the frozen and slow in words."""
        watched = self.roster.watched()
        if not self.begun.done or self.restarts.awaited:
            watched.append(FORK_SERVER)
        self.liveness.look(watched)
        for name in self.liveness.frozen(watched):
            self._give_up(name, f"frozen: no heartbeat for {self.setup.config.frozen_after:g} s")
        return self.liveness.described(watched)

    def _evict(self, name: str, reason: str) -> None:
        """Go on without a worker whose process may come back."""
        self.roster.evicted[name] = reason
        self.progress.totals.failures_survived += 1
        self.go_on_without(name)

    def _give_up(self, name: str, reason: str) -> None:
        """Go on without a frozen process, or end the run.

        A worker whose updates can be refused later is evicted, and may come back. Any other process is killed: one
        that others need, one that writes to shared memory, or that holds a lock on it.
        """
        if name == FORK_SERVER:
            raise DureError(f"the process that starts the others is {reason}.")
        if name in self.roster.evicted:
            self.roster.evicted[name] = reason
        elif name in self.roster.workers and self._can_come_back(name):
            self._evict_frozen(name, reason)
        else:
            self.failures.because(name, reason)
            self.launcher.signal(name, signal.SIGKILL)
            self.failed(name, reason)

    def _can_come_back(self, name: str) -> bool:
        return self.begun.done and self.can_lose(name) and not self.setup.topology.in_place

    def _evict_frozen(self, name: str, reason: str) -> None:
        log.warning("%s is evicted (%s): the others go on without it until it comes back.", name, reason)
        self._evict(name, reason)
        if self.setup.topology.graph is not None:
            self.commands.tell_neighbors(name)
        if self.roster.servers:
            self.commands.tell_clock("frozen", name)
        if not self.roster.finished and not self.roster.living():
            raise DureError(f"no worker is left; the last of them, {name}, is {reason}.")
