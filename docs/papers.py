"""Writes `research/papers.md`, from the rows of `studies/src/dure_studies/papers.toml`: python docs/papers.py."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from dure_studies.papers import Paper, PaperRow, papers

HERE = Path(__file__).parent

HEAD = """# Papers, row by row

`python docs/papers.py` writes this page from `studies/src/dure_studies/papers.toml`; `dure reproduce` prints the same
rows. `dure reproduce --all` runs the commands of all rows, two at a time, and writes one report of their output and
drawings (`papers.html`); `dure reproduce --all --quick` runs them in reduced forms, to show that they work.

Each row is a section, figure, table or claim of a paper, with the paper's statement, the command that shows it, and the
result here. Seconds to an accuracy, and those of virtual workers, are in
[virtual time](../explanations/virtual-time.md). "Missing" names the feature that a row still needs.
"""

COLUMNS = ("part", "the paper", "command", "here", "difference", "missing")


def page() -> str:
    """The whole page."""
    rows = [row for paper in papers() for row in paper.rows]
    whole = sum(not row.missing for row in rows)
    counted = f"{len(rows)} rows: {whole} complete, {len(rows) - whole} with something missing.\n"
    return "\n".join([HEAD, counted, *map(_paper, papers())])


def _paper(paper: Paper) -> str:
    lines = [f"## `{paper.name}`", "", f"{paper.title}.", "", _line(COLUMNS), _line("---" for _ in COLUMNS)]
    return "\n".join([*lines, *map(_row, paper.rows), ""])


def _row(row: PaperRow) -> str:
    command = f"`{row.command}`" if row.command else ""
    if row.minutes is not None:
        command += f", {row.minutes:g} min"
    return _line((row.part, row.claim, command, row.result, row.difference, row.missing))


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    (HERE / "research" / "papers.md").write_text(page(), encoding="utf-8")
