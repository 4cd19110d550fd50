"""The members of the catalogues as rows and as tables, from the descriptions of their classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dure.core import user_code
from dure.core.catalogue import combines, load, more_rows, paper, summary
from dure.core.spec_text import REQUIRED, Parameter, parameters, parse_members, type_text, value_text
from dure.errors import StrategyError, UsageError
from dure.run.strategy import AXES, JOINS, Strategy, catalogue, find, make

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

Row = dict[str, Any]

HINT = "\nWhat a parameter means, its range, its unit and its symbol in the paper: dure methods NAME"

GAPS = (
    "A gap is 1 minus a factor of the workers' disagreement in its slowest direction. Gap, averaging: the factor by "
    "which an averaging of two neighbors multiplies its square, on average. Gap, round: the factor by which a round "
    "multiplies it, in which all average with all neighbors (Metropolis weights)."
)

WIDEST = 16
"""Columns of a matrix that fit into a terminal."""

WIDEST_VALUES = 22
"""Characters for the values of a parameter, with its meaning beside them."""


def members(name: str = "", workers: int | None = None) -> list[Row]:
    """The row of the member called `name`, or the rows of all members.

    Parameters in the name, as in "gpipe:stages=4", are checked; the row is that of the member.
    A member that has more rows (`core.catalogue.more_rows`) comes with them: those of its parameters, as in
    "gossip:graph=ring", or of all that it has names for, at so many `workers`.

    Raises:
        StrategyError: no member has this name.
        UsageError: `workers` is given for a member that does not depend on it.
    """
    if not name and workers is None:
        return [_row(axis, member, place) for axis in (*AXES, *JOINS) for member, place in catalogue(axis).items()]
    for axis in (*AXES, *JOINS):
        member = name.partition(":")[0]
        more = more_rows(load(catalogue(axis)[member])) if member in catalogue(axis) else None
        if more is not None:
            choice = make(name, axis) if ":" in name else None
            return [{**_row(axis, member, catalogue(axis)[member]), **more(choice, workers)}]
    if workers is not None:
        raise UsageError(
            f"workers={workers} is for the graphs of gossip. Write dure methods gossip --workers {workers}, or leave "
            "workers out."
        )
    if ":" in name and user_code.split(name) is None:
        make(name)
        name = parse_members(name)[0].name
    axis, place = find(name)
    return [_row(axis, name, place)]


def tables(rows: Sequence[Row], *, details: bool) -> list[RenderableType]:
    """Renders `rows` as one table; with `details`, the first row alone: its parameters, then its graphs if any."""
    from rich.text import Text

    if not details:
        return [_overview(rows), Text(HINT)]
    graphs = rows[0].get("graphs", ())
    shown: list[RenderableType] = [_details(rows[0])]
    if rows[0]["parameters"]:
        shown += ["", _parameter_table(rows[0]["parameters"])]
    if graphs:
        shown += ["", _mixing_table(graphs), GAPS]
    for graph in graphs:
        shown += _matrix(graph["mixing"]) if "mixing" in graph else []
    return [Text(each) if isinstance(each, str) else each for each in shown]


# ---- graphs


def _mixing_table(graphs: Sequence[Row]) -> Table:
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("graph", overflow="fold", max_width=40)
    for heading in ("workers", "neighbors", "gap, averaging", "gap, round", "averagings to halve it", "rounds"):
        shown.add_column(heading, justify="right")
    for row in graphs:
        if "impossible" in row:
            shown.add_row(row["graph"], str(row["workers"]), "\N{EN DASH}")
            continue
        gaps = (f"{row[name]:.4g}" for name in ("gap", "round_gap"))
        halving = (f"{row[name]:,}" for name in ("averagings_to_halve", "rounds_to_halve"))
        shown.add_row(row["graph"], str(row["workers"]), row["neighbors"], *gaps, *halving)
    return shown


def _matrix(matrix: Sequence[Sequence[float]]) -> list[RenderableType]:
    """Renders a mixing matrix in per cent; one that is too wide as a reference to the option that shows it."""
    from rich.table import Table

    if len(matrix) > WIDEST:
        return ["", f"The mixing matrix has {len(matrix)} columns: --json shows it."]
    shown = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for heading in ("", *map(str, range(len(matrix)))):
        shown.add_column(heading, justify="right", no_wrap=True)
    for rank, row in enumerate(matrix):
        shown.add_row(str(rank), *(f"{100 * value:.3g}" if value else "\N{MIDDLE DOT}" for value in row))
    return ["", "The mixing matrix that is expected of an averaging, in %:", shown]


# ---- members


def _row(axis: str, name: str, place: str) -> Row:
    kind = load(place)
    return {
        "axis": axis,
        "name": name,
        "class": f"dure.{kind.__name__}" if name in catalogue(axis) else name,
        "summary": summary(kind),
        "paper": paper(kind),
        "combines": _carriers(name) if axis == "codec" else list(combines(kind)),
        "parameters": [_parameter(each) for each in parameters(kind)],
    }


def _carriers(codec: str) -> list[str]:
    """The methods that run with a codec over at least one of their topologies."""

    def carries(sync: str, topology: str) -> bool:
        try:
            Strategy.of(sync, topology, codec)
        except StrategyError:
            return False
        return True

    methods = catalogue("sync").items()
    return [name for name, place in methods if any(carries(name, topology) for topology in combines(load(place)))]


def _parameter(parameter: Parameter) -> Row:
    default = None if parameter.default is REQUIRED else value_text(parameter.default)
    row = {"name": parameter.name, "type": type_text(parameter.annotation), "default": default}
    about = {"range": parameter.range, "unit": parameter.unit, "symbol": parameter.symbol}
    return {**row, **about, "meaning": parameter.meaning}


def _assignment(parameter: Row) -> str:
    return str(parameter["name"]) if parameter["default"] is None else f"{parameter['name']}={parameter['default']}"


def _relation(row: Row) -> str:
    return "joined by + to" if row["axis"] in JOINS else "runs over"


def _company(row: Row) -> tuple[str, str]:
    listed = ", ".join(row["combines"])
    if row["axis"] in JOINS:
        return "joins", f'{listed}, as in "{row["combines"][0]}+{row["name"]}"'
    if row["axis"] == "codec":
        return "goes with", listed
    return "runs over", listed if len(row["combines"]) == 1 else f"{listed} (the first unless another is chosen)"


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
        where = row["combines"] if row["axis"] != "codec" else ()
        over = f"\n{_relation(row)} {' or '.join(where)}" if where else ""
        shown.add_row(first, row["name"], given, f"{row['summary']}{over}")
    return shown


def _details(row: Row) -> Table:
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, show_header=False)
    shown.add_column(style="bold", no_wrap=True)
    shown.add_column(overflow="fold")
    shown.add_row(row["axis"], row["name"])
    shown.add_row("what it does", row["summary"])
    if row["paper"]:
        shown.add_row("paper", row["paper"])
    if row["combines"]:
        shown.add_row(*_company(row))
    shown.add_row("class", row["class"])
    return shown


def _parameter_table(found: Sequence[Row]) -> Table:
    """Renders one line for each parameter, without the columns that are empty for all of them."""
    from rich.table import Table

    cells = [
        {
            "parameter": each["name"],
            "default": "required" if each["default"] is None else each["default"],
            "values": values(each),
            "unit": each["unit"],
            "symbol": each["symbol"],
            "meaning": each["meaning"],
        }
        for each in found
    ]
    shown = Table(box=None, pad_edge=False, header_style="bold")
    headings = [heading for heading in cells[0] if any(row[heading] for row in cells)]
    for heading in headings:
        wraps = heading in ("values", "meaning")
        shown.add_column(heading, no_wrap=not wraps, max_width=WIDEST_VALUES if heading == "values" else None)
    for row in cells:
        shown.add_row(*(row[heading] for heading in headings))
    return shown


def values(parameter: Row) -> str:
    """The values that a parameter may have: its type, and the range of its numbers.

    >>> values({"type": "int|none", "range": ">= 1"}), values({"type": "fixed|decay", "range": ""})
    ('int >= 1 | none', 'fixed | decay')
    """
    first, *others = parameter["type"].split("|")
    return " | ".join([f"{first} {parameter['range']}".rstrip(), *others])
