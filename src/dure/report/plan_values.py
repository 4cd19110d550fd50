"""Parts of a plan as values for its page: rows of its tables as texts, and its target.

Each function reads its part of a plan, which may be empty or missing, and drops values that no figure can show.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dure.core.target import Target
from dure.report.comparison import NOTHING, bytes_text, seconds_text

PARTS = ("weights", "gradient", "optimizer", "versions", "activations")
"""The parts of a worker's memory, in the order of a bar."""

Plan = Mapping[str, Any]


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


def _row(given: Mapping[str, Any], most: float) -> PlanRow:
    step, speed, total = (
        positive(given.get("seconds_per_step")),
        positive(given.get("samples_per_second")),
        total_memory(given),
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


def total_memory(given: Mapping[str, Any]) -> float:
    """Bytes of a worker's memory; 0 if no part is known."""
    return sum(number((given.get("memory") or {}).get(part)) or 0.0 for part in PARTS)
