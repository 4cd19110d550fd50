"""Where a node's time went: totals always, single spans on request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Span(NamedTuple):
    """`node` did `kind` ("compute", "communicate", "wait", "apply") from `start` to `end`, in seconds of the run."""

    node: str
    kind: str
    start: float
    end: float
    detail: str = ""


@dataclass(slots=True)
class Meter:
    """The time of one node by kind; `spans` is None unless a trace was asked for."""

    node: str
    spans: list[Span] | None = None
    seconds: dict[str, float] = field(default_factory=lambda: {"compute": 0.0, "communicate": 0.0, "wait": 0.0})

    def add(self, kind: str, start: float, end: float, detail: str = "") -> None:
        self.seconds[kind] = self.seconds.get(kind, 0.0) + (end - start)
        if self.spans is not None and end > start:
            self.spans.append(Span(self.node, kind, start, end, detail))
