"""What can be chosen, as rows and as tables: the members of the catalogues, as their classes describe them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dure.core.catalogue import combines, load, paper, summary
from dure.core.spec_text import REQUIRED, Parameter, parameters, type_text, value_text
from dure.errors import StrategyError, UsageError
from dure.run.strategy import AXES, JOINS, Strategy, catalogue, find, make
from dure.topology.gossip.choice import GRAPHS, Gossip

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

Row = dict[str, Any]

HINT = "\nWhat a parameter means, its range, its unit and its symbol in the paper: dure methods NAME"

SIZES = (8, 16, 64)
"""Workers for which graphs are shown where nothing else is asked for."""

GAPS = (
    "A gap is one minus what is left of a disagreement in its slowest direction: of its square after an averaging of "
    "two, of itself after a round in which all average with all neighbors (Metropolis weights)."
)

WIDEST = 16
"""Columns of a matrix that a terminal has room for."""

WIDEST_VALUES = 22
"""Columns for the values of a parameter, where its meaning stands beside them."""


def described(name: str = "", workers: int | None = None) -> list[Row]:
    """The member called `name`, or all of them. Raises `StrategyError` for a name that is none.

    `gossip` comes with its graphs: all that have a name, or the one that is asked for, as in "gossip:graph=ring"; for
    so many `workers` with the mixing matrix of an averaging.
    """
    if name.partition(":")[0] == "gossip":
        return [{**_row("topology", "gossip", catalogue("topology")["gossip"]), "graphs": _graphs(name, workers)}]
    if workers is not None:
        raise UsageError("workers is how many gossip with each other: write dure methods gossip --workers 16.")
    if name:
        axis, place = find(name)
        return [_row(axis, name, place)]
    return [_row(axis, member, place) for axis in (*AXES, *JOINS) for member, place in catalogue(axis).items()]


def tables(rows: Sequence[Row], *, details: bool) -> list[RenderableType]:
    """`rows` as a table; with `details`, all about the first: one line per parameter, then its graphs if any."""
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


# ---- graphs of gossip


def _graphs(text: str, workers: int | None) -> list[Row]:
    """Every graph that `text` means, at every number of workers that is asked for."""
    from dure.topology.gossip.graph import size

    asked: Gossip = make(text, "topology")
    if workers is not None and workers < 2:
        raise UsageError(f"workers should be 2 or more, got {workers}: nobody gossips alone.")
    if ":" not in text:
        return [_graph(Gossip(name), count) for name in GRAPHS for count in ((workers,) if workers else SIZES)]
    count = workers or size(asked)
    return [_graph(asked, count, matrix=True)] if count else [_graph(asked, each) for each in SIZES]


def _graph(topology: Gossip, workers: int, *, matrix: bool = False) -> Row:
    from dure.core.mixing import mixing, pairwise_mixing
    from dure.topology.gossip.graph import build

    name = topology.graph
    if name == "random-regular":
        name += f", degree={topology.degree}"
    try:
        graph = build(topology, workers)
    except StrategyError as error:
        if matrix:
            raise
        return {"graph": name, "workers": workers, "impossible": str(error)}
    row = {"graph": name, **mixing(graph).as_dict()}
    return {**row, "mixing": pairwise_mixing(graph).tolist()} if matrix else row


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
    """A mixing matrix in per cent, or where to find it."""
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
    """The methods that send what this codec encodes, over one of their topologies at least."""

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
    described = {"range": parameter.range, "unit": parameter.unit, "symbol": parameter.symbol}
    return {**row, **described, "meaning": parameter.meaning}


def _assignment(parameter: Row) -> str:
    return str(parameter["name"]) if parameter["default"] is None else f"{parameter['name']}={parameter['default']}"


def _how(row: Row) -> str:
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
        over = f"\n{_how(row)} {' or '.join(where)}" if where else ""
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
    """One line for each parameter. A column that is empty for all of them is left out."""
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
    """What a parameter may be: its type, and the range of its numbers.

    >>> values({"type": "int|none", "range": ">= 1"}), values({"type": "fixed|decay", "range": ""})
    ('int >= 1 | none', 'fixed | decay')
    """
    first, *others = parameter["type"].split("|")
    return " | ".join([f"{first} {parameter['range']}".rstrip(), *others])
