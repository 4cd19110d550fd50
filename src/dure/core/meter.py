"""Time of a node by kind of activity: totals always, spans only for a trace. Its pulls by their version skew."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

KINDS = ("compute", "communicate", "wait", "apply")
"""Kinds of activity that a node's time is divided into."""

SPAN_KINDS = (*KINDS, "send", "recv")
"""Kinds of a span."""


class Span(NamedTuple):
    """An activity of the node `rank_name` ("worker 0") from `start` to `end`, in seconds of the run's time.

    `kind` is one of SPAN_KINDS. `detail` is the text in a viewer ("push"); if it is empty, the viewer shows the kind.
    Use few different texts, since viewers choose colors by them.
    """

    rank_name: str
    kind: str
    start: float
    end: float
    detail: str = ""


@dataclass(slots=True)
class Meter:
    """Adds up the seconds of one node by kind. `spans` is a list where a trace is recorded, else None.

    `skew` counts the node's pulls from several servers by their version skew.
    """

    node: str
    spans: list[Span] | None = None
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    skew: Counter[int] = field(default_factory=Counter)

    def add(self, kind: str, start: float, end: float, detail: str = "") -> None:
        self.seconds[kind] += end - start
        if self.spans is not None and end > start:
            self.spans.append(Span(self.node, kind, start, end, detail))
