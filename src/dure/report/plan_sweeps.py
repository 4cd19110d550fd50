"""Sweeps of a plan: values of strategies along an axis, the winners along it, and the ranking at any place.

A sweep has values of several strategies at the same places of a logarithmic axis. Between two places both logarithms,
of the place and of the value, change linearly: a power law between neighbors, as of a step that only communicates.
A value that is missing at one of the two places is unknown between them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dure.report.labels import digits_text, rate_text

Plan = Mapping[str, Any]
Values = Sequence[float | None]

AXES = ("bandwidth", "workers", "batch")
"""The axes of the sweeps."""

MEASURES = {"score": "score", "speed": "samples_per_second", "step": "seconds_per_step"}
"""The values of a sweep by their short name. Strategies rank by the score, or by samples per second without one."""

TITLES = {"score": "Speed for learning", "speed": "Samples per second", "step": "Milliseconds per step"}
"""The names of the values of a sweep."""

MOST = {"score": "has the highest speed for learning", "speed": "has the most samples per second"}
"""The verb of a winner, by the measure of the ranking."""

_HEADS = {"score": "Highest speed for learning", "speed": "Most samples per second"}


class SweptValues(NamedTuple):
    """Values of strategies at ascending places, for each of its measures. They rank by the measure `by`."""

    at: Sequence[float]
    now: float | None
    unit: str
    measures: Mapping[str, Mapping[str, Values]]
    by: str

    @property
    def place(self) -> float:
        """The plan's place; the nearest one of the sweep, if it is outside."""
        return min(max(self.now or self.at[-1], self.at[0]), self.at[-1])

    @property
    def ranked(self) -> Mapping[str, Values]:
        """The values by which strategies rank."""
        return self.measures[self.by]


class Placed(NamedTuple):
    """A strategy of a ranking: its values, and that of the ranking as a fraction of the best."""

    strategy: str
    value: float
    seconds: float | None
    fraction: float


def sweep(plan: Plan, axis: str) -> SweptValues | None:
    """The sweep over `axis`; None with fewer than two places, or without values. Places become ascending."""
    given = (plan.get("sweeps") or {}).get(axis) or {}
    places = {place: index for index, at in enumerate(given.get("at") or []) if (place := positive(at)) is not None}
    order = sorted(places)
    if len(order) < 2:
        return None

    def lines(key: str) -> dict[str, Values]:
        """The values in the order of the places, of each strategy that has any."""
        every = {
            str(name): [positive(line[places[place]]) for place in order]
            for name, line in (given.get(key) or {}).items()
        }
        return {name: line for name, line in every.items() if any(value is not None for value in line)}

    measures = {short: found for short, key in MEASURES.items() if (found := lines(key))}
    by = next((short for short in ("score", "speed") if short in measures), None)
    return by and SweptValues(order, positive(given.get("now")), str(given.get("unit") or axis), measures, by)


def ranking(found: SweptValues, place: float) -> list[Placed]:
    """The strategies at a place of a sweep, the fastest first."""
    every = {name: interpolated(found.at, values, place) for name, values in found.ranked.items()}
    known = {name: value for name, value in every.items() if value is not None}
    seconds = found.measures.get("step", {})
    steps = {name: interpolated(found.at, values, place) for name, values in seconds.items()}
    most = max(known.values(), default=1.0)
    return [
        Placed(name, known[name], steps.get(name), known[name] / most)
        for name in sorted(known, key=lambda name: -known[name])
    ]


def number(value: Any) -> float | None:
    """`value` as a finite number; None if it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def positive(value: Any) -> float | None:
    """`value` as a finite number above 0; None if it is none."""
    found = number(value)
    return found if found is not None and found > 0 else None


# ---- sentences


def place_text(axis: str) -> Callable[[float], str]:
    """The text of a place of a sweep: a rate in bits per second, or a whole number."""
    return rate_text if axis == "bandwidth" else lambda value: f"{value:,.0f}"


def winners_sentence(axis: str, found: SweptValues) -> str:
    """The winners along an axis in one sentence."""
    wins, text = winners(found.at, found.ranked), place_text(axis)
    wide = [win for win in wins if win.end > win.start]
    parts = [f"{win.strategy} up to {text(win.end)}" for win in wide[:-1]]
    if wide:
        parts.append(f"then {wide[-1].strategy}" if parts else f"{wide[-1].strategy} everywhere")
    parts += [f"{win.strategy} at {text(win.start)} alone" for win in wins if win.end == win.start]
    return f"{_HEADS[found.by]}: {', '.join(parts)}." if parts else ""


def lead_sentence(found: SweptValues, place: float) -> str:
    """The fastest strategy at a bandwidth in one sentence; the script of the page writes the same one."""
    placed, where = ranking(found, place), rate_text(place)
    if not placed:
        return f"At {where} no strategy has a known speed."
    first = f"At {where}, {placed[0].strategy} {MOST[found.by]}: {digits_text(placed[0].value)}"
    if len(placed) == 1:
        return f"{first}."
    return f"{first}, {100 * (placed[0].value / placed[1].value - 1):.1f} % more than {placed[1].strategy}."


# ---- winners


class Win(NamedTuple):
    """The largest values of a sweep are those of `strategy` from `start` to `end`, which are one place if equal."""

    strategy: str
    start: float
    end: float


class _Power(NamedTuple):
    """A strategy between two places: the logarithm of its value is `level` + u `rise`, for u from 0 to 1."""

    strategy: str
    level: float
    rise: float


def interpolated(at: Sequence[float], values: Values, place: float) -> float | None:
    """The value at `place`; None outside `at` (positive, ascending) and where it is unknown.

    >>> interpolated([1, 100], [10, 1000], 10)
    100.0
    """
    if not at or not at[0] <= place <= at[-1]:
        return None
    below = bisect_right(at, place) - 1
    if at[below] == place:
        return values[below]
    first, last = values[below], values[below + 1]
    if first is None or last is None:
        return None
    part = math.log(place / at[below]) / math.log(at[below + 1] / at[below])
    return first * math.pow(last / first, part)


def winners(at: Sequence[float], values: Mapping[str, Values]) -> list[Win]:
    """The winners in the order of their places: `at` is ascending, places and values are positive.

    A border is the `start` of each winner but the first. Of equal strategies the first in `values` wins. A gap between
    winners is a part of the sweep without any known value.

    >>> winners([1, 100], {"a": [10, 10], "b": [1, 100]})
    [Win(strategy='a', start=1, end=10.0), Win(strategy='b', start=10.0, end=100)]
    """
    found: list[Win] = []
    for place, position in enumerate(at):
        found += _peak(position, place, values, at, found)
        if place + 1 < len(at):
            for win in _between(at, place, values):
                if found and found[-1].strategy == win.strategy and found[-1].end == win.start:
                    found[-1] = found[-1]._replace(end=win.end)
                else:
                    found.append(win)
    return found


def _between(at: Sequence[float], place: int, values: Mapping[str, Values]) -> Iterator[Win]:
    """The winners between a place and the next."""
    powers = [
        _Power(strategy, math.log(first), math.log(last / first))
        for strategy, line in values.items()
        if (first := line[place]) is not None and (last := line[place + 1]) is not None
    ]
    low, high = at[place], at[place + 1]
    starts = list(_envelope(powers))
    ends = [*(start for start, _ in starts[1:]), 1.0][: len(starts)]
    for (start, strategy), end in zip(starts, ends, strict=True):
        yield Win(strategy, _position(low, high, start), _position(low, high, end))


def _position(low: float, high: float, part: float) -> float:
    """The place at a part of the logarithmic way; exactly `low` and `high` at its ends, so that wins join."""
    if part in (0.0, 1.0):
        return high if part else low
    return low * math.pow(high / low, part)


def _envelope(powers: Sequence[_Power]) -> Iterator[tuple[float, str]]:
    """The upper envelope of lines over 0..1: where each winner starts, and its name."""
    if not powers:
        return
    best, start = max(powers, key=lambda power: (power.level, power.rise)), 0.0
    while start < 1:
        yield start, best.strategy
        crossings = [
            ((best.level - power.level) / (power.rise - best.rise), -power.rise, number)
            for number, power in enumerate(powers)
            if power.rise > best.rise
        ]
        start, _, number = min((each for each in crossings if each[0] < 1), default=(1.0, 0.0, 0))
        best = powers[number]


def _peak(
    position: float, place: int, values: Mapping[str, Values], at: Sequence[float], before: Sequence[Win]
) -> list[Win]:
    """A win at one place only: its strategy is unknown on both sides, or known there and behind others at once."""
    known = {strategy: line[place] for strategy, line in values.items() if line[place] is not None}
    if not known:
        return []
    best = max(known, key=lambda strategy: known[strategy] or 0.0)
    beside = [win.strategy for win in before[-1:] if win.end == position]
    if place + 1 < len(at):
        beside += [win.strategy for win in _between(at, place, values)][:1]
    if any(known[strategy] == known[best] for strategy in beside):
        return []
    return [Win(best, position, position)]
