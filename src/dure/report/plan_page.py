"""Writes the page of a plan: one HTML file to explore, that opens offline and needs no network.

The page shows all parts without its script. The script moves the ranking with the slider and copies commands. A policy
in the page (CSP) lets a browser run that script alone, whatever the plan's texts hold.

`plan` holds plain values, and each part may be empty or missing:

    job, cluster, machines (of the cluster, in words), basis (what its seconds assume), version; workers, parameters;
    target, target_measure ("loss" if it is missing, or "accuracy")
    answer      strategy, command, why, would_change, plain_ddp, ddp_script
    rows        rank, strategy, batch, seconds_per_step, samples_per_second, seconds_to_target, memory (bytes of each
                of `PARTS`), memory_limit, bytes_per_step, cost_per_hour, bottleneck, command; optional: factor
                (samples for equal learning), servers (machines besides the workers')
    refused     strategy, reason
    open        said: sentences about the facts that the cluster leaves open
    left        strategies that were not timed
    sweeps      of bandwidth (bytes per second), workers, batch: unit, at, now, and by strategy a value (or None) for
                each place: samples_per_second, seconds_per_step; optional: score, by which strategies rank
    timeline    strategy, seconds, spans: worker, kind ("compute", "communicate" or "wait"), start, end, name
    curves      strategy, seconds, loss
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dure.core.packages import extra_is_there, import_extra
from dure.core.target import Target
from dure.report import figures, plan_sweeps
from dure.report.figures import OTHER, Look
from dure.report.files import replacing, to_json
from dure.report.gantt import Bar, BarKind, BarRow, Gantt, svg
from dure.report.html import environment, resource
from dure.report.labels import NOTHING, bytes_text, compact_text, digits_text, rate_text, seconds_text
from dure.report.plan_sweeps import MEASURES, Plan, SweptValues, number, positive, winners

if TYPE_CHECKING:
    from markupsafe import Markup

PARTS = (
    "weights",
    "gradient",
    "optimizer",
    "versions",
    "activations",
    "method",
    "codec",
    "topology",
    "server",
    "frozen",
    "messages",
)
"""The parts of a worker's memory, in the order of a bar."""

COLORS = ("#0072b2", "#d55e00", "#00875f", "#a64d86", "#3d93c4", "#a97000", "#4d4d4d")
_DASHES = ("", "7 4")
_COLORED_ROWS = 7
ACTIVITIES = {
    "compute": BarKind("#9cc8f2", "compute"),
    "communicate": BarKind("#f6cd83", "communicate"),
    "wait": BarKind("#cdd4db", "wait"),
}
_NO_ANSWER = {"command": "", "why": (), "would_change": (), "plain_ddp": False, "ddp_script": None}
_MOST_RANKED, _MOST_SHOWN, _MOST_WORKERS, _MOST_POINTS = 12, 8, 32, 300
_THINNEST, _NEAR_LIMIT = 2e-4, 0.2
_NUMBERED = re.compile(r"([^0-9]*)([0-9]*)")


def write_plan_page(path: Path, plan: Mapping[str, Any]) -> Path:
    """Write the page of `plan` to `path`, and return the path. The file is complete or absent."""
    page = render_plan(plan)
    with replacing(path) as file:
        file.write(page)
    return path


def render_plan(plan: Mapping[str, Any]) -> str:
    """The page as text. The same plan gives the same text."""
    import_extra("report", "the page of a plan")
    from markupsafe import Markup

    made = environment()
    made.filters["percent"] = lambda value: f"{value:.2f}%"
    made.globals.update(
        digits=digits_text, NOTHING=NOTHING, parts=PARTS, names=plan_sweeps.TITLES, plot=figures.PLOT, other=OTHER
    )
    script, rows, looks, sweeps = resource("plan.js"), plan_rows(plan), plan_looks(plan), _sweeps(plan)
    return made.get_template("plan.html.j2").render(
        title=_title(plan),
        facts=_facts(plan),
        cluster=plan.get("cluster") or "the cluster file",
        basis=plan.get("basis") or "",
        open=(plan.get("open") or {}).get("said") or (),
        version=plan.get("version") or "",
        target=target_of(plan),
        answer={**_NO_ANSWER, **(plan.get("answer") or {})},
        best=best_row(plan, rows),
        rows=rows,
        columns=_columns(rows),
        by_speed=_by_speed(rows),
        looks=looks,
        lines={name: look for name, look in looks.items() if any(name in found.ranked for found in sweeps.values())},
        measures=[name for name in MEASURES if any(name in found.measures for found in sweeps.values())],
        by=next((found.by for found in sweeps.values()), None),
        swept=[_swept(axis, found, looks) for axis, found in sweeps.items()],
        slider=_slider(sweeps["bandwidth"]) if "bandwidth" in sweeps else None,
        curves=_curves(plan, looks),
        memory=memory_bars(plan),
        timeline=(chart := timeline(plan)) and svg(chart),
        timed=str((plan.get("timeline") or {}).get("strategy") or ""),
        hidden=max(0, len(_workers(plan)) - _MOST_WORKERS),
        refused=plan.get("refused") or [],
        left=[each | {"least": seconds_text(each["least_seconds"])} for each in plan.get("left") or ()],
        style=Markup(resource("page.css") + resource("plan.css")),  # noqa: S704  (our own files)
        script=Markup(script),  # noqa: S704  (our own file)
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=_data(sweeps, looks),
    )


def display_plan(plan: Mapping[str, Any]) -> str | None:
    """The plan for a notebook: its answer, the first ranks, and the losses or a sweep; None without the extra."""
    if not extra_is_there("report"):
        return None
    from markupsafe import Markup

    rows, looks, sweeps = plan_rows(plan), plan_looks(plan), _sweeps(plan)
    learned, axis = _curves(plan, looks), next(iter(sweeps), "")
    curve, caption = "", ""
    if learned:
        curve, caption = learned["svg"], "Loss against predicted time"
    elif axis:
        curve = _chart(axis, sweeps[axis], sweeps[axis].by, looks)
        caption = f"{plan_sweeps.TITLES[sweeps[axis].by]} against {axis}"
    elif chart := timeline(plan):
        curve, caption = svg(chart), "Time of the best strategy"
    return (
        environment()
        .get_template("plan_display.html.j2")
        .render(
            title=_title(plan),
            facts=_facts(plan),
            why=(plan.get("answer") or _NO_ANSWER)["why"],
            rows=rows[:_MOST_SHOWN],
            columns=_columns(rows),
            looks=looks,
            curve=curve,
            caption=caption,
            style=Markup(resource("display.css")),  # noqa: S704  (our own file)
        )
    )


# ---- the answer and the ranking


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


def target_of(plan: Plan) -> Target | None:
    """The target of the plan: a loss, if the plan does not name its measure."""
    value = number(plan.get("target"))
    return None if value is None else Target(value, plan.get("target_measure") or "loss")


def plan_rows(plan: Plan) -> list[PlanRow]:
    """The rows as texts, in the order of their ranks."""
    given = _given_rows(plan)
    most = max((positive(row.get("samples_per_second")) or 0.0 for row in given), default=0.0)
    return [_row(row, most) for row in given]


def best_row(plan: Plan, found: Sequence[PlanRow]) -> PlanRow | None:
    """The row of the answer; the first row without one."""
    wanted = (plan.get("answer") or {}).get("command"), (plan.get("answer") or {}).get("strategy")
    ranked = sorted(found, key=lambda row: (row.command != wanted[0], row.strategy != wanted[1]))
    return ranked[0] if ranked else None


def _given_rows(plan: Plan) -> list[Mapping[str, Any]]:
    return sorted(plan.get("rows") or [], key=lambda row: number(row.get("rank")) or math.inf)


def _row(given: Mapping[str, Any], most: float) -> PlanRow:
    step, speed = positive(given.get("seconds_per_step")), positive(given.get("samples_per_second"))
    total, limit = _total_memory(given), positive(given.get("memory_limit"))
    cost, servers = number(given.get("cost_per_hour")), positive(given.get("servers"))
    return PlanRow(
        rank=str(given.get("rank") or ""),
        strategy=str(given["strategy"]),
        servers=f"+{servers:.0f} machine{'s' if servers != 1 else ''}" if servers else "",
        batch=str(given.get("batch") or ""),
        step=digits_text(step and 1e3 * step),
        speed=digits_text(speed),
        meter=100 * (speed or 0.0) / (most or 1.0),
        factor=digits_text(positive(given.get("factor"))),
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


def _title(plan: Plan) -> str:
    job, answer = plan.get("job") or "the job", plan.get("answer") or {}
    if answer.get("strategy"):
        return f"Train {job} with {'plain DDP' if answer.get('plain_ddp') else answer['strategy']}"
    if plan.get("refused") and not plan.get("rows"):
        return f"No strategy fits {job} on {plan.get('cluster') or 'this cluster'}"
    return f"Plan of {job}"


def _facts(plan: Plan) -> list[str]:
    """Subject of the plan: "lab.yaml: 8 machines, links of 100 Mbit/s", "8 workers", "25.6M parameters"."""
    workers, parameters = positive(plan.get("workers")), positive(plan.get("parameters"))
    facts = [": ".join(str(plan[key]) for key in ("cluster", "machines") if plan.get(key))]
    facts.append(f"{workers:.0f} worker{'s' if workers != 1 else ''}" if workers else "")
    facts.append(f"{compact_text(parameters)} parameters" if parameters else "")
    return [fact for fact in facts if fact]


def _columns(rows: Sequence[PlanRow]) -> set[str]:
    """Columns that not every plan has; "batch" if a strategy has several."""
    shown = {
        column for column in ("target", "memory", "share", "cost") for row in rows if getattr(row, column) != NOTHING
    }
    if any(row.factor not in (NOTHING, digits_text(1.0)) for row in rows):
        shown.add("factor")
    if len({row.strategy for row in rows}) < len(rows):
        shown.add("batch")
    return shown


def _by_speed(rows: Sequence[PlanRow]) -> bool:
    """Whether the ranks are in the order of samples per second."""
    return all(first.meter >= second.meter for first, second in pairwise(rows))


# ---- sweeps and losses


def plan_looks(plan: Plan) -> dict[str, Look]:
    """The line of each strategy: a color and a dash for the first, `OTHER` for the rest.

    The first are the first ranks, then winners of sweeps, those with a curve, the other ranks, and the rest.
    """
    ranked = [str(row["strategy"]) for row in _given_rows(plan)]
    sweeps = _sweeps(plan).values()
    first = [win.strategy for found in sweeps for win in winners(found.at, found.ranked)]
    curves = [str(curve["strategy"]) for curve in plan.get("curves") or []]
    swept = [name for found in sweeps for lines in found.measures.values() for name in lines]
    names = dict.fromkeys([*ranked[:_COLORED_ROWS], *first, *curves, *ranked, *swept])
    every = [Look(color, dash) for dash in _DASHES for color in COLORS]
    return {name: every[place] if place < len(every) else OTHER for place, name in enumerate(names)}


def _sweeps(plan: Plan) -> dict[str, SweptValues]:
    return {axis: found for axis in plan_sweeps.AXES if (found := plan_sweeps.sweep(plan, axis)) is not None}


def _swept(axis: str, found: SweptValues, looks: Mapping[str, Look]) -> dict[str, Any]:
    """The figures of a sweep by measure, its winners in a sentence, and all its values as a table."""
    text = plan_sweeps.place_text(axis)
    within = found.now is not None and found.at[0] <= found.now <= found.at[-1]
    return {
        "key": axis,
        "charts": {measure: _chart(axis, found, measure, looks) for measure in found.measures},
        "places": list(map(text, found.at)),
        "values": {
            measure: {name: _texts(measure, lines[name]) for name in looks if name in lines}
            for measure, lines in found.measures.items()
        },
        "sentence": plan_sweeps.winners_sentence(axis, found),
        "now_text": text(found.now) if within and found.now is not None else "",
    }


def _chart(axis: str, found: SweptValues, measure: str, looks: Mapping[str, Look]) -> str:
    bits = axis == "bandwidth"
    label = "bandwidth of a link (bit/s)" if bits else found.unit
    return figures.sweep(found, measure, looks, label=label, text=plan_sweeps.place_text(axis), bits=bits)


def _texts(measure: str, values: plan_sweeps.Values) -> list[str]:
    return [digits_text(value and (1e3 if measure == "step" else 1.0) * value) for value in values]


def _slider(found: SweptValues) -> dict[str, Any]:
    """The ranking that the slider moves, at its first place in per cent: the plan's bandwidth, or the nearest one."""
    return {
        "placed": plan_sweeps.ranking(found, found.place)[:_MOST_RANKED],
        "place": 100 * math.log(found.place / found.at[0]) / math.log(found.at[-1] / found.at[0]),
        "text": rate_text(found.place),
        "sentence": plan_sweeps.lead_sentence(found, found.place),
    }


def _curves(plan: Plan, looks: Mapping[str, Look]) -> dict[str, Any] | None:
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
    target = target_of(plan)
    level = target.value if target is not None and target.measure == "loss" else None
    return {"strategies": list(found), "svg": figures.losses(found, looks, level), "level": level}


def _data(sweeps: Mapping[str, SweptValues], looks: Mapping[str, Look]) -> Markup:
    """The values of the slider's sweep for the script, as JSON in which no text is markup."""
    from markupsafe import Markup

    found = sweeps.get("bandwidth")
    values = found and {
        "at": found.at,
        "most": plan_sweeps.MOST[found.by],
        "lines": [
            {"strategy": name, "color": look.color, "values": found.ranked[name]}
            | {"step": found.measures.get("step", {}).get(name)}
            for name, look in looks.items()
            if name in found.ranked
        ],
    }
    text = to_json(values)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return Markup(text)  # noqa: S704  (no markup is left in it)


# ---- memory and time of workers


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


def memory_bars(plan: Plan) -> list[MemoryBar]:
    """A bar for each row with memory, all of one scale: it ends at the limit if the bars come near to it."""
    found = [pair for pair in zip(_given_rows(plan), plan_rows(plan), strict=True) if _total_memory(pair[0])]
    if not found:
        return []
    most = max(_total_memory(given) for given, _ in found)
    limits = [limit for given, _ in found if (limit := positive(given.get("memory_limit"))) is not None]
    near = bool(limits) and most >= _NEAR_LIMIT * max(limits)
    scale = 100 / (1.04 * max([most, *limits]) if near else most)
    return [_memory_bar(given, row, scale, near) for given, row in found]


def _memory_bar(given: Mapping[str, Any], row: PlanRow, scale: float, near: bool) -> MemoryBar:
    sizes = {part: number(given["memory"].get(part)) or 0.0 for part in PARTS}
    limit = positive(given.get("memory_limit"))
    return MemoryBar(
        row=row,
        parts=[Part(part, size * scale, f"{part}: {bytes_text(size)}") for part, size in sizes.items() if size],
        limit=limit * scale if limit is not None and near else None,
    )


def _total_memory(given: Mapping[str, Any]) -> float:
    """Bytes of a worker's memory; 0 if no part is known."""
    return sum(number((given.get("memory") or {}).get(part)) or 0.0 for part in PARTS)


def timeline(plan: Plan) -> Gantt | None:
    """The spans of the first workers. If computing and communication overlap, each has a part of the row's height."""
    given = plan.get("timeline") or {}
    spans = given.get("spans") or []
    end = positive(given.get("seconds")) or max((span["end"] for span in spans), default=0.0)
    if end <= 0 or not spans:
        return None
    lanes = _overlap(spans)
    rows: dict[str, list[Bar]] = {worker: [] for worker in _workers(plan)[:_MOST_WORKERS]}
    for span in spans:
        start, stop = (min(max(span[edge], 0.0), end) for edge in ("start", "end"))
        if str(span["worker"]) in rows and stop - start >= _THINNEST * end:
            name, kind = str(span.get("name") or ""), str(span["kind"])
            about = f"{name or kind}: {seconds_text(span['start'])} to {seconds_text(span['end'])}"
            bar = Bar(kind, start, stop, (name,), about, lane=int(lanes and kind != "compute"))
            rows[str(span["worker"])].append(bar)
    return Gantt("", "", {name: BarRow(bars) for name, bars in rows.items()}, end, ACTIVITIES)


def _workers(plan: Plan) -> list[str]:
    """The nodes of the timeline, "worker 10" behind "worker 9"."""
    names = {str(span["worker"]) for span in (plan.get("timeline") or {}).get("spans") or []}
    return sorted(names, key=lambda name: [(text, int(digits or 0)) for text, digits in _NUMBERED.findall(name)])


def _overlap(spans: Sequence[Mapping[str, Any]]) -> bool:
    """Whether two spans of a worker overlap by more than rounding."""
    ends: dict[str, float] = {}
    for span in sorted(spans, key=lambda span: span["start"]):
        worker, before = str(span["worker"]), ends.get(str(span["worker"]), -math.inf)
        if span["start"] < before - 1e-6 * (span["end"] - span["start"]):
            return True
        ends[worker] = max(before, span["end"])
    return False
