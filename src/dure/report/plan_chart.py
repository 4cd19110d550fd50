"""Charts of a plan: lines over an axis as percentages of a plot, so that a page stretches them to any width.

A chart is values only. The template of the page draws its paths in a square of `SIZE` units, which the page stretches;
texts stand beside the drawing at percentages, and keep their size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dure.report.winners import Values, Win

SIZE = 1000
"""Units of the width and of the height of a drawing."""

_MOST_TICKS = 7
_STEPS = (1, 2, 5)


class Tick(NamedTuple):
    """A mark of an axis at a percentage of its length."""

    place: float
    text: str


class ChartLine(NamedTuple):
    """The line of a strategy as SVG paths: through its neighboring values, and a dot at each value."""

    strategy: str
    look: str
    path: str
    dots: str


class WinnerBand(NamedTuple):
    """The part of an axis, in per cent, where a strategy wins; `border` is the text of its start."""

    strategy: str
    look: str
    start: float
    width: float
    border: str


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of values; of positive ones with `log`."""

    low: float
    high: float
    log: bool = True

    def place(self, value: float) -> float:
        """The percentage of the length at which `value` stands."""
        low, high, here = (math.log(each) if self.log else each for each in (self.low, self.high, value))
        return 100 * (here - low) / (high - low)

    def ticks(self, text: Callable[[float], str]) -> list[Tick]:
        """At most seven marks at round values."""
        places = _log_ticks(self.low, self.high) if self.log else _linear_ticks(self.low, self.high)
        return [Tick(self.place(value), text(value)) for value in places]


@dataclass(frozen=True, slots=True)
class Chart:
    """One figure: its axes, lines and marks, all places in per cent of the plot. `level` is a line at a height."""

    x_label: str
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    lines: Sequence[ChartLine]
    level: Tick | None = None


def around(values: Sequence[float], *, log: bool = True) -> Axis:
    """An axis that holds `values` with some room at both ends."""
    low, high = min(values), max(values)
    if log:
        room = max((high / low) ** 0.05, 1.05)
        return Axis(low / room, high * room)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return Axis(low - room, high + room, log=False)


def drawn(
    at: Sequence[float], lines: Mapping[str, Values], x: Axis, y: Axis, looks: Mapping[str, str]
) -> Sequence[ChartLine]:
    """The lines in the reverse order of `lines`: the first is drawn last, above the others."""
    return [_line(strategy, looks[strategy], at, values, x, y) for strategy, values in reversed(list(lines.items()))]


def bands(wins: Sequence[Win], axis: Axis, looks: Mapping[str, str], text: Callable[[float], str]) -> list[WinnerBand]:
    """The wins that have a width."""
    return [
        WinnerBand(
            win.strategy,
            looks[win.strategy],
            axis.place(win.start),
            axis.place(win.end) - axis.place(win.start),
            text(win.start),
        )
        for win in wins
        if win.end > win.start
    ]


def compact(value: float) -> str:
    """A short text of a round number: "0.05", "200", "5k", "2M"."""
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"


def _line(strategy: str, look: str, at: Sequence[float], values: Values, x: Axis, y: Axis) -> ChartLine:
    path, dots, joined = [], [], False
    for place, value in zip(at, values, strict=True):
        if value is not None:
            point = f"{x.place(place) * SIZE / 100:.1f} {SIZE - y.place(value) * SIZE / 100:.1f}"
            path.append(f"{'L' if joined else 'M'}{point}")
            dots.append(f"M{point}h0")
        joined = value is not None
    return ChartLine(strategy, look, "".join(path), "".join(dots))


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten with their 2 and 5, with their 3, alone, or each n-th: the most that are not too many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in (_STEPS, (1, 3), (1,)):
        every = [float(f"{step}e{power}") for power in powers for step in steps]
        found = [value for value in every if low <= value <= high]
        if len(found) < 3 and steps == _STEPS:
            return _linear_ticks(low, high)
        if len(found) <= _MOST_TICKS:
            return found
    return found[:: math.ceil(len(found) / _MOST_TICKS)]


def _linear_ticks(low: float, high: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    power = math.floor(math.log10((high - low) / _MOST_TICKS))
    steps = (float(f"{step}e{power + more}") for more in (0, 1) for step in _STEPS)
    step = next(each for each in steps if (high - low) / each < _MOST_TICKS)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [number * step for number in range(first, last + 1)]
