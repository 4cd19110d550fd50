"""Bars of a plan's page: the memory of a worker in parts, and the timeline of the winner."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dure.report.comparison import bytes_text, seconds_text
from dure.report.plan_values import PARTS, Plan, PlanRow, given_rows, number, positive, rows, total_memory

_MOST_WORKERS = 32
_THINNEST = 0.02
_NEAR_LIMIT = 0.2
_NUMBERED = re.compile(r"([^0-9]*)([0-9]*)")


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


def memory(plan: Plan) -> list[MemoryBar]:
    """A bar for each row with memory, all of one scale: it ends at the limit if the bars come near to it."""
    found = [(given, row) for given, row in zip(given_rows(plan), rows(plan), strict=True) if total_memory(given)]
    if not found:
        return []
    most = max(total_memory(given) for given, _ in found)
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
