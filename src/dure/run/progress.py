"""How far each worker of a real run is, and what the run has counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dure.core.deployment import NodeId
from dure.report.metrics import VersionCounts
from dure.run.outcome import Totals

if TYPE_CHECKING:
    from dure.run.roster import ProcessRoster
    from dure.run.setup import Setup

TRAFFIC = ("bytes_sent", "bytes_received", "messages")


class RunProgress:
    """The last report of each worker, and the totals of the run.

    `at` is the last step boundary that a worker has reported. `totals` counts workers that have finished or failed;
    `reports` are those of the others. `refused_of_failed` are updates that failed workers had refused before.
    """

    def __init__(self, setup: Setup, roster: ProcessRoster) -> None:
        self.totals = Totals()
        self.reports: dict[str, Mapping[str, Any]] = {}
        self.at: dict[str, int] = {}
        self.refused_of_failed = 0
        self._setup = setup
        self._roster = roster

    def restore(self, totals: Mapping[str, Any], seconds: float, reports: Mapping[str, Mapping[str, Any]]) -> None:
        """Go on from the counts and the reports of a checkpoint."""
        self.totals = Totals.restored(totals)
        self.totals.seconds = seconds
        self.reports = dict(reports)
        self.at = {name: int(report["at"]) for name, report in reports.items()}

    def report(self, name: str, fields: Mapping[str, Any]) -> None:
        self.reports[name] = fields
        self.at[name] = fields["at"]

    def samples(self) -> int:
        """Samples that all workers have used so far."""
        running = sum(int(report["done"]) * self._batch_size(name) for name, report in self.reports.items())
        return self.totals.counts["samples"] + running

    def bytes_sent(self) -> int:
        return sum(int(report["bytes"]) for report in self.reports.values())

    def highest(self) -> int:
        """The highest step that a worker has reported."""
        return max((int(report["steps"]) for report in self.reports.values()), default=0)

    def lowest(self) -> int:
        """The last step that every worker has reported; failed and evicted workers are left out."""
        living = [self.at.get(name, 0) for name in self._roster.living()]
        return min([*living, *(int(report["steps"]) for report in self._roster.finished.values())], default=0)

    def count_lost(self, name: str) -> None:
        """Count the steps that a failed or evicted worker has last reported."""
        steps = int(self.reports.pop(name, {"done": 0})["done"])
        self.totals.count("per_worker", name, steps=steps)
        self.totals.counts["samples"] += steps * self._batch_size(name)

    def count_finished(self) -> None:
        """Count the steps, samples, seconds, pulls and messages of the workers that have finished."""
        totals, finished = self.totals, self._roster.finished
        for name, report in finished.items():
            totals.count("per_worker", name, steps=report["done"], **{key: report[key] for key in TRAFFIC})
            totals.add_time(report["time"])
            totals.version_skew.merge(VersionCounts.of(report["skew"]))
            totals.counts["samples"] += report["done"] * self._batch_size(name)
            for key in TRAFFIC:
                totals.counts[key] += report[key]
        totals.seconds = max(report["seconds"] for report in finished.values())
        totals.steps = max(report["steps"] for report in finished.values())

    def count_refused(self) -> None:
        """Count the updates that workers have refused themselves."""
        of_finished = sum(int(report.get("refused", 0)) for report in self._roster.finished.values())
        self.totals.counts["updates_refused"] += self.refused_of_failed + of_finished

    def _batch_size(self, name: str) -> int:
        """The samples of a mini-batch that count for a worker; in a pipeline they count for one of its workers."""
        setup, number = self._setup, NodeId.of(name).rank
        return setup.batch_sizes[setup.replica_of(number)] if setup.reports(number) else 0
