"""Tables and drawings of studies."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import OverflowMethod
    from rich.table import Table

    from dure.report.figures import Band

Row = dict[str, Any]
"""Figures by name, as an element of `rows` in the result of a study."""

Cell = str | Callable[[Any], str]
"""A text with the figures of a row in braces, as `str.format` takes it, or a function of the row."""

Columns = Sequence[tuple[str, Cell]]
"""The heading and the cell of each column."""

Panels = Mapping[tuple[str, str], Sequence["Band"]]
"""Lines by the row and the column of their panel."""


def table_of(
    rows: Iterable[Any], columns: Columns, caption: str, *, texts: Collection[str], fold: bool = False
) -> Table:
    """A line for each of `rows`. Columns headed by `texts` are on the left; `fold` breaks long words there."""
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, header_style="bold", caption=caption, caption_justify="left")
    for heading, _ in columns:
        is_text = heading in texts
        overflow: OverflowMethod = "fold" if fold and is_text else "ellipsis"
        shown.add_column(heading, justify="left" if is_text else "right", overflow=overflow)
    for row in rows:
        shown.add_row(*(cell.format_map(row) if isinstance(cell, str) else cell(row) for _, cell in columns))
    return shown


def known(figure: str, form: str) -> Callable[[Row], str]:
    """The cell of a figure that some rows lack, or have as None: empty there."""
    return lambda row: "" if row.get(figure) is None else form.format(row[figure])


def judged(text: str, by_seed: Sequence[bool]) -> Row:
    """An element of `statements`: a sentence, and the seeds that confirm it."""
    return {"statement": text, "holds": sum(by_seed), "of": len(by_seed), "by_seed": list(by_seed)}


def statement_table(result: Row) -> Table:
    """A row for each of `statements`, with the number of seeds that confirm it."""
    columns: Columns = [("statement", "{statement}"), ("seeds", "{holds} of {of}")]
    caption = "Seeds whose runs agree with the statement."
    return table_of(result["statements"], columns, caption, texts=("statement",), fold=True)


def spread(values: Sequence[float]) -> float:
    """The standard deviation over seeds; 0 for a single one."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def line(label: str, places: Sequence[float], values: Sequence[float]) -> Band:
    """A line of a panel, without spreads."""
    from dure.report.figures import Band

    return Band(label, places, values, [0.0] * len(values))


def draw(path: Path, panels: Panels, *, x: str, y: str, percent: bool = False) -> None:
    """Write the panels to `path` as SVG. `x` and `y` are the labels of the axes."""
    from dure.report.figures import grid
    from dure.report.files import replacing

    with replacing(path) as file:
        file.write(grid(panels, x_label=x, y_label=y, percent=percent))
