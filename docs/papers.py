"""Writes `research/papers.md`, from the rows of `studies/src/dure_studies/papers.toml`: python docs/papers.py."""

from __future__ import annotations

import shlex
from pathlib import Path
from textwrap import wrap

from dure_studies.papers import Paper, PaperRow, papers

HERE = Path(__file__).parent
APART = {"published": "published.md"}
"""Studies whose page is not among the others."""

GLUE = "\0-\0"
"""A minus that stays in the middle of a line."""

HEAD = """# Papers, row by row

This page is for readers of a paper: each row is a section, a figure, a table or a claim, with the paper's statement,
the command that shows it, and the result here.

`python docs/papers.py` writes this page from `studies/src/dure_studies/papers.toml`; `dure reproduce` prints the same
rows. Minutes are those on two virtual cores. Seconds to an accuracy, and those of virtual workers, are in
[virtual time](../explanations/virtual-time.md). "Missing" names the feature that a row still needs.
"""


def page() -> str:
    """The whole page."""
    rows = [row for paper in papers() for row in paper.rows]
    whole = sum(not row.missing for row in rows)
    counted = f"{len(rows)} rows: {whole} complete, {len(rows) - whole} with something missing.\n"
    return "\n".join([HEAD, counted, *map(_paper, papers())])


def _paper(paper: Paper) -> str:
    return "\n".join([f"## `{paper.name}`", "", *_lines(f"{paper.title}."), "", *map(_row, paper.rows)])


def _row(row: PaperRow) -> str:
    """The statement, and below it a list: command and result, difference, missing."""
    items = []
    if row.command:
        minutes = "" if row.minutes is None else f" ({row.minutes:g} minutes)"
        items.append(f"- {_linked(row.command)}{minutes}: {row.result}")
    others = {"Difference": row.difference, "Missing": row.missing}
    items += [f"- *{name}:* {text}" for name, text in others.items() if text]
    listed = [line for item in items for line in _lines(item)]
    return "\n".join([*_lines(f"**{row.part}.** {row.claim}"), "", *listed, ""])


def _linked(command: str) -> str:
    """The command as code, with a link to the page of its study."""
    words = shlex.split(command.removeprefix("sudo "))
    if words[:2] != ["dure", "reproduce"]:
        return f"`{command}`"
    return f"[`{command}`]({APART.get(words[2], f'studies/{words[2]}.md')})"


def _lines(text: str) -> list[str]:
    """The text in lines, of which none but the first begins with the mark of a list."""
    indent = "  " if text.startswith("- ") else ""
    glued = text[:2] + text[2:].replace(" - ", GLUE).replace(" + ", GLUE.replace("-", "+"))
    lines = wrap(glued, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


if __name__ == "__main__":
    (HERE / "research" / "papers.md").write_text(page(), encoding="utf-8")
