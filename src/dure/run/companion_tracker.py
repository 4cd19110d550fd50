"""The companions of a real run, as its driver sees them: their figures, their restarts, and those that join late."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dure.core.deployment import WhenLost
from dure.core.node import Call, Reply
from dure.errors import DureError, Refused
from dure.run.companion_nodes import companions_of
from dure.run.restart_policy import LIMIT

if TYPE_CHECKING:
    from dure.job.companions import Figures
    from dure.run.setup import Setup

AGAIN_SECONDS = 0.05
"""Seconds until a companion that the run can lose is started again; twice as long for each failure in vain before."""


GONE_SECONDS = 10.0
"""Seconds after which a failed process whose exit nobody reports is gone: torchrun starts nothing again at other ranks.
"""

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
            raise DureError(f"{name} failed: {self._cause(name)}; it has failed so {self._in_vain[name]} times.")

    def figures(self) -> dict[str, Figures]:
        """The figures of each companion, those before failures included."""
        return {name: self._last[name] for name in sorted(self._last)}

    def row(self, seconds: float) -> dict[str, Any]:
        """The companions' part of a row of the history."""
        companions = self._setup.job.companions
        return {} if companions is None or not self._last else companions.row(self.figures(), seconds)

    def restore(self, figures: Mapping[str, Figures]) -> None:
        """Go on from the figures of a checkpoint; a companion that it has the state of counts on itself."""
        self._last = {name: dict(found) for name, found in figures.items() if self._is_spare(name)}
