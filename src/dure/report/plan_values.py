"""Parts of a plan as values for its page: rows of the tables, bars of memory, a timeline, sweeps and their ranking.

Each function reads its part of a plan, which may be empty or missing, and drops values that no figure can show.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dure.core.target import Target
from dure.report.comparison import NOTHING, bytes_text, seconds_text
from dure.report.winners import Values, interpolated, winners

Plan = Mapping[str, Any]

AXES = ("bandwidth", "workers", "batch")
"""The axes of the sweeps."""

MEASURES = {"score": "score", "speed": "samples_per_second", "step": "seconds_per_step"}
"""The values of a sweep by their short name. Strategies rank by the score, or by samples per second without one."""

PARTS = ("weights", "gradient", "optimizer", "versions", "activations")
"""The parts of a worker's memory, in the order of a bar."""

_COLORS, _DASHES = 7, 2
_COLORED_ROWS = 7
_MOST_WORKERS = 32
_THINNEST = 0.02
_NEAR_LIMIT = 0.2


_NUMBERED = re.compile(r"([^0-9]*)([0-9]*)")


class PlanRow(NamedTuple):
    """The texts of a ranked strategy; `meter` is its samples per second in per cent of the most."""

    rank: str
    strategy: str
    servers: str
    batch: str
    step: str
    speed: str
    meter: float
    factor: str
    target: str
    memory: str
    limit: str
    share: str
    fits: bool
    sent: str
    cost: str
    bottleneck: str
    command: str
    step_seconds: str


class Part(NamedTuple):
    """A part of a bar: its name, its width in per cent, and its text."""

    name: str
    width: float
    text: str


class MemoryBar(NamedTuple):
    """The memory of a worker in parts; `limit` is the place of the limit in per cent, None if it is off the bar."""

    row: PlanRow
    parts: Sequence[Part]
    limit: float | None


class Box(NamedTuple):
    """A span of a timeline in per cent of its length; `lane` is "top", "bottom" or "full"."""

    kind: str
    start: float
    width: float
    lane: str
    name: str
    about: str


class Timeline(NamedTuple):
    """The boxes of each worker over `seconds`, and the number of workers that are not shown."""

    strategy: str
    seconds: float
    rows: Mapping[str, Sequence[Box]]
    hidden: int


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


class Form(NamedTuple):
    """The texts of a prediction beside a closed form."""

    row: PlanRow
    name: str
    seconds: str
    difference: str


def number(value: Any) -> float | None:
    """`value` as a finite number; None if it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def positive(value: Any) -> float | None:
    """`value` as a finite number above 0; None if it is none."""
    found = number(value)
    return found if found is not None and found > 0 else None


def digits(value: float | None) -> str:
    """Three digits, and all of a larger number: "0.0123", "1.23", "12.3", "12,345"."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:#.3g}"


def given_rows(plan: Plan) -> list[Mapping[str, Any]]:
    """The rows of the plan in the order of their ranks."""
    return sorted(plan.get("rows") or [], key=lambda row: number(row.get("rank")) or math.inf)


def target(plan: Plan) -> Target | None:
    """The target of the plan: a loss, if the plan does not name its measure."""
    value = number(plan.get("target"))
    return None if value is None else Target(value, plan.get("target_measure") or "loss")


def rows(plan: Plan) -> list[PlanRow]:
    """The rows as texts, in the order of their ranks."""
    given = given_rows(plan)
    most = max((positive(row.get("samples_per_second")) or 0.0 for row in given), default=0.0)
    return [_row(row, most) for row in given]


def best(plan: Plan, found: Sequence[PlanRow]) -> PlanRow | None:
    """The row of the answer; the first row without one."""
    wanted = (plan.get("answer") or {}).get("command"), (plan.get("answer") or {}).get("strategy")
    ranked = sorted(found, key=lambda row: (row.command != wanted[0], row.strategy != wanted[1]))
    return ranked[0] if ranked else None


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


def memory(plan: Plan) -> list[MemoryBar]:
    """A bar for each row with memory, all of one scale: it ends at the limit if the bars come near to it."""
    found = [(given, row) for given, row in zip(given_rows(plan), rows(plan), strict=True) if _total(given)]
    if not found:
        return []
    most = max(_total(given) for given, _ in found)
    limits = [limit for given, _ in found if (limit := positive(given.get("memory_limit"))) is not None]
    near = bool(limits) and most >= _NEAR_LIMIT * max(limits)
    scale = 100 / (1.04 * max([most, *limits]) if near else most)
    return [_memory_bar(given, row, scale, near) for given, row in found]


def timeline(plan: Plan) -> Timeline | None:
    """The spans of the first workers. If computing and communication overlap, each has a lane of its own."""
    given = plan.get("timeline") or {}
    spans = given.get("spans") or []
    end = positive(given.get("seconds")) or max((span["end"] for span in spans), default=0.0)
    if end <= 0 or not spans:
        return None
    workers = sorted({str(span["worker"]) for span in spans}, key=_natural)
    lanes = _overlap(spans)
    found: dict[str, list[Box]] = {worker: [] for worker in workers[:_MOST_WORKERS]}
    for span in spans:
        start, stop = (100 * min(max(span[edge] / end, 0.0), 1.0) for edge in ("start", "end"))
        if str(span["worker"]) in found and stop - start >= _THINNEST:
            lane = "full" if not lanes else "top" if span["kind"] == "compute" else "bottom"
            found[str(span["worker"])].append(_box(span, start, stop - start, lane))
    return Timeline(str(given.get("strategy") or ""), end, found, max(0, len(workers) - _MOST_WORKERS))


def forms(plan: Plan) -> list[Form]:
    """Predicted seconds beside those of a closed form, for each row with one."""
    found = []
    for given, row in zip(given_rows(plan), rows(plan), strict=True):
        form = given.get("closed_form") or {}
        seconds, predicted = positive(form.get("seconds")), positive(given.get("seconds_per_step"))
        if seconds is not None and predicted is not None:
            difference = f"{100 * (predicted / seconds - 1):+.1f} %"
            found.append(Form(row, str(form.get("name") or ""), seconds_text(seconds), difference))
    return found


def _row(given: Mapping[str, Any], most: float) -> PlanRow:
    step, speed, total = (
        positive(given.get("seconds_per_step")),
        positive(given.get("samples_per_second")),
        _total(given),
    )
    limit, cost = positive(given.get("memory_limit")), number(given.get("cost_per_hour"))
    return PlanRow(
        rank=str(given.get("rank") or ""),
        strategy=str(given["strategy"]),
        servers=_servers(positive(given.get("servers"))),
        batch=str(given.get("batch") or ""),
        step=digits(step and 1e3 * step),
        speed=digits(speed),
        meter=100 * (speed or 0.0) / (most or 1.0),
        factor=digits(positive(given.get("factor"))),
        target=seconds_text(positive(given.get("seconds_to_target"))),
        memory=bytes_text(total or None),
        limit=bytes_text(limit),
        share=NOTHING if limit is None or not total else f"{100 * total / limit:.0f} %",
        fits=limit is None or total <= limit,
        sent=bytes_text(number(given.get("bytes_per_step"))),
        cost=NOTHING if cost is None else f"{cost:,.2f}",
        bottleneck=str(given.get("bottleneck") or ""),
        command=str(given.get("command") or ""),
        step_seconds=seconds_text(step),
    )


def _servers(count: float | None) -> str:
    """The machines of servers besides those of workers."""
    return f"+{count:.0f} machine{'s' if count != 1 else ''}" if count else ""


def _names(plan: Plan) -> list[str]:
    """All strategies of the plan, once each, in the order of their looks."""
    ranked = [str(row["strategy"]) for row in given_rows(plan)]
    sweeps = [found for axis in AXES if (found := sweep(plan, axis)) is not None]
    first = [win.strategy for found in sweeps for win in winners(found.at, found.ranked)]
    curves = [str(curve["strategy"]) for curve in plan.get("curves") or []]
    swept = [name for found in sweeps for lines in found.measures.values() for name in lines]
    return list(dict.fromkeys([*ranked[:_COLORED_ROWS], *first, *curves, *ranked, *swept]))


def _total(given: Mapping[str, Any]) -> float:
    """Bytes of a worker's memory; 0 if no part is known."""
    return sum(number((given.get("memory") or {}).get(part)) or 0.0 for part in PARTS)


def _memory_bar(given: Mapping[str, Any], row: PlanRow, scale: float, near: bool) -> MemoryBar:
    sizes = {part: number(given["memory"].get(part)) or 0.0 for part in PARTS}
    limit = positive(given.get("memory_limit"))
    return MemoryBar(
        row=row,
        parts=[Part(part, size * scale, f"{part}: {bytes_text(size)}") for part, size in sizes.items() if size],
        limit=limit * scale if limit is not None and near else None,
    )


def _box(span: Mapping[str, Any], start: float, width: float, lane: str) -> Box:
    name = str(span.get("name") or "")
    about = f"{name or span['kind']}: {seconds_text(span['start'])} to {seconds_text(span['end'])}"
    return Box(str(span["kind"]), start, width, lane, name if width > 0.9 * len(name) else "", about)


def _natural(name: str) -> list[tuple[str, int]]:
    """Key that puts "worker 10" behind "worker 9"."""
    return [(text, int(digits or 0)) for text, digits in _NUMBERED.findall(name)]


def _overlap(spans: Sequence[Mapping[str, Any]]) -> bool:
    """Whether two spans of a worker overlap by more than rounding."""
    ends: dict[str, float] = {}
    for span in sorted(spans, key=lambda span: span["start"]):
        worker, before = str(span["worker"]), ends.get(str(span["worker"]), -math.inf)
        if span["start"] < before - 1e-6 * (span["end"] - span["start"]):
            return True
        ends[worker] = max(before, span["end"])
    return False
