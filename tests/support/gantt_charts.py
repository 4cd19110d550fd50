"""Reads a picture of activities over time back from its SVG: by the numbers of its axis, and its legend."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple
from xml.etree import ElementTree

NAMES = {"svg": "http://www.w3.org/2000/svg"}
SECONDS = {"ticks": 1.0, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


class Drawn(NamedTuple):
    """A bar as it is drawn: its time in ticks or seconds, its color, its texts, and its words at the pointer."""

    start: float
    end: float
    color: str
    texts: tuple[str, ...]
    about: str


@dataclass
class Picture:
    """The facts of a picture: the unit of its axis, the bars and the marks of each row, the legend by colors."""

    unit: str
    numbers: list[float]
    rows: dict[str, list[Drawn]]
    marks: dict[str, list[float]]
    legend: dict[str, str]
    words: list[str]


def picture_in(text: str) -> Picture:
    """The picture in an SVG, or in the first SVG with a row in a page."""
    tree = ElementTree.fromstring(text[text.index("<svg") : text.rindex("</svg>") + 6])
    texts = [(float(t.get("x")), float(t.get("y")), t) for t in tree.findall("svg:text", NAMES)]
    (unit,) = [t for _, _, t in texts if t.get("text-anchor") == "end"]
    axis = [(x, float(t.text)) for x, y, t in texts if y == float(unit.get("y")) and t is not unit]
    (left, first), (right, last) = axis[0], axis[-1]

    def time(x: float) -> float:
        return (first + (x - left) * (last - first) / (right - left)) * SECONDS[unit.text]

    heads = [(y, t.text) for _, y, t in texts if t.get("font-weight") == "bold" and t.get("font-size") == "13"]
    borders = [*(y - 21 for y, _ in heads), float(unit.get("y")) - 14]
    rows, marks = ({name: [] for _, name in heads} for _ in range(2))
    spans = list(zip(heads, pairwise(borders), strict=True))

    def name_at(y: float) -> str:
        return next(name for (_, name), (top, bottom) in spans if top <= y < bottom)

    for each in tree.findall("svg:g", NAMES):
        box = each.find("svg:rect", NAMES)
        x, y, width = (float(box.get(key)) for key in ("x", "y", "width"))
        words = tuple(word.text for word in each.findall("svg:text", NAMES))
        about = each.find("svg:title", NAMES).text or ""
        rows[name_at(y)].append(Drawn(time(x), time(x + width), box.get("fill"), words, about))
    for each in tree.findall("svg:path", NAMES):
        x, y = map(float, each.get("d")[1:].split("V")[0].split())
        if y < borders[-1] - 5:
            marks[name_at(y + 1)].append(time(x))
    below = [(y, t.text) for _, y, t in texts if y > float(unit.get("y")) + 5]
    swatches = [r for r in tree.findall("svg:rect", NAMES) if float(r.get("y", 0)) > float(unit.get("y"))]
    legend = {}
    for swatch in swatches:
        x, y = float(swatch.get("x")) + float(swatch.get("width")) + 6, float(swatch.get("y")) + 11
        legend[swatch.get("fill")] = next(t.text for tx, ty, t in texts if abs(tx - x) < 0.1 and abs(ty - y) < 0.1)
    return Picture(unit.text, [number for _, number in axis], rows, marks, legend, [words for _, words in below])
