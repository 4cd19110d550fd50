"""Sweeps of a plan: values of strategies along an axis, their ranking at any place, and the looks of their lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dure.report.plan_values import Plan, given_rows, positive
from dure.report.winners import Values, interpolated, winners

AXES = ("bandwidth", "workers", "batch")
"""The axes of the sweeps."""

MEASURES = {"score": "score", "speed": "samples_per_second", "step": "seconds_per_step"}
"""The values of a sweep by their short name. Strategies rank by the score, or by samples per second without one."""

_COLORS, _DASHES = 7, 2
_COLORED_ROWS = 7


class SweptValues(NamedTuple):
    """Values of strategies at ascending places, for each of its measures. They rank by the measure `by`."""

    at: Sequence[float]
    now: float | None
    unit: str
    measures: Mapping[str, Mapping[str, Values]]
    by: str

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


def looks(plan: Plan) -> dict[str, str]:
    """CSS classes of each strategy's line: a color and a dash for the first, "other" for the rest.

    The first are the first ranks, then winners of sweeps, those with a curve, the other ranks, and the rest.
    """
    found: dict[str, str] = {}
    for place, name in enumerate(_names(plan)):
        dash, color = divmod(place, _COLORS)
        found[name] = f"c{color} d{dash}" if dash < _DASHES else "other"
    return found


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


def _names(plan: Plan) -> list[str]:
    """All strategies of the plan, once each, in the order of their looks."""
    ranked = [str(row["strategy"]) for row in given_rows(plan)]
    sweeps = [found for axis in AXES if (found := sweep(plan, axis)) is not None]
    first = [win.strategy for found in sweeps for win in winners(found.at, found.ranked)]
    curves = [str(curve["strategy"]) for curve in plan.get("curves") or []]
    swept = [name for found in sweeps for lines in found.measures.values() for name in lines]
    return list(dict.fromkeys([*ranked[:_COLORED_ROWS], *first, *curves, *ranked, *swept]))
