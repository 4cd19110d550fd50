"""Reads the curves of a figure back from the SVG of matplotlib, by the numbers at its ticks."""

from __future__ import annotations

import math
import re
from collections import Counter

FACTORS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
TEXT = re.compile(r'text-anchor: (middle|end)[^"]*" x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)</text>')
PATH = re.compile(
    r'<path d="([^"]*)" clip-path="[^"]*" style="fill: none; '
    r"(?:stroke-dasharray: [^;]*; )?(?:stroke-dashoffset: [^;]*; )?stroke: (#\w+)"
)


def value(text: str) -> float | None:
    """The number of a tick: "5", "1,200", "20k"."""
    found = re.fullmatch(r"([\d.,]+)([kMG]?)", text)
    return float(found[1].replace(",", "")) * FACTORS[found[2]] if found else None


def scale(ticks: list[tuple[float, float]], *, log: bool):
    """From a place in pixels to a value, by the first and the last tick; the ticks between are where they belong."""
    (low, first), (high, last) = ticks[0], ticks[-1]
    into, back = (math.log, math.exp) if log else (lambda number: number, lambda number: number)

    def at(place: float) -> float:
        return back(into(first) + (place - low) * (into(last) - into(first)) / (high - low))

    for place, number in ticks:
        assert math.isclose(at(place), number, rel_tol=0.05), (ticks, number)
    return at


def axes_of(svg: str, *, log_x: bool = True, log_y: bool = True):
    """The two scales of a figure."""
    texts = [(anchor, float(x), float(y), value(words)) for anchor, x, y, words in TEXT.findall(svg)]
    below = Counter(y for anchor, _, y, number in texts if anchor == "middle" and number is not None)
    (row, _), *_ = below.most_common(1)
    x_ticks = [(x, number) for anchor, x, y, number in texts if anchor == "middle" and y == row and number is not None]
    # the baseline of a label is 3.8 pixels below its tick
    y_ticks = [(y - 3.8, number) for anchor, _, y, number in texts if anchor == "end" and number is not None]
    return scale(x_ticks, log=log_x), scale(y_ticks, log=log_y)


def curves_in(svg: str, **scales: bool) -> dict[str, list[list[tuple[float, float]]]]:
    """The points of each color, one list for each line without a gap."""
    x, y = axes_of(svg, **scales)
    found: dict[str, list[list[tuple[float, float]]]] = {}
    for path, color in PATH.findall(svg):
        parts = [re.findall(r"([\d.]+) ([\d.]+)", part) for part in path.split("M") if part.strip()]
        found.setdefault(color, []).extend([[(x(float(a)), y(float(b))) for a, b in part] for part in parts])
    return found
