"""Failed and frozen processes of a real run: how they are seen, which start again, and when a failure ends the run.

The end of a connection shows a failure within milliseconds; the launcher knows the cause a moment later. An error that
ends the run is raised once its cause is known. The failure of a worker ends a run only if every worker is needed. An
error that a worker reports itself ends every run, unless the failure of another process explains it better.

| state   | heartbeats | steps                | consequence                                                          |
|---------|------------|----------------------|----------------------------------------------------------------------|
| frozen  | none       | none                 | logged after `warn_after` seconds; after `frozen_after` seconds the  |
|         |            |                      | process is evicted or killed: `supervisor` says what follows         |
| slow    | arrive     | none, while it works | logged after `warn_after` seconds; the run continues                 |
| waiting | arrive     | none, while it waits | none: it waits for another process                                   |

The servers' clock evicts workers for another reason (`topology.parameter_server.clock`): they make no steps while
others wait for them.

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

import shlex
import signal
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dure import errors
from dure.core.deployment import REPLAY, SERVER, WORKER, Deployment, NodeId, WhenLost
from dure.core.regular_file import LATEST
from dure.core.text import log
from dure.errors import DureError, RemoteError
from dure.runtime.heartbeat import PERIOD_SECONDS, BeatPipe, Silence, cpu_seconds, is_stopped
from dure.runtime.launch.fork_server import LOADER as FORK_SERVER

if TYPE_CHECKING:
    from dure.run.config import Options
    from dure.run.places import Launcher
    from dure.run.roster import ProcessRoster
    from dure.run.setup import Setup
    from dure.runtime.process.node import ProcessLoop


COMPUTES_SECONDS = 0.1
"""Processor seconds that show that a process without heartbeats computes in native code."""

SENT = 8
"""Heartbeats that must be missing before a process counts as frozen: one that is lost or late changes nothing."""

SURE_SECONDS = 2.0
"""Seconds without a heartbeat after which the processor time of a process is read."""


class LivenessLimits(NamedTuple):
    """Seconds after which a frozen or slow process is logged, and after which a frozen one is given up."""

    warn_after: float
    frozen_after: float

    @classmethod
    def of(cls, config: Options) -> LivenessLimits:
        """The limits that `config` sets."""
        warn_after = config.frozen_after / 3 if config.warn_after is None else config.warn_after
        return cls(warn_after, config.frozen_after)


class LivenessMonitor:
    """Receives the heartbeats of a run's processes through `beats`, the pipe of their launcher.

    `pids` gives the numbers of the processes on this machine, with that of the fork server. A process is monitored from
    its first heartbeat on, and a process of this machine from its start.
    """

    def __init__(self, beats: BeatPipe, limits: LivenessLimits, pids: Callable[[], Mapping[str, int]]) -> None:
        self.limits = limits
        self._pids = pids
        self._beats = beats
        self._silence = Silence()
        self._idle = Silence()
        self._clocks: dict[str, int] = {}
        self._computed: dict[str, float] = {}
        self._named: dict[str, str] = {}

    def admit(self, name: str) -> list[Any]:
        """Monitor a new incarnation of a process; returns the `heartbeat` of its `LaunchSpec`."""
        for tracked in (self._silence, self._idle):
            tracked.forget(name)
        for known in (self._clocks, self._computed, self._named):
            known.pop(name, None)
        period = min(PERIOD_SECONDS, self.limits.frozen_after / SENT)
        return [self._beats.sink, self._beats.admit(name), period]

    def look(self, watched: Collection[str]) -> None:
        """Receive heartbeats, and count the time of the `watched` processes that sent none."""
        self._silence.pass_time()
        self._idle.pass_time()
        for name, clock, waiting in self._beats.received():
            self._hear(name)
            if waiting or self._clocks.get(name) != clock:
                self._idle.heard(name)
            self._clocks[name] = clock
        pids = self._pids()
        for name in watched:
            if name in pids:
                self._look_at_process(name, pids[name])
            self._name(name)

    def frozen(self, watched: Collection[str]) -> list[str]:
        """The `watched` processes that must be given up."""
        return [name for name in watched if self._silence.seconds(name) >= self.limits.frozen_after]

    def described(self, watched: Sequence[str]) -> str:
        """The frozen and slow processes in words, for the progress line; empty if there are none."""
        return ", ".join(f"{name} {state}" for name in watched if (state := self._named.get(name)))

    def _hear(self, name: str) -> None:
        self._silence.heard(name)
        self._computed.pop(name, None)

    def _look_at_process(self, name: str, pid: int) -> None:
        """Monitor a process of this machine from its start; processor time counts as a heartbeat.

        The fork server has no thread for heartbeats, as threads do not survive a fork: it is frozen if it is stopped.
        """
        if name not in self._silence or (name == FORK_SERVER and not is_stopped(pid)):
            self._silence.heard(name)
        elif self._silence.seconds(name) >= min(SURE_SECONDS, self.limits.warn_after / 2):
            used = cpu_seconds(pid)
            if used >= self._computed.setdefault(name, used) + COMPUTES_SECONDS:
                self._hear(name)

    def _name(self, name: str) -> None:
        """Log a change of a process's state."""
        limits, state = self.limits, ""
        if self._silence.seconds(name) >= limits.warn_after:
            state = "frozen"
        elif self._idle.seconds(name) >= limits.warn_after and name.startswith("worker"):
            state = "slow"
        before = self._named.get(name, "")
        if state == before:
            return
        self._named[name] = state
        if state == "frozen":
            left = f"after {limits.frozen_after:g} s it is given up"
            log.warning("%s is frozen: no heartbeat for %.3g s; %s.", name, limits.warn_after, left)
        elif before == "frozen":
            log.warning("%s is no longer frozen.", name)


LIMIT = 5
"""Restarts of one process in a run; of a companion, failures one after another in which it has done nothing."""

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


EXPLAIN_SECONDS = 3.0
"""Seconds to wait until the launcher knows an exit status: it needs milliseconds, unless the machine is busy."""


class FailureTracker:
    """Keeps the cause of each failure, and the errors that workers have `reported`, by the name of the process.

    `reasons` are causes that are known before a process ends. `deployment` says which nodes the run can lose; `folder`
    is that of its checkpoints.
    """

    def __init__(
        self,
        launcher: Launcher,
        loop: ProcessLoop,
        strategy: str,
        deployment: Deployment,
        *,
        roster: ProcessRoster,
        folder: Path | None,
    ) -> None:
        self.causes: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.reported: dict[str, DureError] = {}
        self.who_left = set[str]()
        self._failed = roster.failed
        self._launcher = launcher
        self._loop = loop
        self._strategy = strategy
        self._deployment = deployment
        self._folder = folder
        self._unexplained: set[str] = set()

    def failed(self, name: str, reason: str) -> None:
        """Note that a process has ended before its work was done. `reason` is how its connection or process ended."""
        self._failed[name] = reason
        self.causes.pop(name, None)
        self._wait_for(name)

    def left(self, name: str, reason: str) -> None:
        """Note that a process was warned, and has left before its work was done. That is no failure."""
        self._failed[name] = self.reasons[name] = reason
        self.who_left.add(name)

    def because(self, name: str, reason: str) -> None:
        """Note the cause of an end that is to come: the run itself ends the process, or the process has reported it."""
        self.reasons[name] = reason

    def report(self, name: str, kind: str, message: str) -> None:
        """Note the error with which a worker ends; `kind` is the name of a class of `errors`."""
        found = getattr(errors, kind, None)
        known = found if isinstance(found, type) and issubclass(found, DureError) else DureError
        self.reported[name] = known(message if name in message or kind == "Quarantined" else f"{name}: {message}")
        self._wait_for(f"{name} failed")

    def restarted(self, name: str) -> None:
        """Forget the failure of a process that is started again."""
        if name in self._failed and name not in self.causes and name not in self.who_left:
            self._explain(name)
        self.who_left.discard(name)
        self._failed.pop(name, None)
        self.reasons.pop(name, None)

    def look(self) -> None:
        """Log the failures whose cause is known by now."""
        for name in self._failed.keys() - self.causes.keys() - self.who_left:
            if self._explained(name):
                self._explain(name)

    @property
    def own_errors(self) -> list[DureError]:
        """The errors of workers that no failure of another process explains."""
        return [error for error in self.reported.values() if not isinstance(error, RemoteError)]

    def killed(self) -> list[str]:
        """The failed processes that were killed, by a signal from outside or by the run itself."""
        return [name for name in self._failed if name in self.reasons or self._launcher.exited.get(name, 0) < 0]

    def check(self, workers: Collection[str], restarts: RestartPolicy, replaced: Collection[str] = ()) -> None:
        """Raise the error that ends the run, if any; the failure of a process that is started again is none.

        These are servers of `restarts`, and the `replaced` workers.
        """
        if self.own_errors:
            raise min(self.own_errors, key=lambda error: not isinstance(error, errors.DivergedError))
        for name in self._failed:
            told = name in restarts.awaited or name in self.reported
            if self._is_fatal(name) and not told and self._explained(name):
                again = f", for the {restarts.made[name] + 1}th time" if restarts.made[name] >= LIMIT else ""
                kind = NodeId.of(name).kind
                alone = len(self._deployment.names(WORKER)) == 1
                # Without an exit status it may still run, behind a link that is down.
                ended = name in self._launcher.exited or name in self.reasons
                is_gone = "is gone" if ended else "cannot be reached"
                loss = {SERVER: f"its part of the model {is_gone}", REPLAY: "its transitions are gone"}.get(
                    kind, "its model is gone" if alone else self._need(name)
                )
                raise DureError(f"{name} failed: {self.cause(name)}; {loss}{again}.{self._advice(name)}")
        if workers and not replaced and all(name in self._failed for name in workers):
            first = next(iter(name for name in self._failed if name in workers))
            if self._explained(first):
                raise DureError(
                    f"all workers failed; the first of them, {first}: {self.cause(first)}.{self._advice(first)}"
                )
        for name, error in self.reported.items():
            if self._explained(f"{name} failed"):
                raise error

    def _is_fatal(self, name: str) -> bool:
        """Whether the failure of a process ends a run that does not start it again.

        A worker that has raised an error would do so in any group.
        """
        if self._deployment[name].when_lost is WhenLost.RE_FORM:
            return self._launcher.exited.get(name, 0) > 0
        return self._deployment[name].when_lost is not WhenLost.GO_ON

    def _need(self, name: str) -> str:
        """Why the others do not go on without a worker."""
        if self._deployment[name].when_lost is WhenLost.RE_FORM:
            return "a worker that exits with an error would do so in any group"
        return f"{self._strategy} needs all workers"

    def cause(self, name: str) -> str:
        """The cause of a failure in words, as far as it is known."""
        if name in self.reasons:
            return self.reasons[name]
        if name in self.reported:
            return str(self.reported[name]).removeprefix(f"{name}: ").rstrip(".")
        status = self._launcher.exited.get(name)
        if status is None:
            return self._failed.get(name, "")
        if status < 0:
            return f"killed by signal {-status} ({signal.Signals(-status).name})"
        if status == 0:
            return "it ended, with exit status 0, before its work was done"
        return (self._launcher.last_line(name) or f"it ended with exit status {status}").rstrip(".")

    def _advice(self, name: str) -> str:
        """The command that resumes the run, or the options that would have written a checkpoint.

        The advice to write checkpoints is left out if the process raised an error: a new run would raise it again.
        """
        if self._folder is not None and (self._folder / LATEST).exists():
            return f" Resume with: dure train --resume {shlex.quote(str(self._folder.parent))}"
        raised = self._launcher.exited.get(name, 0) > 0
        return "" if raised else " No checkpoint was written: --out with --checkpoint-every N writes one every N steps."

    def _explain(self, name: str) -> None:
        """Record a cause, unless the process has reported its own error: workers of a failed server end so."""
        if name not in self.reported:
            self.causes[name] = self.cause(name)
            log.warning("%s failed: %s.", name, self.causes[name])

    def _explained(self, what: str) -> bool:
        return what in self.reasons or what in self._launcher.exited or what not in self._unexplained

    def _wait_for(self, what: str) -> None:
        self._unexplained.add(what)
        self._loop.after(EXPLAIN_SECONDS, lambda: self._unexplained.discard(what))
