"""Sections, figures, tables and claims of papers: for each the command that shows it, the paper's value and ours.

`papers.toml` has the rows and says what each field is. `python docs/papers.py` writes `docs/research/papers.md` from
them.
"""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from dure_studies.output import Columns, known, table_of

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class PaperRow:
    """A section, figure, table or claim. `papers.toml` says what each field is."""

    part: str
    claim: str
    command: str = ""
    result: str = ""
    difference: str = ""
    missing: str = ""
    minutes: float | None = None


@dataclass(frozen=True, kw_only=True)
class Paper:
    """A paper, by a short `name`."""

    name: str
    title: str
    rows: tuple[PaperRow, ...]


@cache
def papers() -> tuple[Paper, ...]:
    """All papers, with the rows of `papers.toml`."""
    text = files(__package__).joinpath("papers.toml").read_text(encoding="utf-8")
    return tuple(
        Paper(name=paper["name"], title=paper["title"], rows=tuple(PaperRow(**row) for row in paper["row"]))
        for paper in tomllib.loads(text)["paper"]
    )


def reproduce() -> dict[str, Any]:
    """The object of `dure reproduce --json` without a name: all rows, each with the name of its paper."""
    return {"rows": [{"paper": paper.name, **asdict(row)} for paper in papers() for row in paper.rows]}


def table(result: dict[str, Any]) -> Table:
    """A line for each row of `reproduce`."""
    columns: Columns = [
        ("paper", "{paper}"),
        ("part", "{part}"),
        ("command", "{command}"),
        ("minutes", known("minutes", "{:g}")),
        ("result", lambda row: row["result"] or f"not built: {row['missing']}"),
    ]
    caption = (
        "minutes on two virtual cores, where measured. The page docs/research/papers.md of the source distribution has "
        "the papers' values and the differences."
    )
    return table_of(result["rows"], columns, caption, texts=("paper", "part", "command", "result"), fold=True)
