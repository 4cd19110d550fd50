"""`dure watch`: the present figures of a run that is going on, or is over, from its record.

On a terminal one table is drawn again and again; elsewhere each row of the history is a line.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from dure.core.target import Target
from dure.core.text import printable
from dure.errors import UsageError
from dure.report.comparison import entries
from dure.report.labels import bytes_text, number_text, seconds_text
from dure.report.record import HISTORY, SUMMARY, goes_on
from dure.report.run import Run, read_run
from dure.run.places import is_real
from dure.run.scaling import scale_of
from dure.runtime.launch.interruption import Interruption

LOOK_SECONDS = 1.0
"""Time after which the record is read again even if its files have not grown: its process may have ended."""


def watch(folder: Path, interruption: Interruption, console: Console) -> Run:
    """Show the run in `folder` on `console` until it is over; returns it. Raises `Interrupted` after a signal."""
    shown = 0
    with ExitStack() as stack:
        live = stack.enter_context(Live(console=console, auto_refresh=False)) if console.is_terminal else None
        while True:
            on, seen = goes_on(folder), _sizes(folder)  # before it is read, so that nothing later is missed
            run = read_run(folder)
            if live is not None:
                live.update(_table(run, on), refresh=True)
            else:
                shown = _print_rows(run, min(shown, len(run.history)), console)
            if not on:
                return run
            interruption.until(lambda before=seen: _sizes(folder) != before, LOOK_SECONDS)  # type: ignore[misc]


def _sizes(folder: Path) -> tuple[int, bool]:
    history = folder / HISTORY
    return history.stat().st_size if history.exists() else 0, (folder / SUMMARY).exists()


def _print_rows(run: Run, shown: int, console: Console) -> int:
    """Print the rows of the history after the first `shown`; returns their number."""
    for row in run.history[shown:]:
        line = ", ".join(f"{name} {value}" for name, value in figures(run, row).items())
        console.print(printable(line), markup=False, highlight=False, soft_wrap=True)
    console.file.flush()
    return len(run.history)


def figures(run: Run, row: Mapping[str, Any]) -> dict[str, str]:
    """The figures of a run at a row of its history, as text by their names."""
    step = f"{row.get('step', 0):.0f}"
    if run.steps:
        step = f"{step} of {run.steps} ({min(1.0, row.get('step', 0) / run.steps):.0%})"
    found = {"step": step, "loss": number_text(row.get("loss"))}
    if row.get("mean_return") is not None:
        found["return"] = number_text(row["mean_return"])
    if row.get("accuracy") is not None:
        found["accuracy"] = f"{row['accuracy']:.1%}"
    workers = run.summary().get("workers", run.config.get("workers"))
    with suppress(UsageError):  # not an elastic run that goes on
        workers = len(scale_of(run.path or Path()).run)
    if workers is not None:
        found["workers"] = str(workers)
    found["sent"] = bytes_text(row.get("bytes"))
    kind = "real" if is_real(str(run.config.get("on", ""))) else "virtual"
    return {**found, f"{kind} time": seconds_text(row.get("seconds"))}


def _table(run: Run, on: bool) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    strategy = entries([run], target=Target())[0].label
    state = "goes on" if on else "finished" if run.figures else "ended without a result"
    rows = {"job": str(run.config.get("job", "")), "strategy": strategy, "run": state}
    for name, value in {**rows, **figures(run, run.history[-1] if run.history else {})}.items():
        table.add_row(name.capitalize(), printable(value))
    return table
