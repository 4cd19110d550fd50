"""Decides the consequence of a failed or frozen process for a real run, and tracks the companions.

| process                        | its connection ends         | it sends no heartbeats                                |
|--------------------------------|-----------------------------|-------------------------------------------------------|
| worker that others can lose    | the others go on without it | it is evicted and may come back; where it writes to   |
|                                |                             | memory of others, it is killed                        |
| worker that others cannot lose | the run ends                | it is killed, and the run ends                        |
| server                         | it is started again, or the | it is killed; then as if its connection had ended     |
|                                | run ends (`failures`)       |                                                       |
| companion                      | an actor is started again;  | it is killed; then as if its connection had ended     |
|                                | for a replay, as a server   |                                                       |
| fork server                    | the run ends (by launcher)  | the run ends                                          |
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dure.core.deployment import WhenLost
from dure.core.node import Call, Reply
from dure.core.text import log
from dure.errors import DureError, Refused
from dure.run.failures import LIMIT
from dure.run.setup import companions_of
from dure.runtime.launch.fork_server import LOADER as FORK_SERVER

if TYPE_CHECKING:
    from dure.core.node import Operation
    from dure.job.companions import Figures
    from dure.run.failures import FailureTracker, LivenessMonitor, RestartPolicy
    from dure.run.places import Launcher
    from dure.run.roster import Commands, ProcessRoster, RunProgress
    from dure.run.setup import Setup
    from dure.runtime.wire import Loss


AGAIN_SECONDS = 0.05
"""Seconds until a companion that the run can lose is started again; twice as long for each failure in vain before."""


GONE_SECONDS = 10.0
"""Seconds after which a failed process without a reported exit is gone: under torchrun, only rank 0 reports exits."""

MOST_FIGURES = 100


class CompanionTracker:
    """Keeps the last figures of each companion, and says which are to be started now.

    A companion that the run can lose is started again after a failure, and counts on from its last figures. A failure
    is *in vain* if the process has raised an error, or has reported no progress since its start. After `LIMIT` of them
    the next one ends the run. `cause` gives the cause of a failure in words.
    """

    def __init__(self, setup: Setup, cause: Callable[[str], str]) -> None:
        self._setup, self._cause = setup, cause
        self._last: dict[str, Figures] = {}
        self._at_start: dict[str, Figures] = {}
        self._in_vain: Counter[str] = Counter()
        self._late = {str(node.id): node.joins_after for node in companions_of(setup.deployment) if node.joins_after}
        self._due: dict[str, float] = {}

    def report(self, call: Call) -> Reply:
        """Note the figures of a companion."""
        if len(call.fields["figures"]) > MOST_FIGURES:
            raise Refused(f"a companion reports at most {MOST_FIGURES} figures.")
        self._last[call.caller] = dict(call.fields["figures"])
        return Reply()

    def begin(self, name: str) -> Figures:
        """Note that a companion begins to work; returns the figures from which it counts on."""
        found = self._last.get(name, {}) if self._is_spare(name) else {}
        self._at_start[name] = found
        return found

    def failed(self, name: str, now: float) -> None:
        """Note that a companion has failed. One that the run can lose is started again."""
        if self._is_spare(name):
            self._due[name] = now + AGAIN_SECONDS * 2 ** self._in_vain[name]

    def due(self, now: float, exited: Mapping[str, int]) -> list[str]:
        """The companions to be started now: the failed, once their processes have ended, and the late.

        Raises:
            DureError: a companion has failed in vain too often, or one that a worker needs is gone.
        """
        self._check_gone(
            [name for name, when in self._due.items() if when + GONE_SECONDS <= now and name not in exited]
        )
        failed = [name for name, when in self._due.items() if when <= now and name in exited]
        for name in failed:
            del self._due[name]
            self._count(name, killed=exited[name] < 0)
        late = [name for name, when in self._late.items() if when <= now]
        for name in late:
            del self._late[name]
        return failed + late

    def _check_gone(self, gone: Sequence[str]) -> None:
        """Raise `DureError` if the last companion of a worker, or of the run, is among those that are `gone`."""
        deployment = self._setup.deployment
        spare = [str(node.id) for node in companions_of(deployment) if node.when_lost is WhenLost.GO_ON]
        lost = [name for name in gone if deployment[name].beside is not None or len(gone) == len(spare)]
        if lost:
            raise DureError(f"{lost[0]} failed: {self._cause(lost[0])}; this launcher does not start it again.")

    def _is_spare(self, name: str) -> bool:
        return self._setup.deployment[name].when_lost is WhenLost.GO_ON

    def _count(self, name: str, *, killed: bool) -> None:
        if killed and self._last.get(name, {}) != self._at_start.get(name, {}):
            self._in_vain[name] = 0
            return
        self._in_vain[name] += 1
        if self._in_vain[name] > LIMIT:
            raise DureError(f"{name} failed: {self._cause(name)}; it has failed {self._in_vain[name]} times in a row.")

    def figures(self) -> dict[str, Figures]:
        """The figures of each companion, those before failures included."""
        return {name: self._last[name] for name in sorted(self._last)}

    def row(self, seconds: float) -> dict[str, Any]:
        """The companions' part of a row of the history."""
        companions = self._setup.job.companions
        return {} if companions is None or not self._last else companions.row(self.figures(), seconds)

    def restore(self, figures: Mapping[str, Figures]) -> None:
        """Go on from the figures of a checkpoint; a companion whose state it has restores its own counts."""
        self._last = {name: dict(found) for name, found in figures.items() if self._is_spare(name)}


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
        if not self.setup.deployment[name].when_lost.others_go_on or name in self.failures.reported:
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
