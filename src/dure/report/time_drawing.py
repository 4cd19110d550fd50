"""Drawings of a run over time, as text and as SVG: the computation, the messages and the waits of each node.

A computation has the number of the node's step and the version of the weights that it reads. Both forms show the same
cells, which come from the spans of a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

COMPUTE, COMMUNICATE, WAIT, APPLY = "compute", "communicate", "wait", "apply"
COLORS = {COMPUTE: "#9cc8f2", COMMUNICATE: "#f6cd83", WAIT: "#eceff2", APPLY: "#a6dba0"}
MEANINGS = {
    COMPUTE: "computes the gradient of step 3, after version 5 of the servers' weights",
    COMMUNICATE: "sends, receives, or is in a collective",
    WAIT: "waits",
    APPLY: "the server applies an update",
}
SIGNS = {COMPUTE: "=", COMMUNICATE: "~", WAIT: ".", APPLY: "+"}

ORDER, NARROW = "order", 3
"""A round of commands of a coordinator, which is drawn even if it takes no time that shows, and its least width."""

INK, FAINT, PAPER = "#16202c", "#5d6b7a", "#ffffff"
LEFT, TOP, HEIGHT, GAP, WIDTH, MARGIN = 96, 64, 34, 10, 1080, 18


@dataclass(frozen=True)
class Cell:
    """An activity of a node from `start` to `end`, in seconds.

    `step` and `version` are those of a computation, `message` that of a communication: "push", for example.
    """

    kind: str
    start: float
    end: float
    step: int | None = None
    version: str = ""
    aborted: bool = False
    message: str = ""

    @property
    def label(self) -> str:
        """The step, and the version of the weights if it is known."""
        number = "x" if self.aborted else "" if self.step is None else str(self.step)
        return f"{number}/{self.version}" if self.version else number


@dataclass(frozen=True)
class TimePicture:
    """The cells of each node over `seconds`. `about` says how the run was made.

    `servers` are those that workers exchange messages with, in words; empty without servers.
    """

    title: str
    about: str
    seconds: float
    rows: Mapping[str, Sequence[Cell]]
    servers: str = ""

    @property
    def communication(self) -> str:
        """The meaning of a communication."""
        return f"exchanges messages with {self.servers}" if self.servers else MEANINGS[COMMUNICATE]


# ---- text


def text(picture: TimePicture, width: int = 100) -> str:
    """A line for each node; a column is a share of the seconds.

    >>> cells = [Cell("compute", 0.0, 2.0, 1, "0"), Cell("wait", 2.0, 3.0)]
    >>> print(text(TimePicture("bsp", "", 4.0, {"worker 0": cells}), 28))
    worker 0 |1/0=====.....    |
    """
    head = max(map(len, picture.rows), default=0)
    columns = max(10, width - head - 3)
    lines = []
    for name, cells in picture.rows.items():
        line = [" "] * columns
        for cell in cells:
            start, stop = (round(columns * at / picture.seconds) for at in (cell.start, min(cell.end, picture.seconds)))
            stop = min(max(stop, start + 1), columns) if cell.message == ORDER else stop
            room = stop - start
            shown = cell.label if len(cell.label) < room else ""
            line[start:stop] = f"{shown}{SIGNS[cell.kind] * (room - len(shown))}"
        lines.append(f"{name:<{head}} |{''.join(line)}|")
    return "\n".join(lines)


# ---- SVG


def svg(picture: TimePicture) -> str:
    """The picture as SVG, with a legend and an axis of seconds."""
    bottom = TOP + len(picture.rows) * (HEIGHT + GAP)
    width, height = LEFT + WIDTH + MARGIN, bottom + 84
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'role="img" font-family="Helvetica, Arial, sans-serif">',
        f"<title>{escape(picture.title)}</title>",
        f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
        _words(MARGIN, 26, picture.title, size=17, weight="bold"),
        _words(MARGIN, 46, picture.about, size=12, color=FAINT),
    ]
    for number, (name, cells) in enumerate(picture.rows.items()):
        top = TOP + number * (HEIGHT + GAP)
        parts.append(_words(MARGIN, top + 21, name, weight="bold"))
        for cell in cells:
            parts += _drawn(cell, WIDTH / picture.seconds, top, picture)
    return "\n".join([*parts, *_axis(picture, bottom), *_legend(picture, bottom + 54), "</svg>\n"])


def _drawn(cell: Cell, scale: float, top: float, picture: TimePicture) -> Iterator[str]:
    left, width = LEFT + cell.start * scale, (min(cell.end, picture.seconds) - cell.start) * scale
    if cell.message == ORDER:
        width = max(width, NARROW)
    title = escape(_told(cell, picture.servers))
    yield (
        f'<g><title>{title}</title><rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{HEIGHT}" '
        f'fill="{COLORS[cell.kind]}" stroke="{PAPER}" stroke-width="0.5"/>'
    )
    number = cell.label.partition("/")[0]
    if number and width > 7 * len(number) + 2:
        yield _words(left + width / 2, top + 15, number, anchor="middle", weight="bold")
    if cell.version and width > 6 * len(cell.version) + 8:
        yield _words(left + width / 2, top + 28, f"w{cell.version}", anchor="middle", size=10)
    if cell.message and width > 6 * len(cell.message) + 4:
        yield _words(left + width / 2, top + 21, cell.message, anchor="middle", size=10)
    yield "</g>"


PREPOSITIONS = {"push": "to", "pull": "from", "fetch": "from"}
"""Of messages to the servers. Others have their receivers in the `about` of a picture."""


def _told(cell: Cell, servers: str) -> str:
    seconds = f"{cell.start:.4g} to {cell.end:.4g} s"
    step = "" if cell.step is None else f", step {cell.step}"
    version = f", version {cell.version} of the weights" if cell.version else ""
    there = f" {PREPOSITIONS[cell.message]} {servers}" if servers and cell.message in PREPOSITIONS else ""
    message = f", {cell.message}{there}" if cell.message else ""
    return f"{cell.kind}{' in vain' if cell.aborted else ''}{step}{version}{message}: {seconds}"


def _axis(picture: TimePicture, bottom: float) -> Iterator[str]:
    tick = _round(picture.seconds / 10)
    for number in range(int(picture.seconds / tick * (1 + 1e-9)) + 1):
        x = LEFT + WIDTH * number * tick / picture.seconds
        yield f'<line x1="{x:g}" y1="{TOP - 6}" x2="{x:g}" y2="{bottom}" stroke="#dfe4e9" stroke-dasharray="2 3"/>'
        shown = f"{1000 * number * tick:g}" if number else "0 ms"
        yield _words(x, bottom + 14, shown, size=10, color=FAINT, anchor="middle")


def _round(seconds: float) -> float:
    """The least of 1, 2 and 5 times a power of ten that is no less.

    >>> _round(0.0144)
    0.02
    """
    power = 10.0 ** math.floor(math.log10(seconds))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= seconds * (1 - 1e-9))


def _legend(picture: TimePicture, top: float) -> Iterator[str]:
    kinds = {cell.kind for cells in picture.rows.values() for cell in cells}
    versions = any(cell.version for cells in picture.rows.values() for cell in cells)
    x: float = MARGIN
    for kind in (each for each in MEANINGS if each in kinds):
        meaning = picture.communication if kind == COMMUNICATE else MEANINGS[kind]
        if kind == COMPUTE and not versions:
            meaning = "computes the gradient of step 3"
        sample = "3/w5" if versions else "3"
        yield f'<rect x="{x:g}" y="{top - 12:g}" width="30" height="15" fill="{COLORS[kind]}"/>'
        if kind == COMPUTE:
            yield _words(x + 15, top - 1, sample, size=9, anchor="middle")
        yield _words(x + 36, top, meaning, size=12)
        x += 56 + 6.2 * len(meaning)


def _words(
    x: float, y: float, words: str, *, size: float = 13, color: str = INK, weight: str = "normal", anchor: str = "start"
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{color}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(words)}</text>'
    )
