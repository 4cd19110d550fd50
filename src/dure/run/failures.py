"""Tracks failed processes of a real run, their causes, and whether a failure ends the run.

The end of a connection shows a failure within milliseconds; the launcher knows the cause a moment later. An error that
ends the run is raised once its cause is known. The failure of a worker ends a run only if every worker is needed. An
error that a worker reports itself ends every run, unless the failure of another process explains it better.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from dure import errors
from dure.core.deployment import REPLAY, SERVER, WORKER, Deployment, NodeId, WhenLost
from dure.core.folder_names import LATEST
from dure.core.log import log
from dure.errors import DureError, RemoteError
from dure.run.restart_policy import LIMIT

if TYPE_CHECKING:
    from dure.run.launcher import Launcher
    from dure.run.restart_policy import RestartPolicy
    from dure.run.roster import ProcessRoster
    from dure.runtime.process.loop import ProcessLoop

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
        if name in self._failed and name not in self.causes:
            self._explain(name)
        self._failed.pop(name, None)
        self.reasons.pop(name, None)

    def look(self) -> None:
        """Log the failures whose cause is known by now."""
        for name in self._failed.keys() - self.causes.keys():
            if self._explained(name):
                self._explain(name)

    @property
    def own_errors(self) -> list[DureError]:
        """The errors of workers that no failure of another process explains."""
        return [error for error in self.reported.values() if not isinstance(error, RemoteError)]

    def killed(self) -> list[str]:
        """The failed processes that were killed, by a signal from outside or by the run itself."""
        return [name for name in self._failed if name in self.reasons or self._launcher.exited.get(name, 0) < 0]

    def check(self, workers: Collection[str], restarts: RestartPolicy) -> None:
        """Raise the error that ends the run, if any; the failure of a server that is started again is none."""
        if self.own_errors:
            raise min(self.own_errors, key=lambda error: not isinstance(error, errors.DivergedError))
        for name in self._failed:
            fatal = self._deployment[name].when_lost is not WhenLost.GO_ON
            if fatal and name not in restarts.awaited and name not in self.reported and self._explained(name):
                again = f", for the {restarts.made[name] + 1}th time" if restarts.made[name] >= LIMIT else ""
                kind = NodeId.of(name).kind
                alone = len(self._deployment.names(WORKER)) == 1
                loss = {SERVER: "its part of the model is gone", REPLAY: "its transitions are gone"}.get(
                    kind, "its model is gone" if alone else f"{self._strategy} needs all workers"
                )
                raise DureError(f"{name} failed: {self.cause(name)}; {loss}{again}.{self._advice(name)}")
        if workers and all(name in self._failed for name in workers):
            first = next(iter(name for name in self._failed if name in workers))
            if self._explained(first):
                raise DureError(
                    f"all workers failed; the first of them, {first}: {self.cause(first)}.{self._advice(first)}"
                )
        for name, error in self.reported.items():
            if self._explained(f"{name} failed"):
                raise error

    def cause(self, name: str) -> str:
        """The cause of a failure in words, as far as it is known."""
        if name in self.reasons:
            return self.reasons[name]
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
