"""Where a node's time went: totals always, single spans on request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

KINDS = ("compute", "communicate", "wait", "apply")
"""What a node's time may go to."""

SPAN_KINDS = (*KINDS, "send", "recv")
"""What a span may be."""


class Span(NamedTuple):
    """Something that `rank_name` ("worker 0") did from `start` to `end`, in seconds of the run's time.

    `kind` is "compute", "send", "recv", "communicate", "wait" or "apply". `detail` is what a viewer shows ("push");
    without it, the kind. Use few different texts: viewers colour by them.
    """

    rank_name: str
    kind: str
    start: float
    end: float
    detail: str = ""


@dataclass(slots=True)
class Meter:
    """The time of one node by kind; `spans` is None unless a trace was asked for."""

    node: str
    spans: list[Span] | None = None
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))

    def add(self, kind: str, start: float, end: float, detail: str = "") -> None:
        self.seconds[kind] += end - start
        if self.spans is not None and end > start:
            self.spans.append(Span(self.node, kind, start, end, detail))
