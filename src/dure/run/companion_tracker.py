"""The companions of a real run, as its driver sees them: their figures and their restarts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dure.core.deployment import WhenLost
from dure.core.node import Call, Reply

if TYPE_CHECKING:
    from dure.job.companions import Figures
    from dure.run.setup import Setup

AGAIN_SECONDS = 0.1
"""Seconds after which a companion that the run can lose is started again."""


class CompanionTracker:
    """Keeps the last figures of each companion, and says which are to be started again.

    A companion that the run can lose counts anew after a failure: its figures until then stay in the sums.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._last: dict[str, Figures] = {}
        self._before: dict[str, Figures] = {}
        self._due: dict[str, float] = {}

    def report(self, call: Call) -> Reply:
        """Note the figures of a companion."""
        self._last[call.caller] = dict(call.fields["figures"])
        return Reply()

    def failed(self, name: str, now: float) -> None:
        """Note that a companion has failed. One that the run can lose is started again."""
        if self._setup.deployment[name].when_lost is not WhenLost.GO_ON:
            return
        self._before[name] = _added(self._before.get(name, {}), self._last.pop(name, {}))
        self._due[name] = now + AGAIN_SECONDS

    def due(self, now: float, exited: Mapping[str, int]) -> list[str]:
        """The companions to be started now; their processes have ended."""
        found = [name for name, when in self._due.items() if when <= now and name in exited]
        for name in found:
            del self._due[name]
        return found

    def figures(self) -> dict[str, Figures]:
        """The figures of each companion, those before failures included."""
        names = self._before.keys() | self._last.keys()
        return {name: _added(self._before.get(name, {}), self._last.get(name, {})) for name in sorted(names)}

    def row(self, seconds: float) -> dict[str, Any]:
        """What a row of the history has of the companions."""
        companions = self._setup.job.companions
        return {} if companions is None or not self._last else companions.row(self.figures(), seconds)

    def restore(self, figures: Mapping[str, Figures]) -> None:
        """Go on from the figures of a checkpoint; a companion that it has the state of counts on itself."""
        deployment = self._setup.deployment
        self._before = {
            name: dict(found) for name, found in figures.items() if deployment[name].when_lost is WhenLost.GO_ON
        }


def _added(before: Mapping[str, float], now: Mapping[str, float]) -> Figures:
    """Counts add up; a mean is that of now.

    >>> _added({"steps": 3, "recent_return": 1.0}, {"steps": 2, "recent_return": 4.0})
    {'steps': 5, 'recent_return': 4.0}
    """
    counted = {name: before.get(name, 0) + value for name, value in now.items()} if before else dict(now)
    means = {name: value for name, value in {**before, **now}.items() if name.startswith("recent")}
    return {**before, **counted, **means}
