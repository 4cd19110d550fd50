"""Shows runs side by side in the terminal, with the most important figures. The report has all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from dure.core.target import Target
from dure.report import comparison
from dure.report.comparison import (
    Entry,
    bytes_text,
    count_text,
    loss_text,
    mean_text,
    percent_text,
    ratio_text,
    return_text,
    seconds_text,
)
from dure.report.values import RunRecord


@dataclass(frozen=True, slots=True)
class FittedComparison:
    """Prints the comparison of `runs` with rich: in a narrow terminal as several tables, so that no cell is cut."""

    runs: Sequence[RunRecord]
    target: Target

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        found = comparison.entries(self.runs, target=self.target)
        columns = _columns(found, self.target)
        letters = 2 * options.max_width // 5  # a longer strategy takes several lines
        parts: list[dict[str, list[str]]] = [{}]
        for head, texts in columns.items():
            wider = {**parts[-1], head: texts}
            if parts[-1] and _width(_table(found, wider, letters), console, options) > options.max_width:
                parts.append({head: texts})
            else:
                parts[-1] = wider
        for part in parts:
            yield _table(found, part, letters)
        caption = _caption(found, self.target)
        if caption:
            yield Text(caption, style="table.caption")


def comparison_table(runs: Sequence[RunRecord], *, target: Target = Target()) -> Table:
    """The comparison of `runs` as one rich table of any width. Without runs the table has no rows.

    The columns of accuracies, and that of the time to one, are left out if no run has an accuracy.
    """
    found = comparison.entries(runs, target=target)
    table = _table(found, _columns(found, target))
    table.caption = _caption(found, target)
    return table


def _table(found: Sequence[Entry], columns: Mapping[str, Sequence[str]], letters: int = 0) -> Table:
    """A table of some columns. A strategy of up to `letters` letters stays on one line."""
    labels = [entry.label if entry.finished else f"{entry.label} (unfinished)" for entry in found]
    longest = max(map(len, labels), default=0)
    table = Table(caption_justify="left", header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("strategy", overflow="fold", min_width=min(longest, letters))
    for name, texts in columns.items():
        table.add_column(name, justify="right", no_wrap=True, min_width=max(map(len, (name, *texts))))
    for place, label in enumerate(labels):
        cells = [label, *(texts[place] for texts in columns.values())]
        table.add_row(*(Text(text, style="bold red" if text == "diverged" else "") for text in cells))
    return table


def _width(table: Table, console: Console, options: ConsoleOptions) -> int:
    """The width of a terminal that cuts no number of `table`."""
    return Measurement.get(console, options.update_width(10_000), table).minimum


def _columns(found: Sequence[Entry], target: Target) -> dict[str, list[str]]:
    """The cells of each column, by its name."""
    columns: dict[str, list[str]] = {}
    if comparison.timed(found, target) or not found:
        columns[f"to {target.short}"] = [seconds_text(entry.reached) for entry in found]
        columns["speed-up"] = [ratio_text(entry.speedup) for entry in found]
    columns["whole run"] = [seconds_text(entry.figure("seconds")) for entry in found]
    if comparison.played(found):
        columns["return"] = [return_text(entry.figure("experience", "mean_return")) for entry in found]
        columns["best"] = [return_text(entry.figure("experience", "best_return")) for entry in found]
        columns["frames"] = [count_text(entry.figure("experience", "frames")) for entry in found]
        columns["frames/s"] = [count_text(entry.figure("experience", "frames_per_second")) for entry in found]
    if comparison.lossy(found) or not found:
        columns["loss"] = [loss_text(entry) for entry in found]
    if comparison.graded(found) or not found:
        columns["accuracy"] = [percent_text(entry.figure("accuracy")) for entry in found]
    columns["sent"] = [bytes_text(entry.figure("bytes_sent")) for entry in found]
    columns["received"] = [bytes_text(entry.figure("bytes_received")) for entry in found]
    columns["stale"] = [mean_text(entry.figure("staleness", "mean")) for entry in found]
    for name, part in (("compute", "compute"), ("comm.", "communicate"), ("wait", "wait")):
        columns[name] = [_share(entry, part) for entry in found]
    return columns


def _share(entry: Entry, part: str) -> str:
    share = entry.figure("time_share", part)
    return comparison.NOTHING if share is None else f"{100 * share:.0f} %"


def _caption(found: Sequence[Entry], target: Target) -> str | None:
    kinds = {entry.time for entry in found}
    said = comparison.compression_verdicts(found)
    if kinds == {"virtual"}:
        said = ["time is virtual: a model of machines and network", *said]
    if kinds == {"virtual", "real"}:
        said = ["speed-up is within virtual runs and within real runs", *said]
    if found and comparison.lossy(found) and not comparison.timed(found, target):
        said = [*said, "the job has no accuracy: --target-loss compares the times to a loss"]
    return "\n".join(said) or None
