"""Runs side by side in the terminal: the columns that decide. The report has the rest."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dure.report import comparison
from dure.report.comparison import Entry, bytes_text, loss_text, mean_text, percent_text, ratio_text, seconds_text
from dure.report.record import Run


def print_table(runs: Sequence[Run], *, console: Console, target: float = 0.95) -> None:
    """Print the comparison of `runs` to `console`; `target` is the test accuracy whose time is shown."""
    console.print(comparison_table(runs, target=target))


def comparison_table(runs: Sequence[Run], *, target: float = 0.95) -> Table:
    """The same as a rich table. An empty sequence gives a table without rows."""
    found = comparison.entries(runs, target=target)
    table = Table(caption=_caption(found), caption_justify="left", header_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("strategy", overflow="fold")
    table.add_column(f"to {comparison.target_text(target)}", justify="right", no_wrap=True)
    for name in ("speed-up", "whole run", "loss", "accuracy", "sent", "stale", "compute", "comm.", "wait"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in found:
        table.add_row(*_cells(entry))
    return table


def _cells(entry: Entry) -> list[Text]:
    texts = [
        entry.label if entry.finished else f"{entry.label} (unfinished)",
        seconds_text(entry.reached),
        ratio_text(entry.speedup),
        seconds_text(entry.figure("seconds")),
        loss_text(entry),
        percent_text(entry.figure("accuracy")),
        bytes_text(entry.figure("bytes_sent")),
        mean_text(entry.figure("staleness", "mean")),
        *(_share(entry, part) for part in ("compute", "communicate", "wait")),
    ]
    return [Text(text, style="bold red" if text == "diverged" else "") for text in texts]


def _share(entry: Entry, part: str) -> str:
    share = entry.figure("time_share", part)
    return comparison.NOTHING if share is None else f"{100 * share:.0f} %"


def _caption(found: Sequence[Entry]) -> str | None:
    kinds = {entry.time for entry in found}
    said = comparison.compression_verdicts(found)
    if kinds == {"virtual"}:
        said = ["time is virtual: a model of machines and network", *said]
    if kinds == {"virtual", "real"}:
        said = ["speed-up is within virtual runs and within real runs", *said]
    return "\n".join(said) or None
