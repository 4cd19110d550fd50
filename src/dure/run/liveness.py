"""Tells processes of a real run that are frozen from those that are slow.

| state   | heartbeats | steps                | consequence                                                          |
|---------|------------|----------------------|----------------------------------------------------------------------|
| frozen  | none       | none                 | logged after `warn_after` seconds; after `frozen_after` seconds the  |
|         |            |                      | process is evicted if the run can lose it, else the run ends         |
| slow    | arrive     | none, while it works | logged after `warn_after` seconds; the run continues                 |
| waiting | arrive     | none, while it waits | none: it waits for another process                                   |

The servers' clock evicts workers for another reason (`topology.parameter_server.progress`): they make no steps while
others wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dure.core.log import log
from dure.runtime.heartbeat import PERIOD_SECONDS, BeatPipe, Silence
from dure.runtime.launch.fork_server import LOADER as FORK_SERVER
from dure.runtime.launch.process_state import cpu_seconds, is_stopped

if TYPE_CHECKING:
    from dure.run.config import Options

COMPUTES_SECONDS = 0.1
"""Processor seconds that show that a process without heartbeats computes in native code."""

SENT = 8
"""Heartbeats that must be missing before a process counts as frozen: one that is lost or late changes nothing."""

SURE_SECONDS = 2.0
"""Seconds without a heartbeat after which the processor time of a process is read."""

__all__ = ["FORK_SERVER", "LivenessLimits", "LivenessMonitor"]


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
            log.warning("%s is frozen: no heartbeat for %g s; %s.", name, limits.warn_after, left)
        elif before == "frozen":
            log.warning("%s is no longer frozen.", name)
