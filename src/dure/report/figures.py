"""Draws the figures of the report with matplotlib, as SVG that stands inline in a page.

The module keeps no state. The same runs give the same bytes. Matplotlib is imported when a figure is drawn. The
returned SVG text has all text of the runs escaped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dure.core.mixing import pairwise_mixing
from dure.core.target import Target
from dure.report.canvas import FAINT, GRID, INK, drawing, plain, round_marks
from dure.report.comparison import Entry
from dure.report.labels import compact_text
from dure.report.metrics import VersionCounts
from dure.report.plan_sweeps import SweptValues, Win, winners

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The palette of Okabe and Ito for the colour-blind, without its yellow, which is too pale for lines on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#4D4D4D")
_LINES = ("-", "--", ":")
DASHES = ("", "6 2.5", "1.5 2", "8 2 1.5 2")
SHARES = {"compute": "#33475B", "communicate": "#8CA3BA", "wait": "#DCE3EA"}

_MOST_POINTS = 400
_MOST_BARS = 40
_MOST_PLACES = 8
_LOG_FROM = 30.0
_MOST_NAMED = 32
_STAYS = -1.0
_LOSSES = {"loss": "loss", "consensus": "distance from the mean (RMS)"}
_RETURNS = {"mean_return": "mean return", "recent_return": "mean return"}
_AMOUNTS = {
    "frames_per_second": "frames per second",
    "replay_ratio": "samples per insert",
    "param_lag": "versions",
    "replay_size": "transitions",
}
_ACCURACIES = (0.0, 0.2, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999)
_SECONDS = ((7200.0, 3600.0, "h"), (300.0, 60.0, "min"), (1.0, 1.0, "s"), (0.0, 1e-3, "ms"))
_FRAMES = ((2e6, 1e6, " (millions)"), (2e3, 1e3, " (thousands)"), (0.0, 1.0, ""))
_BYTES = ((1e12, 1e12, "TB"), (1e9, 1e9, "GB"), (1e6, 1e6, "MB"), (1e3, 1e3, "kB"), (0.0, 1.0, "B"))

Unit = tuple[float, float, str]


@dataclass(frozen=True, slots=True)
class Look:
    """The line of a run in all figures: `dash` is an SVG dash array, "" for a solid line."""

    color: str
    dash: str

    @property
    def style(self) -> Any:
        """The dash in the form of matplotlib."""
        return (0, tuple(map(float, self.dash.split()))) if self.dash else "-"


OTHER = Look("#7f8a97", "")
"""The look of strategies of a plan without a color of their own."""


def looks(found: Sequence[Entry]) -> list[Look]:
    """One look for each run: a colour for each strategy, a dash for each repetition. Up to 28 runs no two are equal."""
    order = list(dict.fromkeys(entry.strategy for entry in found))
    every = [Look(color, dash) for dash in DASHES for color in COLORS]
    given: list[Look] = []
    for entry in found:
        place = order.index(entry.strategy)
        wanted = [Look(COLORS[place % len(COLORS)], dash) for dash in DASHES[place // len(COLORS) :]]
        given.append(next((look for look in [*wanted, *every] if look not in given), every[0]))
    return given


def curves(found: Sequence[Entry], given: Sequence[Look], *, x: str, y: str, target: Target) -> str | None:
    """Draws the key `y` of the rows over `x` ("seconds", "step", "bytes" or "frames"); None without any value.

    `y` is a loss, a return, an amount of reinforcement learning, or an accuracy. The curve of a run that diverged ends
    in a cross. `target` is drawn in the figure of its measure.
    """
    drawn = [(entry, look, _points(entry, x, y)) for entry, look in zip(found, given, strict=True)]
    drawn = [item for item in drawn if any(math.isfinite(value) for _, value in item[2])]
    if not drawn:
        return None
    ends = [max(place for place, _ in points) for _, _, points in drawn]
    unit = _unit(x, max(ends))
    with drawing(f"{x} {y} {found[0].time}", width=5.6, height=3.3) as (figure, svg):
        axes = figure.subplots()
        for _, look, points in drawn:
            _curve(axes, [(place / unit[1], value) for place, value in points], look)
        _scale_x(axes, [end / unit[1] for end in ends])
        axes.set_xlabel(_x_label(x, unit, found))
        if y in _LOSSES:
            _scale_loss(axes, _LOSSES[y], [[value for _, value in points] for _, _, points in drawn])
        elif y in _RETURNS or y in _AMOUNTS:
            _scale_amount(axes, (_RETURNS | _AMOUNTS)[y], [value for _, _, points in drawn for _, value in points])
            if y in _AMOUNTS:
                axes.set_ylim(bottom=0)
        else:
            mark = target.value if target.measure == "accuracy" else None
            _scale_accuracy(axes, [value for _, _, points in drawn for _, value in points], mark)
        if y == target.measure:
            _mark(axes, target)
        for entry, look, points in drawn:
            if entry.diverged:
                _cross(axes, [(place / unit[1], value) for place, value in points if math.isfinite(value)][-1], look)
    return svg()


COUNTED = {"staleness": "updates", "version_skew": "pulls"}
"""Units that a summary counts by a number of versions."""


def version_counts(entry: Entry, look: Look, key: str, *, largest: int) -> str | None:
    """Draws the shares at each number of versions up to `largest`, for a `key` of `COUNTED`; None if all are at 0."""
    from matplotlib.ticker import MaxNLocator

    values, name = entry.figures.get(key), key.replace("_", " ")
    histogram = VersionCounts.from_dict(values).histogram if values and values.get("histogram") else {}
    counted = sum(histogram.values())
    if not any(count for versions, count in histogram.items() if versions > 0):
        return None
    width = largest // _MOST_BARS + 1
    heights = [0.0] * (largest // width + 1)
    for versions, count in histogram.items():
        heights[versions // width] += 100 * count / counted
    with drawing(f"{name} {entry.label}", width=3.7, height=2.3) as (figure, svg):
        axes = figure.subplots()
        axes.bar(
            [width * (place + 0.5) - 0.5 for place in range(len(heights))], heights, 0.86 * width, color=look.color
        )
        axes.set_xlim(-0.7, max(largest, 4) + 0.7)
        axes.set_ylim(0, None)
        axes.grid(visible=False, axis="x")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.yaxis.set_major_formatter(plain(" %"))
        axes.set_xlabel(f"{name} (versions)" if width == 1 else f"{name} (versions, in bars of {width})")
        axes.set_ylabel(COUNTED[key])
    return svg()


def graph(edges: Sequence[Sequence[int]], workers: int, *, color: str) -> str:
    """Draws a graph of workers: a circle with the edges, and beside it the expected mixing matrix of an averaging."""
    with drawing(f"graph {workers} {edges}", width=6.4, height=3.2) as (figure, svg):
        circle, matrix = figure.subplots(1, 2)
        _circle(circle, edges, workers, color)
        _mixing(matrix, edges, workers, color)
    return svg()


PLOT = (0.1, 0.15, 0.88, 0.72)
"""Left, bottom, width and height of the plot of a sweep, in parts of its figure: a page places a slider below it."""


def sweep(
    found: SweptValues, measure: str, given: Mapping[str, Look], *, label: str, text: Callable[[float], str], bits: bool
) -> str:
    """Draws the values of strategies along a sweep, above them the winners, and the place of the plan.

    `text` names a place. With `bits` the axis has bits for the bytes of the places.
    """
    lines = {name: found.measures[measure][name] for name in given if name in found.measures[measure]}
    scale, unit = 1e3 if measure == "step" else 1.0, 8 if bits else 1
    with drawing(f"sweep {label} {measure} {lines}", width=5.6, height=3.5) as (figure, svg):
        figure.set_layout_engine("none")
        axes = figure.add_axes(PLOT)
        axes.set(xscale="log", yscale="log", xlim=(unit * found.at[0], unit * found.at[-1]), xlabel=label)
        for name, values in reversed(lines.items()):
            look = given[name]
            axes.plot(
                [unit * place for place in found.at],
                [math.nan if value is None else scale * value for value in values],
                color=look.color, linestyle=look.style, linewidth=1.0 if look == OTHER else 1.8, marker="o",
                markersize=2.5 if look == OTHER else 4,
            )  # fmt: skip
        _strip(axes, winners(found.at, found.ranked), given, unit)
        if found.now is not None and found.at[0] <= found.now <= found.at[-1]:
            axes.axvline(unit * found.now, color=FAINT, linewidth=1.6, linestyle=":", zorder=1)
        places = [unit * at for at in found.at[:: -(-len(found.at) // _MOST_PLACES)]]
        _marks(axes.xaxis, round_marks(*axes.get_xlim()) if bits else places, compact_text if bits else text)
        _marks(axes.yaxis, round_marks(*axes.get_ylim()), compact_text)
    return svg()


def losses(found: Mapping[str, Sequence[tuple[float, float]]], given: Mapping[str, Look], target: float | None) -> str:
    """Draws losses over predicted seconds by strategy, and the target."""
    unit = _unit("seconds", max(place for points in found.values() for place, _ in points))
    scaled = {name: [(place / unit[1], value) for place, value in points] for name, points in found.items()}
    with drawing(f"losses {scaled}", width=11.2, height=3.3) as (figure, svg):
        axes = figure.subplots()
        for name, points in reversed(scaled.items()):
            _curve(axes, points, given[name])
        level = [] if target is None else [[target]]
        _scale_loss(axes, "loss", [[value for _, value in points] for points in scaled.values()] + level)
        axes.set_xlim(left=0)
        axes.set_xlabel(f"predicted time ({unit[2]})")
        axes.xaxis.set_major_formatter(plain(""))
        if target is not None:
            _mark(axes, Target(target, "loss"))
    return svg()


def _strip(axes: Axes, wins: Sequence[Win], given: Mapping[str, Look], unit: float) -> None:
    """Draws a colored band above the plot for each winner, with its name where it fits, and lines at the borders."""
    low, high = map(math.log, axes.get_xlim())
    for place, win in enumerate(win for win in wins if win.end > win.start):
        start, end = unit * win.start, unit * win.end
        axes.axvspan(start, end, 1.02, 1.1, color=given[win.strategy].color, alpha=0.25, linewidth=0, clip_on=False)
        if place:
            axes.axvline(start, color="#9AA5B1", linewidth=0.8, zorder=1)
        letters = int(82 * math.log(end / start) / (high - low))  # the plot is about 82 letters of size 8 wide
        name = win.strategy if len(win.strategy) <= letters else f"{win.strategy[: letters - 1]}\N{HORIZONTAL ELLIPSIS}"
        if letters > 4:
            middle = math.sqrt(start) * math.sqrt(end)
            axes.text(
                middle,
                1.06,
                name,
                transform=axes.get_xaxis_transform(),
                ha="center",
                va="center",
                fontsize=8,
                color=INK,
            )


def _marks(axis: Any, places: Sequence[float], text: Callable[[float], str]) -> None:
    """Sets the ticks of a logarithmic axis."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis.set_major_locator(FixedLocator(places))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _place: text(value)))


class Band(NamedTuple):
    """A line with a band: `values` at `places`, and their `spreads` above and below, all of one length."""

    label: str
    places: Sequence[float]
    values: Sequence[float]
    spreads: Sequence[float]


def grid(panels: Mapping[tuple[str, str], Sequence[Band]], *, x_label: str, y_label: str, percent: bool = True) -> str:
    """Draws panels by (row, column). All panels of a row have one scale, and a label has one line style in all panels.

    Values are shares in `percent`, or plain numbers.

    The SVG is a file of its own on a white ground.
    """
    rows, columns = (list(dict.fromkeys(place[axis] for place in panels)) for axis in (0, 1))
    labels = list(dict.fromkeys(band.label for bands in panels.values() for band in bands))
    width, height = 0.6 + 2.7 * len(columns), 0.5 + 2.4 * len(rows)
    with drawing(f"grid {panels}", width=width, height=height, alone=True) as (figure, svg):
        every = figure.subplots(len(rows), len(columns), squeeze=False, sharey="row")
        lines: dict[str, Any] = {}
        for (row, column), bands in panels.items():
            axes = every[rows.index(row)][columns.index(column)]
            for band in bands:
                dashes, color = divmod(labels.index(band.label), len(COLORS))
                _band(axes, band, COLORS[color], _LINES[dashes % len(_LINES)])
                lines.setdefault(band.label, axes.get_lines()[-1])
            axes.set_title(column if row == rows[0] else "", fontsize=9, color=FAINT)
            axes.set_ylabel((f"{row}: {y_label}" if y_label else row) if column == columns[0] else "")
            axes.set_xlabel(x_label if row == rows[-1] else "")
            axes.yaxis.set_major_formatter(plain(" %", factor=100) if percent else plain(""))
        figure.legend(
            list(lines.values()), list(lines), loc="outside lower center", ncols=min(len(labels), 6), frameon=False
        )
    return svg()


def _band(axes: Axes, band: Band, color: str, line: str) -> None:
    _, places, values, spreads = band
    low, high = ([value + sign * spread for value, spread in zip(values, spreads, strict=True)] for sign in (-1, 1))
    axes.fill_between(places, low, high, color=color, alpha=0.18, linewidth=0)
    marker = "o" if len(places) == 1 else None
    axes.plot(places, values, color=color, linestyle=line, linewidth=1.6, marker=marker, markersize=4)


def _circle(axes: Axes, edges: Sequence[Sequence[int]], workers: int, color: str) -> None:
    from matplotlib.collections import LineCollection

    turns = [math.tau * (0.25 - rank / workers) for rank in range(workers)]
    places = [(math.cos(turn), math.sin(turn)) for turn in turns]
    lines = [(places[one], places[other]) for one, other in edges]
    axes.add_collection(LineCollection(lines, linewidths=1.1, alpha=min(0.8, 12 / len(edges) ** 0.6), colors=color))
    named = workers <= _MOST_NAMED
    x, y = zip(*places, strict=True)
    axes.scatter(x, y, s=190 if named else 14, color="white" if named else color, edgecolors=color, zorder=2)
    for rank, place in enumerate(places if named else ()):
        axes.text(*place, str(rank), ha="center", va="center_baseline", fontsize=8, zorder=3)
    axes.set(xlim=(-1.15, 1.15), ylim=(-1.15, 1.15), aspect="equal")
    axes.set_axis_off()


def _mixing(axes: Axes, edges: Sequence[Sequence[int]], workers: int, color: str) -> None:
    """Draws the mixing matrix: the darker, the larger the share of a neighbor. A worker's own large share is grey."""
    import networkx as nx
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.ticker import MaxNLocator

    shares = pairwise_mixing(nx.Graph([(one, other) for one, other in edges]))
    darkness = LinearSegmentedColormap.from_list("", ["white", color])
    largest = (shares - np.diag(shares.diagonal())).max()
    corners, colors = [], []
    for rank in range(workers):
        start = 0
        for share, cells in groupby((_STAYS if other == rank else shares[rank, other]) for other in range(workers)):
            end = start + len(list(cells))
            if share:
                corners.append([(x - 0.5, y - 0.5) for x, y in _corners(start, rank, end)])
                colors.append(GRID if share is _STAYS else darkness(share / largest))
            start = end
    axes.add_collection(PolyCollection(corners, facecolors=colors, edgecolors="none"))
    axes.set(xlim=(-0.5, workers - 0.5), ylim=(workers - 0.5, -0.5), aspect="equal")
    axes.set_title(f"a neighbor's share: up to {100 * largest:.2g} %", fontsize=9, color=FAINT)
    axes.grid(visible=False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(4, integer=True))


def _corners(start: int, row: int, end: int) -> tuple[tuple[int, int], ...]:
    return (start, row), (end, row), (end, row + 1), (start, row + 1)


def _points(entry: Entry, x: str, y: str) -> list[tuple[float, float]]:
    """At most `_MOST_POINTS` rows of a run, with the first and the last. A NaN is a gap."""
    rows = [(row.get(x), row.get(y)) for row in entry.run.history]
    points = [(float(place), float(value)) for place, value in rows if place is not None and value is not None]
    stride = math.ceil(len(points) / _MOST_POINTS) or 1
    return points[::stride] + (points[-1:] if (len(points) - 1) % stride else [])


def _curve(axes: Axes, points: list[tuple[float, float]], look: Look) -> None:
    finite = [point for point in points if math.isfinite(point[1])]
    marker = "o" if len(finite) == 1 else None
    places, values = [place for place, _ in points], [v if math.isfinite(v) else math.nan for _, v in points]
    axes.plot(places, values, color=look.color, linestyle=look.style, linewidth=1.8, marker=marker, markersize=4)


def _cross(axes: Axes, point: tuple[float, float], look: Look) -> None:
    """Draws a cross at the last finite loss, or at the upper edge if the curve leaves the figure before."""
    height = min(point[1], axes.get_ylim()[1])
    axes.plot(point[0], height, color=look.color, marker="X", markersize=9, mec="white", zorder=5, clip_on=False)


def _unit(x: str, largest: float) -> Unit:
    if x == "step":
        return 0.0, 1.0, ""
    units = {"seconds": _SECONDS, "bytes": _BYTES, "frames": _FRAMES}[x]
    return next(unit for unit in units if largest >= unit[0])


def _x_label(x: str, unit: Unit, found: Sequence[Entry]) -> str:
    kinds = {entry.time for entry in found} - {"unknown"}
    kind = f"{kinds.pop()} " if len(kinds) == 1 else ""
    return {
        "seconds": f"{kind}time ({unit[2]})",
        "step": "mini-batches per worker",
        "bytes": f"sent by all workers ({unit[2]})",
        "frames": f"frames of all actors{unit[2]}",
    }[x]


def _scale_x(axes: Axes, ends: Sequence[float]) -> None:
    """Scales the x axis: logarithmic if runs differ much in length, as short runs would be one vertical line."""
    positive = [end for end in ends if end > 0]
    if positive and max(positive) / min(positive) > _LOG_FROM:
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(plain(None))
    else:
        axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(plain(""))


def _scale_loss(axes: Axes, label: str, values: Sequence[Sequence[float]]) -> None:
    finite = [[value for value in run if math.isfinite(value)] for run in values]
    lowest, highest = min(map(min, finite)), max(map(max, finite))
    highest = min(highest, 10 * max(run[0] for run in finite)) if lowest > 0 else highest
    axes.set_ylabel(label)
    if lowest > 0 and highest / lowest > 5:
        axes.set_yscale("log")
        axes.set_ylim(lowest / 1.15, highest * 1.15)
        few = highest / lowest < 200
        axes.yaxis.set_minor_formatter(plain("", only=(2, 5) if few else ()))
        axes.yaxis.set_major_formatter(plain(""))
    elif highest > lowest:
        margin = 0.05 * (highest - lowest)
        axes.set_ylim(lowest - margin, highest + margin)


def _scale_amount(axes: Axes, label: str, values: Sequence[float]) -> None:
    finite = [value for value in values if math.isfinite(value)]
    axes.set_ylabel(label)
    axes.yaxis.set_major_formatter(plain(""))
    margin = 0.05 * max(max(finite) - min(finite), abs(max(finite))) or 1
    axes.set_ylim(min(finite) - margin, max(finite) + margin)


def _scale_accuracy(axes: Axes, values: Sequence[float], target: float | None) -> None:
    """Scales high accuracies by the logarithm of the error, labelled as accuracy."""
    finite = [value for value in values if math.isfinite(value)]
    lowest, highest = min(finite), max(finite)
    target = highest if target is None else target
    if highest >= 0.9 <= target:
        axes.set_ylabel("test accuracy (error on a log scale)")
        _scale_error(axes, lowest, max(highest, target))
    else:
        axes.set_ylabel("test accuracy")
        axes.set_ylim(max(0.0, min(lowest, target) - 0.04), min(1.0, max(highest, target) + 0.04))
    axes.yaxis.set_major_formatter(plain(" %", factor=100))


def _mark(axes: Axes, target: Target) -> None:
    """Draws a line at the target, if it is within the axis."""
    lowest, highest = axes.get_ylim()
    if not lowest <= target.value <= highest:
        return
    axes.axhline(target.value, color=FAINT, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
    axes.annotate(
        target.short.removeprefix("loss "), (1, target.value), xycoords=("axes fraction", "data"), xytext=(4, 0),
        textcoords="offset points", va="center", fontsize=9, color=FAINT, annotation_clip=False,
    )  # fmt: skip


def _scale_error(axes: Axes, lowest: float, highest: float) -> None:
    import numpy as np
    from matplotlib.ticker import FixedLocator, NullLocator

    least = max(1 - highest, 1e-3) / 1.3

    def forward(accuracy: Any) -> Any:
        return -np.log10(np.maximum(1 - np.asarray(accuracy), least))

    axes.set_yscale("function", functions=(forward, lambda place: 1 - 10 ** -np.asarray(place)))
    axes.set_ylim(max(0.0, lowest - 0.02), 1 - least)
    axes.yaxis.set_major_locator(FixedLocator([mark for mark in _ACCURACIES if lowest - 0.02 <= mark <= 1 - least]))
    axes.yaxis.set_minor_locator(NullLocator())
