"""Draws activities over time as SVG and as text: a row for each node, a bar for each activity.

The timetables of pipelines, in ticks, and the spans of methods, traces and plans, in seconds, are drawn here with one
axis, one legend, and one rule for the texts that fit into a bar.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import zip_longest
from typing import Literal, NamedTuple

INK, FAINT, PAPER, GROUND, LINE = "#16202c", "#5d6b7a", "#ffffff", "#eceff2", "#dfe4e9"
HEIGHT, GAP, MARGIN, COLUMN = 34, 10, 18, 70
FULL, WIDEST = 1080, 38
"""Width of all seconds in pixels, and the most of a tick."""

LEAST = 3
"""Width of a bar that is `always` drawn, at least."""

SIZES, SMALLEST = (13, 10), 6.5
"""Font sizes of the first and of the second line of a bar, and the smallest before a line is left out."""

LONGEST = 26
"""Letters of the name of a row."""

UNITS = ((7200.0, 3600.0, "h"), (300.0, 60.0, "min"), (1.0, 1.0, "s"), (0.0, 1e-3, "ms"))
"""Units of time: the least seconds that an axis shows in it, its seconds, and its name."""

WIDTHS = {"B": 0.69, "F": 0.58, "I": 0.3, "W": 0.99, "w": 0.82, ".": 0.32, "'": 0.28, "+": 0.84}
"""Widths of characters in DejaVu Sans of size 1, a wide font; Helvetica and Arial are narrower."""

DIGIT = 0.64


def text_width(text: str) -> float:
    """The width of the text of an activity in a picture, in DejaVu Sans of size 1.

    >>> round(text_width("W10"), 2)
    2.27
    """
    return sum(WIDTHS.get(character, DIGIT) for character in text)


class BarKind(NamedTuple):
    """A kind of activity: its color, and its meaning in the legend.

    `sample` is an example of its text in the legend. `sign` fills its columns in the text form.
    """

    color: str
    meaning: str
    sample: str = ""
    sign: str = "="


@dataclass(frozen=True, slots=True)
class Bar:
    """An activity from `start` to `end`, in the unit of its chart.

    The picture shows those of `lines` that fit into the bar, and `about` at the pointer; the text form shows `label`.
    Bars of one kind are darker with a larger `shade`. A bar of a lane lies in that part of the row's height. A bar that
    is `always` drawn has a width even if it takes no time.
    """

    kind: str
    start: float
    end: float
    lines: tuple[str, ...] = ()
    about: str = ""
    label: str = ""
    shade: int = 0
    lane: int = 0
    always: bool = False


@dataclass(frozen=True, slots=True)
class BarRow:
    """The bars of a node; `marks` are moments, and `figures` stand behind the row in the columns of the chart."""

    bars: Sequence[Bar]
    note: str = ""
    marks: Sequence[float] = ()
    figures: Sequence[str] = ()


@dataclass(frozen=True)
class Gantt:
    """Rows by their names, over `end` ticks or seconds. The legend has the kinds that bars have.

    `idle` and `mark` are the meanings of the ground of rows and of their marks; the legend leaves out an empty one.
    `notes` are sentences below the legend.
    """

    title: str
    about: str
    rows: Mapping[str, BarRow]
    end: float
    kinds: Mapping[str, BarKind]
    unit: Literal["tick", "s"] = "s"
    columns: Sequence[str] = ()
    idle: str = ""
    mark: str = ""
    notes: Sequence[str] = ()

    @cached_property
    def bars(self) -> list[Bar]:
        """The bars of all rows."""
        return [bar for row in self.rows.values() for bar in row.bars]

    @cached_property
    def lanes(self) -> int:
        """The number of parts of a row's height."""
        return 1 + max((bar.lane for bar in self.bars), default=0)

    @cached_property
    def widest(self) -> Sequence[float]:
        """The widths of the widest first line and of the widest second line of all bars, for bars of one tick."""
        lines = zip_longest(*(bar.lines for bar in self.bars), fillvalue="")
        return [max(map(text_width, texts)) for texts in lines]

    @cached_property
    def _darkest(self) -> int:
        return max((bar.shade for bar in self.bars), default=0)

    def color(self, bar: Bar) -> str:
        """The color of a bar: that of its kind, darker for a larger shade."""
        light = 0.74 ** (bar.shade / max(1, self._darkest))
        parts = (int(self.kinds[bar.kind].color[place : place + 2], 16) for place in (1, 3, 5))
        return "#" + "".join(f"{round(part * light):02x}" for part in parts)


# ---- text


def text(chart: Gantt, width: int = 100) -> str:
    """A line of at most `width` characters for each row.

    A tick has columns of its own, and more ticks than fit are folded. Seconds are divided by the columns.

    >>> kinds = {"compute": BarKind("#9cc8f2", "computes"), "wait": BarKind("#eceff2", "waits", sign=".")}
    >>> bars = [Bar("compute", 0.0, 2.0, label="1/0"), Bar("wait", 2.0, 3.0)]
    >>> print(text(Gantt("bsp", "", {"worker 0": BarRow(bars)}, 4.0, kinds), 28))
    worker 0 |1/0=====.....    |
    """
    head = max(map(len, chart.rows), default=0)
    heads = [f"{name:<{head}} |" for name in chart.rows]
    rows = list(chart.rows.values())
    if chart.unit == "s":
        columns = max(10, width - head - 3)
        return "\n".join(f"{name}{_shares(chart, row, columns)}|" for name, row in zip(heads, rows, strict=True))
    size = 1 + max(len(bar.label) for bar in chart.bars)
    fits = max(1, (width - head - 2) // size)
    cells = [_cells(chart, row) for row in rows]
    parts = [
        "\n".join(
            name + "".join(f"{cell:>{size}}" for cell in line[start : start + fits])
            for name, line in zip(heads, cells, strict=True)
        )
        for start in range(0, int(chart.end), fits)
    ]
    return "\n\n".join(parts)


def _cells(chart: Gantt, row: BarRow) -> list[str]:
    """The text of each tick: that of its bar, or a dot."""
    cells = ["."] * int(chart.end)
    for bar in row.bars:
        cells[int(bar.start)] = bar.label
    return cells


def _shares(chart: Gantt, row: BarRow, columns: int) -> str:
    """The signs of bars in as many columns as they take of the seconds, with the labels that fit."""
    line = [" "] * columns
    for bar in row.bars:
        start, stop = (round(columns * at / chart.end) for at in (bar.start, min(bar.end, chart.end)))
        stop = min(max(stop, start + 1), columns) if bar.always else stop
        room = stop - start
        shown = bar.label if len(bar.label) < room else ""
        line[start:stop] = f"{shown}{chart.kinds[bar.kind].sign * (room - len(shown))}"
    return "".join(line)


# ---- SVG


class _Frame(NamedTuple):
    """The places of a picture, in pixels; `scale` is the width of a unit of its time."""

    left: float
    top: float
    right: float
    bottom: float
    scale: float

    @classmethod
    def of(cls, chart: Gantt) -> _Frame:
        letters = max((len(text) for name, row in chart.rows.items() for text in (name, row.note)), default=0)
        left = MARGIN + 8 * min(max(letters, 10), LONGEST)
        top = 14 + 30 * bool(chart.title) + 16 * bool(chart.about) + 10 * bool(chart.columns)
        scale = FULL / chart.end
        if chart.unit == "tick":
            scale = min(WIDEST, max(8 * max(chart.widest), scale))
        return cls(left, top, left + chart.end * scale, top + len(chart.rows) * (HEIGHT + GAP), scale)

    def x(self, at: float) -> float:
        return self.left + at * self.scale


def svg(chart: Gantt) -> str:
    """The chart as SVG with a legend and an axis in the unit of its time."""
    frame = _Frame.of(chart)
    width = max(frame.right + len(chart.columns) * COLUMN + MARGIN, 860)
    legend = list(_legend(chart, frame.bottom + 46, width))
    notes = frame.bottom + 68 + 20 * max((line for line, _ in legend), default=0)
    height = notes + 17 * len(chart.notes) - 4
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" role="img" font-family="Helvetica, Arial, sans-serif">',
        f"<title>{escape(chart.title)}</title>",
        f'<rect width="{width:g}" height="{height:g}" fill="{PAPER}"/>',
        _words(MARGIN, 28, chart.title, size=17, weight="bold") if chart.title else "",
        _words(MARGIN, 48, chart.about, size=12, color=FAINT) if chart.about else "",
        *_headings(chart, frame),
        *_axis(chart, frame),
    ]
    for number, (name, row) in enumerate(chart.rows.items()):
        parts += _row(chart, name, row, frame, frame.top + number * (HEIGHT + GAP))
    parts += [part for _, part in legend]
    parts += [_words(MARGIN, notes + 17 * line, note, size=11, color=FAINT) for line, note in enumerate(chart.notes)]
    return "\n".join([*filter(None, parts), "</svg>\n"])


def _headings(chart: Gantt, frame: _Frame) -> Iterator[str]:
    for column, heading in enumerate(chart.columns):
        x = frame.right + (column + 0.6) * COLUMN
        yield _words(x, frame.top - 12, heading, size=11, color=FAINT, anchor="middle")


def _axis(chart: Gantt, frame: _Frame) -> Iterator[str]:
    """Lines at round times, and their numbers below the rows."""
    seconds, unit = 1.0, "ticks"
    if chart.unit == "s":
        _, seconds, unit = next(each for each in UNITS if chart.end >= each[0])
    yield _words(frame.left - 10, frame.bottom + 14, unit, size=10, color=FAINT, anchor="end")
    step = _round(chart.end / seconds / 10)
    for number in range(int(chart.end / seconds / step * (1 + 1e-9)) + 1):
        x = frame.x(number * step * seconds)
        yield f'<line x1="{x:g}" y1="{frame.top - 6:g}" x2="{x:g}" y2="{frame.bottom:g}" stroke="{LINE}"/>'
        yield _words(x, frame.bottom + 14, f"{number * step:g}", size=10, color=FAINT, anchor="middle")


def _round(amount: float) -> float:
    """The least of 1, 2 and 5 times a power of ten that is no less.

    >>> _round(0.0144)
    0.02
    """
    power = 10.0 ** math.floor(math.log10(amount))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= amount * (1 - 1e-9))


def _row(chart: Gantt, name: str, row: BarRow, frame: _Frame, top: float) -> Iterator[str]:
    """The name of a row, its ground, the bars over it, its marks and its figures."""
    shown = name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}\N{HORIZONTAL ELLIPSIS}"
    yield _words(MARGIN, top + (15 if row.note else 21), shown, weight="bold")
    if row.note:
        yield _words(MARGIN, top + 29, row.note, size=10, color=FAINT)
    if chart.idle:
        length = chart.end * frame.scale
        yield f'<rect x="{frame.left:g}" y="{top:g}" width="{length:g}" height="{HEIGHT}" fill="{GROUND}"/>'
    height = HEIGHT / chart.lanes
    for bar in row.bars:
        yield from _bar(chart, bar, frame, top + height * bar.lane, height)
    for at in row.marks:
        yield _mark(frame.x(at), top, HEIGHT)
    for column, figure in enumerate(row.figures):
        yield _words(frame.right + (column + 0.6) * COLUMN, top + 22, figure, anchor="middle")


def _bar(chart: Gantt, bar: Bar, frame: _Frame, top: float, height: float) -> Iterator[str]:
    """A bar, and each of its lines that fits, no larger than the bar is wide. Lines of ticks are all of one size."""
    left = frame.x(bar.start)
    width = max(frame.x(min(bar.end, chart.end)) - left, LEAST if bar.always else 0)
    yield (
        f'<g><title>{escape(bar.about)}</title><rect x="{left:.6g}" y="{top:g}" width="{width:.6g}" '
        f'height="{height:g}" fill="{chart.color(bar)}" stroke="{PAPER}" stroke-width="{min(1, width / 4):.2g}"/>'
    )
    lines = [line for line in bar.lines if line]
    widths = chart.widest if chart.unit == "tick" else list(map(text_width, lines))
    for number, (line, wide, largest) in enumerate(zip(lines, widths, SIZES, strict=False), start=1):
        size = min(largest, 0.6 * height, 0.88 * width / wide)
        if size >= SMALLEST:
            y = top + height * number / (len(lines) + 1) + 0.35 * size
            yield _words(left + width / 2, y, line, anchor="middle", size=math.floor(10 * size) / 10)
    yield "</g>"


def _mark(x: float, top: float, height: float) -> str:
    """A moment: a line over the height of a row, and a triangle above."""
    path = f"M{x:g} {top - 1:g}V{top + height:g}M{x - 4:g} {top - 6:g}h8l-4 6z"
    return f'<path d="{path}" fill="{INK}" stroke="{INK}" stroke-width="1.5"/>'


def _legend(chart: Gantt, top: float, width: float) -> Iterator[tuple[int, str]]:
    """The kinds of the bars, the ground and the marks, each with its line of the legend."""
    used = {bar.kind for bar in chart.bars}
    entries = [kind for name, kind in chart.kinds.items() if name in used]
    entries += [BarKind(GROUND, chart.idle)] if chart.idle else []
    entries += [BarKind("", chart.mark)] if chart.mark else []
    x, line = float(MARGIN), 0
    for kind in entries:
        swatch = 32 if kind.sample else 16
        length = swatch + 30 + 6.6 * len(kind.meaning)
        if x > MARGIN and x + length > width:
            x, line = float(MARGIN), line + 1
        y = top + 20 * line
        if kind.color:
            yield line, f'<rect x="{x:g}" y="{y - 11:g}" width="{swatch}" height="14" fill="{kind.color}"/>'
        else:
            yield line, _mark(x + 8, y - 8, 11)
        if kind.sample:
            yield line, _words(x + swatch / 2, y, kind.sample, size=9, anchor="middle")
        yield line, _words(x + swatch + 6, y, kind.meaning, size=12)
        x += length


def _words(
    x: float, y: float, words: str, *, size: float = 13, color: str = INK, anchor: str = "start", weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:.6g}" y="{y:.6g}" font-size="{size:g}" fill="{color}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(words)}</text>'
    )
