"""Decides the consequence of a failed or frozen process for a real run, and tracks the companions.

| process                        | its connection ends         | it sends no heartbeats                                |
|--------------------------------|-----------------------------|-------------------------------------------------------|
| worker that others can lose    | the others go on; if it was | it is evicted and may come back; where it writes to   |
|                                | killed, it is started again | memory of others, it is killed                        |
| worker that others cannot lose | the run ends                | it is killed, and the run ends                        |
| server                         | it is started again, or the | it is killed; then as if its connection had ended     |
|                                | run ends (`failures`)       |                                                       |
| companion                      | an actor is started again;  | it is killed; then as if its connection had ended     |
|                                | for a replay, as a server   |                                                       |
| fork server                    | the run ends (by launcher)  | the run ends                                          |
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dure.core.deployment import WhenLost
from dure.core.node import Call, Reply
from dure.core.text import log
from dure.errors import DureError, Refused
from dure.run.failures import LIMIT
from dure.run.replacement import Replacements
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


MOST_FIGURES = 100

WARNED = "warned of preemption"


class CompanionTracker:
    """Keeps the last figures of each companion, and says which are to be started now.

    A companion that the run can lose is started again after a failure, and counts on from its last figures. After
    `LIMIT` failures in vain the next one ends the run. `cause` gives the cause of a failure in words.
    """

    def __init__(self, setup: Setup, cause: Callable[[str], str]) -> None:
        self._setup, self._cause = setup, cause
        self._last: dict[str, Figures] = {}
        self._again = Replacements(lambda name: self._last.get(name, {}))
        self._late = {str(node.id): node.joins_after for node in companions_of(setup.deployment) if node.joins_after}

    def report(self, call: Call) -> Reply:
        """Note the figures of a companion."""
        if len(call.fields["figures"]) > MOST_FIGURES:
            raise Refused(f"a companion reports at most {MOST_FIGURES} figures.")
        self._last[call.caller] = dict(call.fields["figures"])
        return Reply()

    def begin(self, name: str) -> Figures:
        """Note that a companion begins to work; returns the figures from which it counts on."""
        self._again.begin(name)
        return self._last.get(name, {}) if self._is_spare(name) else {}

    def failed(self, name: str, now: float) -> None:
        """Note that a companion has failed. One that the run can lose is started again."""
        if self._is_spare(name):
            self._again.failed(name, now)

    def due(self, now: float, exited: Mapping[str, int]) -> list[str]:
        """The companions to be started now: the failed, once their processes have ended, and the late.

        Raises:
            DureError: a companion has failed in vain too often, or one that a worker needs is gone.
        """
        self._check_gone(self._again.gone(now, exited))
        failed = self._again.due(now, exited)
        for name in failed:
            times = self._again.in_vain(name)
            if times > LIMIT:
                raise DureError(f"{name} failed: {self._cause(name)}; it has failed {times} times in a row.")
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
    processes were ready. `replacements` are the workers that are started again.
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
    replacements: Replacements

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
        if self.begun.done and self.setup.replaces:
            self.replacements.failed(name, self.now())

    def left(self, name: str) -> None:
        """Note that a worker has left after a warning of preemption. It is replaced as a killed one is."""
        log.warning("%s has left: it was warned of preemption.", name)
        self.failures.left(name, WARNED)
        self.roster.present.discard(name)
        if self.setup.replaces:
            self.replacements.failed(name, self.now())

    def due(self) -> list[str]:
        """The workers that were killed or have left, and are to be started again now."""
        left = dict.fromkeys(self.failures.who_left & self.launcher.exited.keys(), -signal.SIGTERM)
        now, exited = self.now(), {**self.launcher.exited, **left}
        if not self.has_model:
            self._give_up_newcomers()
        for name in self.replacements.gone(now, exited):
            self.replacements.give_up(name)
        found = self.replacements.due(now, exited)
        again = [name for name in found if exited[name] < 0 and self.replacements.in_vain(name) <= LIMIT]
        for name in found:
            if name in again:
                log.warning("%s is started again.", name)
                continue
            often = f"ended {LIMIT + 1} times in a row without a step in between, and {LIMIT} starts are the limit"
            why = "raised an error" if exited[name] >= 0 else often
            log.warning("%s is not started again: it has %s. The others go on without it.", name, why)
        return again

    @property
    def has_model(self) -> bool:
        """Whether a server or a worker has the model of the run. A worker that only starts has none yet.

        In gossip a newcomer can copy that of a worker at its end.
        """
        roster = self.roster
        at_end = roster.finished.keys() & roster.present if self.setup.topology.graph is not None else set()
        return bool(roster.servers or roster.working() or at_end)

    def _give_up_newcomers(self) -> None:
        """Start no worker again, and kill those that start: they would begin with the initial model."""
        for name in list(self.replacements.awaited):
            self.replacements.give_up(name)
        if self.begun.done:
            for name in self.roster.living() - self.roster.ready:
                self._end(name, "no other worker has the model")
                self.replacements.give_up(name)

    def _end(self, name: str, reason: str) -> None:
        """Kill a process, which has failed for `reason`."""
        self.failures.because(name, reason)
        self.launcher.signal(name, signal.SIGKILL)
        self.failed(name, reason)

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
        frozen = self.liveness.frozen(watched)
        for name in frozen:
            self._give_up(name, f"frozen: no heartbeat for {self.setup.config.frozen_after:g} s")
        self._check_left(frozen)
        return self.liveness.described(watched)

    def _check_left(self, frozen: Collection[str]) -> None:
        """Raise `DureError` if all workers that have not failed are frozen. One that makes no progress comes back."""
        roster = self.roster
        if roster.finished or roster.living() or self.replacements.awaited:
            return
        if roster.evicted and roster.evicted.keys() <= set(frozen):
            name, reason = list(roster.evicted.items())[-1]
            raise DureError(f"no worker is left; the last of them, {name}, is {reason}.")

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
            self._end(name, reason)

    def _can_come_back(self, name: str) -> bool:
        return self.begun.done and self.can_lose(name) and not self.setup.topology.in_place

    def _evict_frozen(self, name: str, reason: str) -> None:
        log.warning("%s is evicted (%s): the others go on without it until it comes back.", name, reason)
        self._evict(name, reason)
        if self.setup.topology.graph is not None:
            self.commands.tell_neighbors(name)
        if self.roster.servers:
            self.commands.tell_clock("frozen", name)
