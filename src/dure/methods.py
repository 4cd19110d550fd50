"""What can be chosen, as rows and as a table: the catalogues, with the parameters of each member."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dure.strategy import AXES, REMEDY, catalogue, find
from dure.text import REQUIRED, Parameter, parameters, type_text, value_text

if TYPE_CHECKING:
    from rich.table import Table

Row = dict[str, Any]


def described(name: str = "") -> list[Row]:
    """The member called `name`, or all of them. Raises `StrategyError` for a name that is none."""
    if name:
        return [_row(find(name)[0], name)]
    return [_row(axis, member) for axis in (*AXES, REMEDY) for member in catalogue(axis)]


def table(rows: Sequence[Row], *, details: bool) -> Table:
    """`rows` as a table; with `details`, one line per parameter in place of one per member."""
    return _details(rows[0]) if details else _overview(rows)


def _row(axis: str, name: str) -> Row:
    entry = catalogue(axis)[name]
    return {
        "axis": axis,
        "name": name,
        "summary": entry.summary,
        "paper": entry.paper,
        "combines": list(entry.combines),
        "parameters": [_parameter(each) for each in parameters(entry.load())],
    }


def _parameter(parameter: Parameter) -> Row:
    default = None if parameter.default is REQUIRED else value_text(parameter.default)
    return {"name": parameter.name, "type": type_text(parameter.annotation), "default": default}


def _assignment(parameter: Row) -> str:
    return str(parameter["name"]) if parameter["default"] is None else f"{parameter['name']}={parameter['default']}"


def _how(row: Row) -> str:
    return "joined by + to" if row["axis"] == REMEDY else "over"


def _company(row: Row) -> tuple[str, str]:
    listed = ", ".join(row["combines"])
    if row["axis"] == REMEDY:
        return "joins", f'{listed}, as in "{row["combines"][0]}+{row["name"]}"'
    return "runs over", f"{listed} (the first unless another is chosen)"


def _overview(rows: Sequence[Row]) -> Table:
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("axis", "name", "parameters", "what it does"):
        shown.add_column(heading, no_wrap=heading != "what it does")
    axis = ""
    for row in rows:
        given = "\n".join(_assignment(parameter) for parameter in row["parameters"])
        first = row["axis"] if row["axis"] != axis else ""
        axis = row["axis"]
        over = f"\n{_how(row)} {' or '.join(row['combines'])}" if row["combines"] else ""
        shown.add_row(first, row["name"], given, f"{row['summary']}{over}")
    return shown


def _details(row: Row) -> Table:
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, show_header=False)
    shown.add_column(style="bold", no_wrap=True)
    shown.add_column(overflow="fold")
    shown.add_row(row["axis"], row["name"])
    shown.add_row("what it does", row["summary"])
    shown.add_row("paper", row["paper"])
    if row["combines"]:
        shown.add_row(*_company(row))
    for position, parameter in enumerate(row["parameters"]):
        shown.add_row("" if position else "parameters", f"{_assignment(parameter)}  ({parameter['type']})")
    return shown
