"""A run's record, from training or from its folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dure.report.html import write_report
from dure.report.record import CONFIG, HISTORY, SUMMARY, read_history, read_object, require_run
from dure.report.schema import check_config, check_figures
from dure.report.values import RunRecord


@dataclass(frozen=True, slots=True)
class Run(RunRecord):
    """The record of a run, which writes its own report."""

    def report(self, path: str | Path, *, title: str | None = None) -> Path:
        """Write this run's report, one HTML file that opens offline; returns its path."""
        return write_report(path, [self], title=title or "Training report")


def read_run(path: str | Path) -> Run:
    """The run that `path` holds, finished or not.

    UsageError where there is no run, RecordError naming file and line where its record is damaged.
    """
    path = Path(path)
    require_run(path)
    record = check_config(read_object(path / CONFIG), str(path / CONFIG))
    config = record["config"]
    summary = path / SUMMARY
    figures = check_figures(read_object(summary), str(summary)) if summary.exists() else {}
    history = read_history(path / HISTORY)
    return Run(config, history, figures, path, record.get("versions", {}), record.get("seed"), record.get("code", {}))
