"""Writes `reference.md`, from what the class of every member says of it: python docs/reference.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dure.cli.methods import members, values
from dure.run.strategy import AXES, JOINS

HERE = Path(__file__).parent

HEAD = """# Every member and its parameters

`python docs/reference.py` writes this page from the classes. `dure methods NAME` prints the same. Choose a member by
its name (`--sync bmuf:period=20`) or as an object (`sync=dure.BMUF(period=20)`; there, `lambda` is `lambda_`). A
parameter without a unit is a pure number, or not a number. A symbol is that of the paper, if the paper has one.
"""

COLUMNS = ("parameter", "default", "values", "unit", "symbol", "meaning")


def page() -> str:
    """The whole page."""
    rows = members()
    parts = [HEAD]
    for axis, question in {**AXES, **{join: f"joins a {what} by +" for join, what in JOINS.items()}}.items():
        parts.append(f"## {axis}: {question}\n")
        parts += [_member(row) for row in rows if row["axis"] == axis]
    return "\n".join(parts)


def _member(row: dict[str, Any]) -> str:
    lines = [f"### `{row['name']}`: `{row['class']}`\n", f"{row['summary']}.\n", f"- Paper: {row['paper']}"]
    if row["combines"]:
        how = {"sync": "Runs over", "codec": "Goes with"}.get(row["axis"], "Joins")
        lines.append(f"- {how}: {', '.join(f'`{each}`' for each in row['combines'])}")
    lines += [f"- Page: [{found.stem}]({found.relative_to(HERE)})" for found in HERE.glob(f"*/{row['name']}.md")]
    if row["parameters"]:
        lines += ["", _line(COLUMNS), _line("---" for _ in COLUMNS), *map(_parameter, row["parameters"])]
    return "\n".join([*lines, ""])


def _parameter(each: dict[str, Any]) -> str:
    cells = (f"`{each['name']}`", each["default"], values(each), each["unit"], each["symbol"], each["meaning"])
    return _line(cell.replace("|", "\\|").replace("_", "\\_") if "`" not in cell else cell for cell in cells)


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    (HERE / "reference.md").write_text(page(), encoding="utf-8")
