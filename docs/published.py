"""Writes the tables of `research/published.md`: dure reproduce published --json | python docs/published.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "research" / "published.md"

Row = dict[str, Any]


def scores(rows: Iterable[Row]) -> Iterable[str]:
    """The table of scores."""
    yield from _head("figures", "number", "predicted", "near", "median error", "Kendall's tau-b", "other")
    for row in rows:
        near = [f"{row['near']:.0%}", f"{row['median_error']:.1%}", f"{row['tau']:.2f}"] if "near" in row else [""] * 3
        kinds = {"inside": "inside a narrow interval", "right": "in the right order", "within": "within 15 %"}
        other = next((f"{row[key]:.0%} {words}" for key, words in kinds.items() if key in row), "")
        yield _line(row["of"], row["figures"], row["predicted"], *near, other)


def figures(rows: Iterable[Row]) -> Iterable[str]:
    """The table of figures of classes A and B."""
    yield from _head("row", "what", "figure", "class", "measured", "predicted", "interval", "error", "decides")
    before = None
    for row in rows:
        if row["class"] == "C":
            continue
        names = ("", "") if row["id"] == before else (row["id"], row["what"])
        before, measured = row["id"], f"{row['measured']:.3f}"
        if "predicted" not in row:
            yield _line(*names, row["figure"], row["class"], measured, "", "", "", row["missing"])
            continue
        interval = f"{row['low']:.3f} to {row['high']:.3f}"
        found = f"{row['predicted']:.3f}", interval, f"{row['error']:+.1%}", row["decides"]
        yield _line(*names, row["figure"], row["class"], measured, *found)


def orders(rows: Iterable[Row]) -> Iterable[str]:
    """The table of orders, of class C."""
    yield from _head("row", "what", "figure", "measured", "predicted", "order")
    before = None
    for row in rows:
        if row["class"] != "C":
            continue
        names = ("", "") if row["id"] == before else (row["id"], row["what"])
        before, measured = row["id"], "" if row["measured"] is None else f"{row['measured']:.3f}"
        order = f"{row['order']}: {'right' if row.get('right') else 'wrong'}"
        yield _line(*names, row["figure"], measured, f"{row['predicted']:.3f}" if "predicted" in row else "", order)


def missing(pieces: dict[str, str]) -> Iterable[str]:
    """The table of rows without a prediction."""
    yield from _head("rows", "the piece that they lack")
    together: dict[str, list[str]] = {}
    for row, piece in pieces.items():
        together.setdefault(piece, []).append(row)
    yield from (_line(", ".join(ids), piece) for piece, ids in together.items())


def _head(*names: str) -> tuple[str, str]:
    return _line(*names), _line(*("---" for _ in names))


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def put(page: str, name: str, lines: Iterable[str]) -> str:
    """`page` with other lines between the marks of a table."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, rest = page.split(begin)
    return "".join((before, begin, *(f"{line}\n" for line in lines), end, rest.split(end)[1]))


if __name__ == "__main__":
    given = json.load(sys.stdin)
    text = PAGE.read_text(encoding="utf-8")
    text = put(text, "scores", scores(given["scores"]))
    text = put(text, "figures", figures(given["rows"]))
    text = put(text, "orders", orders(given["rows"]))
    text = put(text, "missing", missing(given["missing"]))
    PAGE.write_text(text, encoding="utf-8")
