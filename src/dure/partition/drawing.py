"""Pictures of pipelines: the actions of each worker over time, as text and as SVG.

Both are in the notation of the papers. Stages and micro-batches count from 1, and micro-batches count on over the
mini-batches. F3 is the forward of micro-batch 3, and F3' that of the worker's second chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING

from dure.core.text_width import text_width
from dure.errors import UsageError
from dure.partition.programmed import Programmed
from dure.partition.ticks import Orders, Timed, Timetable, schedule
from dure.partition.versions import Read, WeightsRead, weights_read

if TYPE_CHECKING:
    from dure.partition.action import Action
    from dure.partition.pipeline import Pipeline

COLORS = {"F": "#9cc8f2", "B": "#a6dba0", "I": "#8ad6ce", "W": "#f6cd83"}
"""The color of an action of the first chunk, by its kind."""

NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward: gradient of the inputs",
    "W": "backward: gradient of the weights",
}
INK, FAINT, PAPER, BUBBLE = "#16202c", "#5d6b7a", "#ffffff", "#eceff2"
CELL_HEIGHT, ROW_GAP, LEFT, TOP, MARGIN = 34, 10, 118, 70, 18
NARROW, WIDE, FULL = 24, 38, 1180
"""Widths of a tick in pixels, at least and at most, and of all ticks where they are between."""

COLUMNS = ("idle", "in flight", "versions", "staleness")
COLUMN_WIDTH = 70


@dataclass(frozen=True)
class Picture:
    """A pipeline over the mini-batches `batches`, one tick for each action; `title` names it."""

    pipeline: Pipeline
    title: str
    batches: range

    @classmethod
    def of(cls, pipeline: Pipeline, title: str) -> Picture:
        """A picture of enough mini-batches: two with a flush, else as many as show the steady state.

        Raises `UsageError` for a method that is a program, not an order of actions.
        """
        if isinstance(pipeline, Programmed):
            raise UsageError(
                f"{title} has no order of actions to draw: it is a program on the stages. "
                "Record a run of it by dure train --trace, and open trace.json in Perfetto."
            )
        return cls(pipeline, title, range(2 if pipeline.flushes else 2 * pipeline.stages + 4))

    @cached_property
    def timetable(self) -> Timetable:
        """The actions of all workers over time."""
        return schedule(Orders.of(self.pipeline, self.batches))

    @cached_property
    def weights(self) -> Sequence[WeightsRead]:
        """The weights that each worker reads."""
        return [weights_read(self.pipeline, rank, row) for rank, row in enumerate(self.timetable.workers)]

    def staleness(self, rank: int) -> int:
        """The largest staleness of a worker."""
        return max(self.weights[rank].staleness.values())

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a worker, from 1."""
        return [1 + self.pipeline.stage_of(rank, chunk) for chunk in range(self.pipeline.chunks)]

    def label(self, action: Action) -> str:
        """An action in the notation of the papers."""
        return f"{action.kind}{self.number(action)}{chr(39) * action.chunk}"

    def number(self, action: Action) -> int:
        """The number of a micro-batch over all mini-batches, from 1."""
        return (action.batch - self.batches.start) * self.pipeline.micro_batches + action.micro + 1

    @property
    def counted(self) -> str:
        """The samples of an action: a micro-batch, or the whole mini-batch where it is not divided."""
        return "mini-batch" if self.pipeline.micro_batches == 1 else "micro-batch"

    @property
    def bubble(self) -> str:
        """The size of the pipeline, the time and the bubble."""
        table, pipeline = self.timetable, self.pipeline
        symbols = {"K": pipeline.stages, "v": pipeline.chunks, "U": pipeline.micro_batches}
        shown = [f"{symbol} = {count}" for symbol, count in symbols.items() if symbol == "K" or count > 1]
        shown.append(f"{len(self.batches)} mini-batches")
        steady = "" if pipeline.flushes else f", {table.steady_bubble:.1%} in the steady state"
        return f"{', '.join(shown)}: {table.makespan:g} ticks, {table.bubble:.1%} of the time idle{steady}"


# ---- text


def text(picture: Picture, width: int = 100) -> str:
    """The timetable of a picture as text, in parts of at most `width` characters in a line.

    A dot is an idle tick.
    """
    rows = [list(_cells(picture, rank)) for rank in range(picture.pipeline.stages)]
    size = 1 + max(len(cell) for row in rows for cell in row)
    digits = len(str(len(rows)))
    heads = [f"k={rank + 1:<{digits}} |" for rank in range(len(rows))]
    fits = max(1, (width - len(heads[-1])) // size)
    ticks = len(rows[0])
    parts = [
        "\n".join(
            head + "".join(f"{cell:>{size}}" for cell in row[start : start + fits])
            for head, row in zip(heads, rows, strict=True)
        )
        for start in range(0, ticks, fits)
    ]
    return "\n\n".join(parts)


def _cells(picture: Picture, rank: int) -> Iterator[str]:
    """The text of each tick of a worker."""
    cells = ["."] * int(picture.timetable.makespan)
    for each in picture.timetable.workers[rank]:
        if each.action.kind != "U":
            cells[int(each.start)] = picture.label(each.action)
    yield from cells


# ---- SVG


def svg(picture: Picture) -> str:
    """A picture as SVG: each action with its number and the weights it reads, the updates, the bubbles, a legend."""
    tick = _tick(picture)
    stages, ticks = picture.pipeline.stages, picture.timetable.makespan
    right = LEFT + ticks * tick
    width = max(right + len(COLUMNS) * COLUMN_WIDTH + MARGIN, 860)
    bottom = TOP + stages * (CELL_HEIGHT + ROW_GAP)
    height = bottom + 118
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height}" '
        f'viewBox="0 0 {width:g} {height}" role="img" font-family="Helvetica, Arial, sans-serif">',
        f"<title>{escape(picture.title)}</title>",
        '<defs><pattern id="bubble" width="7" height="7" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="7" height="7" fill="{BUBBLE}"/>'
        '<line x1="0" y1="0" x2="0" y2="7" stroke="#cfd6dd" stroke-width="2"/></pattern></defs>',
        f'<rect width="{width:g}" height="{height}" fill="{PAPER}"/>',
        _words(MARGIN, 28, picture.title, size=17, weight="bold"),
        _words(MARGIN, 48, picture.bubble, size=12, color=FAINT),
        *_axis(ticks, tick, bottom),
        *_headings(right),
    ]
    for rank in range(stages):
        parts += _row(picture, rank, tick, TOP + rank * (CELL_HEIGHT + ROW_GAP))
    return "\n".join([*parts, *_legend(picture, bottom + 44), "</svg>\n"])


def _tick(picture: Picture) -> float:
    """The width of a tick, so that its texts fit."""
    texts = [str(read) for worker in picture.weights for read in worker.reads]
    narrowest = max(NARROW, 7 * max(map(len, texts)))
    return min(WIDE, max(narrowest, FULL // picture.timetable.makespan))


def _row(picture: Picture, rank: int, tick: float, top: float) -> Iterator[str]:
    """The row of a worker: its name, the bubble, the actions over it, its figures."""
    table = picture.timetable
    yield _words(MARGIN, top + 15, f"k = {rank + 1}", weight="bold")
    yield _words(MARGIN, top + 29, _held(picture.stages_of(rank), rank), size=10, color=FAINT)
    yield f'<rect x="{LEFT}" y="{top:g}" width="{table.makespan * tick:g}" height="{CELL_HEIGHT}" fill="url(#bubble)"/>'
    row = table.workers[rank]
    for each, read in zip(row, picture.weights[rank].reads, strict=True):
        if read is not None:
            yield from _cell(picture, each, read, tick, top)
    for each in row:
        if each.action.kind == "U":
            yield _update(LEFT + each.end * tick, top)
    kept = table.most_sets(rank), picture.weights[rank].most_versions, picture.staleness(rank)
    figures = f"{table.idle(rank) / table.makespan:.0%}", *map(str, kept)
    for column, figure in enumerate(figures):
        yield _words(LEFT + table.makespan * tick + (column + 0.6) * COLUMN_WIDTH, top + 22, figure, anchor="middle")


def _held(stages: Sequence[int], rank: int) -> str:
    """The name of a worker, or its stages if it holds several."""
    if len(stages) == 1:
        return f"worker {rank}"
    shown = list(map(str, stages))
    return f"stages {', '.join(shown if len(shown) <= 4 else [*shown[:2], '...', shown[-1]])}"


def _cell(picture: Picture, each: Timed, read: Read, tick: float, top: float) -> Iterator[str]:
    """An action: the number of its micro-batch, and the weights that it reads below."""
    action = each.action
    left, width = LEFT + each.start * tick, (each.end - each.start) * tick
    chunk = f", chunk {action.chunk + 1}" if picture.pipeline.chunks > 1 else ""
    about = f"{NAMES[action.kind]} of {picture.counted} {picture.number(action)}{chunk}, reads {read}"
    yield (
        f'<g><title>{about}</title><rect x="{left:g}" y="{top:g}" width="{width:g}" height="{CELL_HEIGHT}" '
        f'fill="{_color(action, picture.pipeline.chunks)}" stroke="{PAPER}"/>'
    )
    yield _words(left + width / 2, top + 16, picture.label(action), anchor="middle", size=_size(picture, tick))
    yield _words(left + width / 2, top + 28, str(read), anchor="middle", size=9)
    yield "</g>"


def _size(picture: Picture, tick: float) -> float:
    """The size of labels, so that the widest fits into a tick."""
    widest = max(text_width(picture.label(each.action)) for row in picture.timetable.workers for each in row)
    return min(13, 0.88 * tick / widest)


def _color(action: Action, chunks: int) -> str:
    """The color of an action, darker for each later one of the worker's chunks."""
    light = 0.74 ** (action.chunk / max(1, chunks - 1))
    parts = (int(COLORS[action.kind][place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(part * light):02x}" for part in parts)


def _update(x: float, top: float) -> str:
    """The mark of an update: a line behind the last action, and a triangle above."""
    return (
        f'<path d="M{x:g} {top - 1:g}V{top + CELL_HEIGHT:g}M{x - 4:g} {top - 6:g}h8l-4 6z" fill="{INK}" '
        f'stroke="{INK}" stroke-width="1.5"/>'
    )


def _axis(ticks: float, tick: float, bottom: float) -> Iterator[str]:
    """The numbers of ticks below the rows."""
    for number in range(0, int(ticks) + 1, 5 if ticks <= 60 else 10):
        x = LEFT + number * tick
        yield f'<line x1="{x:g}" y1="{TOP - 6}" x2="{x:g}" y2="{bottom:g}" stroke="#dfe4e9"/>'
        yield _words(x, bottom + 14, str(number), size=10, color=FAINT, anchor="middle")


def _headings(right: float) -> Iterator[str]:
    for column, heading in enumerate(COLUMNS):
        yield _words(right + (column + 0.6) * COLUMN_WIDTH, TOP - 12, heading, size=11, color=FAINT, anchor="middle")


def _legend(picture: Picture, top: float) -> Iterator[str]:
    """The kinds of actions that the picture has, and how to read it."""
    kinds = {each.action.kind for row in picture.timetable.workers for each in row}
    x: float = MARGIN
    swatches = [(COLORS[kind], NAMES[kind]) for kind in "FBIW" if kind in kinds] + [("url(#bubble)", "idle (bubble)")]
    for color, name in swatches:
        yield f'<rect x="{x:g}" y="{top - 11:g}" width="16" height="14" fill="{color}"/>'
        yield _words(x + 22, top, name, size=12)
        x += 40 + 6.4 * len(name)
    yield _update(x + 6, top - 8).replace(f"V{top - 8 + CELL_HEIGHT:g}", f"V{top + 3:g}")
    yield _words(x + 18, top, "update of the weights", size=12)
    for number, sentence in enumerate(_explained(picture)):
        yield _words(MARGIN, top + 24 + 17 * number, sentence, size=11, color=FAINT)


def _explained(picture: Picture) -> Sequence[str]:
    counted, micro = picture.counted, picture.pipeline.micro_batches
    over = f", counted on over mini-batches of {micro}" if micro > 1 else ""
    primes = "; F3' (darker): through the worker's next chunk" if picture.pipeline.chunks > 1 else ""
    predicted = any(read and read.ahead for worker in picture.weights for read in worker.reads)
    ahead = "; w3+2: a prediction of them 2 updates ahead" if predicted else ""
    versions = picture.pipeline.versions
    weights = (
        f"v3 w1: version 3 of the {versions} of the model, after 1 update of it"
        if versions > 1
        else f"w3: the weights after 3 updates of the worker{ahead}"
    )
    again = " A backward computes its forward again." if picture.pipeline.remat else ""
    return (
        f"F3: forward of {counted} 3{over}{primes}. {weights}.{again}",
        f"idle: share of the time. in flight: the most {counted}es between forward and backward. versions: the most "
        "weights kept. staleness: the most updates between the weights of a forward and its update.",
    )


def _words(
    x: float,
    y: float,
    words: str,
    *,
    size: float = 13,
    color: str = INK,
    anchor: str = "start",
    weight: str = "normal",
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{color}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(words)}</text>'
    )
