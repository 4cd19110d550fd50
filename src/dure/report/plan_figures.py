"""Figures of a plan's page: the charts of its sweeps with their winners, the ranking of the slider, and the losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dure.report import plan_sweeps, plan_values
from dure.report.comparison import rate_text
from dure.report.plan_bars import Timeline
from dure.report.plan_chart import Axis, Chart, Tick, WinnerBand, around, bands, compact, drawn
from dure.report.plan_sweeps import Placed, SweptValues
from dure.report.plan_values import Plan, digits, number
from dure.report.winners import Win, winners

MEASURES = {"score": "Speed for learning", "speed": "Samples per second", "step": "Milliseconds per step"}
"""The names of the values of a sweep."""

MOST = {"score": "has the highest speed for learning", "speed": "has the most samples per second"}
"""The verb of a winner, by the measure of the ranking."""

_MOST_RANKED = 12
_MOST_POINTS = 300
_MOST_PLACES = 8
_HEADS = {"score": "Highest speed for learning", "speed": "Most samples per second"}
_LONG = ((3600.0, "h"), (60.0, "min"))


@dataclass(frozen=True, slots=True)
class SweepFigure:
    """The figure of a sweep: a chart for each measure, the winners, and the place of the plan in per cent."""

    key: str
    charts: Mapping[str, Chart]
    bands: Sequence[WinnerBand]
    sentence: str
    now: float | None
    now_text: str


@dataclass(frozen=True, slots=True)
class Slider:
    """The ranking that the slider moves, at its first place in per cent."""

    placed: Sequence[Placed]
    place: float
    text: str
    sentence: str


def swept(axis: str, found: SweptValues, looks: Mapping[str, str]) -> SweepFigure:
    """The figure of the sweep over `axis`."""
    x, text = Axis(found.at[0], found.at[-1]), place_text(axis)
    wins = winners(found.at, found.ranked)
    label = "bandwidth of a link (bit/s)" if axis == "bandwidth" else found.unit
    charts = {}
    for measure, lines in found.measures.items():
        scale = 1e3 if measure == "step" else 1.0
        scaled = {name: [value and scale * value for value in lines[name]] for name in looks if name in lines}
        y = around([value for line in scaled.values() for value in line if value is not None])
        shown = drawn(found.at, scaled, x, y, looks)
        charts[measure] = Chart(label, _x_ticks(axis, found), y.ticks(compact), shown)
    now = found.now if found.now is not None and found.at[0] <= found.now <= found.at[-1] else None
    return SweepFigure(
        key=axis,
        charts=charts,
        bands=bands(wins, x, looks, text),
        sentence=_winners_sentence(_HEADS[found.by], wins, text),
        now=None if now is None else x.place(now),
        now_text="" if now is None else text(now),
    )


def place_text(axis: str) -> Callable[[float], str]:
    """The text of a place of a sweep: a rate in bits per second, or a whole number."""
    return rate_text if axis == "bandwidth" else lambda value: f"{value:,.0f}"


def slider(found: SweptValues) -> Slider:
    """The ranking at the plan's bandwidth, or at the nearest one of the sweep."""
    place = min(max(found.now or found.at[-1], found.at[0]), found.at[-1])
    placed, text = plan_sweeps.ranking(found, place), rate_text(place)
    start = Axis(found.at[0], found.at[-1]).place(place)
    return Slider(placed[:_MOST_RANKED], start, text, _lead(placed, text, MOST[found.by]))


def curves(plan: Plan, looks: Mapping[str, str]) -> Chart | None:
    """Losses over predicted seconds, with the target; None without any loss."""
    found = {}
    for curve in plan.get("curves") or []:
        pairs = [
            (seconds, loss)
            for at, value in zip(curve.get("seconds") or [], curve.get("loss") or [], strict=False)
            if (seconds := number(at)) is not None and (loss := number(value)) is not None
        ]
        if pairs:
            found[str(curve["strategy"])] = pairs[:: -(-len(pairs) // _MOST_POINTS)]
    if not found:
        return None
    target = plan_values.target(plan)
    level = target.value if target is not None and target.measure == "loss" else None
    losses = [loss for pairs in found.values() for _, loss in pairs] + ([] if level is None else [level])
    end = max(seconds for pairs in found.values() for seconds, _ in pairs) or 1.0
    factor, unit = next((each for each in _LONG if end >= 5 * each[0]), (1.0, "s"))
    x = Axis(0.0, end / factor, log=False)
    y = around(losses, log=min(losses) > 0 and max(losses) > 10 * min(losses))
    lines = [
        line
        for name, pairs in reversed(found.items())
        for line in drawn([at / factor for at, _ in pairs], {name: [loss for _, loss in pairs]}, x, y, looks)
    ]
    mark = None if level is None else Tick(y.place(level), str(target))
    return Chart(f"predicted time ({unit})", x.ticks(compact), y.ticks(compact), lines, mark)


def time_ticks(found: Timeline) -> list[Tick]:
    """Milliseconds or seconds along a timeline."""
    factor, unit = (1.0, "s") if found.seconds >= 5 else (1e3, "ms")
    ticks = Axis(0.0, found.seconds * factor, log=False).ticks(lambda value: f"{compact(value)} {unit}")
    return [tick for tick in ticks if tick.place <= 97]


def _x_ticks(axis: str, found: SweptValues) -> list[Tick]:
    """Round bits per second, or the places of the sweep themselves, which are whole numbers."""
    if axis == "bandwidth":
        return Axis(8 * found.at[0], 8 * found.at[-1]).ticks(compact)
    x = Axis(found.at[0], found.at[-1])
    return [Tick(x.place(place), f"{place:.4g}") for place in found.at[:: -(-len(found.at) // _MOST_PLACES)]]


def _winners_sentence(head: str, wins: Sequence[Win], text: Callable[[float], str]) -> str:
    """The winners along an axis in one sentence."""
    wide = [win for win in wins if win.end > win.start]
    parts = [f"{win.strategy} up to {text(win.end)}" for win in wide[:-1]]
    if wide:
        parts.append(f"then {wide[-1].strategy}" if parts else f"{wide[-1].strategy} everywhere")
    parts += [f"{win.strategy} at {text(win.start)} alone" for win in wins if win.end == win.start]
    return f"{head}: {', '.join(parts)}." if parts else ""


def _lead(placed: Sequence[Placed], where: str, most: str) -> str:
    """The fastest strategy in one sentence; the script of the page writes the same one."""
    if not placed:
        return f"At {where} no strategy has a known speed."
    first = f"At {where}, {placed[0].strategy} {most}: {digits(placed[0].value)}"
    if len(placed) == 1:
        return f"{first}."
    return f"{first}, {100 * (placed[0].value / placed[1].value - 1):.1f} % more than {placed[1].strategy}."
