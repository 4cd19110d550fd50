"""The record of a run, from training or from its folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dure.report.html import display, write_report
from dure.report.record import (
    CONFIG,
    HISTORY,
    SUMMARY,
    RunRecord,
    check_config,
    check_figures,
    read_history,
    read_object,
    require_run,
)


@dataclass(frozen=True, slots=True)
class Run(RunRecord):
    """The record of a run with a method that writes its report."""

    def report(self, path: str | Path, *, title: str | None = None) -> Path:
        """Write the report of this run, one HTML file that opens offline, and return its path."""
        return write_report(path, [self], title=title or "Training report")

    def _repr_html_(self) -> str | None:
        """The table and the curves of the run, which a notebook shows."""
        return display([self])


def read_run(path: str | Path) -> Run:
    """Read the run in the folder `path`, finished or not.

    Raises `UsageError` if the folder holds no run, and `RecordError` with file and line if its record is damaged.
    """
    path = Path(path)
    require_run(path)
    record = check_config(read_object(path / CONFIG), str(path / CONFIG))
    config = record["config"]
    summary = path / SUMMARY
    figures = check_figures(read_object(summary), str(summary)) if summary.exists() else {}
    history = read_history(path / HISTORY)
    rest = (record.get("versions", {}), record.get("seed"), record.get("code", {}), record.get("written", ()))
    return Run(config, history, figures, path, *rest, steps=record.get("steps"))
