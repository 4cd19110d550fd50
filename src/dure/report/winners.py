"""The winner along a sweep: the strategy with the largest value at each place, and the borders between winners.

A sweep has values of several strategies at the same places of a logarithmic axis. Between two places both logarithms,
of the place and of the value, change linearly: a power law between neighbors, as of a step that only communicates.
A value that is missing at one of the two places is unknown between them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

Values = Sequence[float | None]


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
