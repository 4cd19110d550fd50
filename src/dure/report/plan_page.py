"""Writes the page of a plan: one HTML file to explore, that opens offline and asks nothing of the network.

The page shows all parts without its script. The script moves the ranking with the slider, reads values off the charts
and copies commands. A policy in the page (CSP) lets a browser run that script alone, whatever the plan's texts hold.

`plan` holds plain values, and each part may be empty or missing:

    job, cluster, version; workers, parameters; target, target_measure ("loss" if it is missing, or "accuracy")
    answer      strategy, command, why, would_change, plain_ddp, ddp_script
    rows        rank, strategy, batch, seconds_per_step, samples_per_second, seconds_to_target, memory (bytes of each
                of `PARTS`), memory_limit, bytes_per_step, cost_per_hour, bottleneck, command; optional: factor
                (samples for equal learning), servers (machines besides the workers')
    refused     strategy, reason
    left        strategies that were not timed
    sweeps      of bandwidth (bytes per second), workers, batch: unit, at, now, and by strategy a value (or None) for
                each place: samples_per_second, seconds_per_step; optional: score, by which strategies rank
    timeline    strategy, seconds, spans: worker, kind ("compute", "communicate" or "wait"), start, end, name
    curves      strategy, seconds, loss
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dure.report import plan_bars, plan_figures, plan_sweeps, plan_values
from dure.report.comparison import NOTHING
from dure.report.files import replacing, to_json
from dure.report.html import breakable
from dure.report.plan_chart import Axis, compact
from dure.report.plan_sweeps import SweptValues
from dure.report.plan_values import Plan, PlanRow, digits, positive

if TYPE_CHECKING:
    from markupsafe import Markup

_NO_ANSWER = {"command": "", "why": (), "would_change": (), "plain_ddp": False, "ddp_script": None}


def write_plan_page(path: Path, plan: Mapping[str, Any]) -> Path:
    """Write the page of `plan` to `path`, and return the path. The file is complete or absent."""
    page = render_plan(plan)
    with replacing(path) as file:
        file.write(page)
    return path


def render_plan(plan: Mapping[str, Any]) -> str:
    """The page as text. The same plan gives the same text."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["percent"] = lambda value: f"{value:.2f}%"
    environment.filters["breakable"] = breakable
    environment.globals.update(digits=digits, NOTHING=NOTHING, parts=plan_values.PARTS, names=plan_figures.MEASURES)
    script, rows, looks = _resource("plan.js"), plan_values.rows(plan), plan_sweeps.looks(plan)
    sweeps = {axis: found for axis in plan_sweeps.AXES if (found := plan_sweeps.sweep(plan, axis)) is not None}
    timeline = plan_bars.timeline(plan)
    return environment.from_string(_resource("plan.html.j2")).render(
        title=_title(plan),
        facts=_facts(plan),
        cluster=plan.get("cluster") or "the cluster file",
        version=plan.get("version") or "",
        target=plan_values.target(plan),
        answer={**_NO_ANSWER, **(plan.get("answer") or {})},
        best=plan_values.best(plan, rows),
        rows=rows,
        columns=_columns(rows),
        by_speed=_by_speed(rows),
        looks=looks,
        lines={name: look for name, look in looks.items() if any(name in found.ranked for found in sweeps.values())},
        measures=[name for name in plan_figures.MEASURES if any(name in found.measures for found in sweeps.values())],
        by=next((found.by for found in sweeps.values()), None),
        swept=[plan_figures.swept(axis, found, looks) for axis, found in sweeps.items()],
        slider=plan_figures.slider(sweeps["bandwidth"]) if "bandwidth" in sweeps else None,
        curves=plan_figures.curves(plan, looks),
        memory=plan_bars.memory(plan),
        timeline=timeline,
        time_ticks=plan_figures.time_ticks(timeline) if timeline else [],
        refused=plan.get("refused") or [],
        left=plan.get("left") or [],
        style=Markup(_resource("plan.css")),  # noqa: S704  (our own file)
        script=Markup(script),  # noqa: S704  (our own file)
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=_data(sweeps, looks),
    )


def _resource(name: str) -> str:
    return resources.files("dure.report").joinpath(name).read_text(encoding="utf-8")


def _title(plan: Plan) -> str:
    job, answer = plan.get("job") or "the job", plan.get("answer") or {}
    if answer.get("strategy"):
        return f"Train {job} with {'plain DDP' if answer.get('plain_ddp') else answer['strategy']}"
    if plan.get("refused") and not plan.get("rows"):
        return f"No strategy fits {job} on {plan.get('cluster') or 'this cluster'}"
    return f"Plan of {job}"


def _facts(plan: Plan) -> list[str]:
    """Subject of the plan: "lab.yaml", "8 workers", "25.6M parameters"."""
    workers, parameters = positive(plan.get("workers")), positive(plan.get("parameters"))
    facts = [str(plan.get("cluster") or "")]
    facts.append(f"{workers:.0f} worker{'s' if workers != 1 else ''}" if workers else "")
    facts.append(f"{compact(parameters)} parameters" if parameters else "")
    return [fact for fact in facts if fact]


def _columns(rows: Sequence[PlanRow]) -> set[str]:
    """Columns that not every plan has; "batch" if a strategy has several."""
    shown = {
        column for column in ("target", "memory", "share", "cost") for row in rows if getattr(row, column) != NOTHING
    }
    if any(row.factor not in (NOTHING, digits(1.0)) for row in rows):
        shown.add("factor")
    if len({row.strategy for row in rows}) < len(rows):
        shown.add("batch")
    return shown


def _by_speed(rows: Sequence[PlanRow]) -> bool:
    """Whether the ranks are in the order of samples per second."""
    return all(first.meter >= second.meter for first, second in pairwise(rows))


def _data(sweeps: Mapping[str, SweptValues], looks: Mapping[str, str]) -> Markup:
    """The values of the sweeps for the script, as JSON in which no text is markup."""
    from markupsafe import Markup

    values = {
        axis: {
            "at": found.at,
            "by": found.by,
            "most": plan_figures.MOST[found.by],
            "places": [Axis(found.at[0], found.at[-1]).place(place) for place in found.at],
            "texts": [plan_figures.place_text(axis)(place) for place in found.at],
            "lines": [
                {"strategy": name, "look": look}
                | {measure: lines.get(name, []) for measure, lines in found.measures.items()}
                for name, look in looks.items()
                if name in found.ranked
            ],
        }
        for axis, found in sweeps.items()
    }
    text = to_json(values)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return Markup(text)  # noqa: S704  (no markup is left in it)
