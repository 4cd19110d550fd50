"""The beginning of a run over pipelines, from its trace: the actions of each worker."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dure.core.regular_file import check_regular
from dure.errors import RecordError

ACTIONS = {
    "F": ("forward", "#9CC8F2"),
    "B": ("backward", "#A6DBA0"),
    "I": ("gradient of the inputs", "#8AD6CE"),
    "W": ("gradient of the weights", "#F6CD83"),
    "S": ("step of the synthesizer", "#CDB9E6"),
}
"""The name and the color of each kind of action of a pipeline."""

MOST = 36
"""Actions of one worker in a timeline."""

LONGEST = 1 << 20
"""Most characters of a line of a trace."""

_ACTION = re.compile(r"(?P<kind>[FBIWS])(?P<number>\d+(?:\.\d+)?'*)(?: (?P<weights>w\d+(?:\+\d+)?))?")
"""The text of an action in a trace: its kind, mini-batch and micro-batch, and the weights that it reads."""


class Bar(NamedTuple):
    """An action from `start` to `end`, in seconds; `number` has its mini-batch and micro-batch, from 0.

    `weights` is empty for an action that reads none.
    """

    start: float
    end: float
    kind: str
    number: str
    weights: str

    @property
    def label(self) -> str:
        return f"{self.kind}{self.number}"

    @property
    def chunk(self) -> int:
        """The chunk of its worker, from 0."""
        return self.number.count("'")

    def color(self, chunks: int) -> str:
        """Its color, darker for each later one of the worker's chunks."""
        light = 0.74 ** (self.chunk / max(1, chunks - 1))
        parts = (int(ACTIONS[self.kind][1][place : place + 2], 16) for place in (1, 3, 5))
        return "#" + "".join(f"{round(part * light):02x}" for part in parts)


def timeline(path: Path) -> Mapping[str, Sequence[Bar]]:
    """The first actions of each worker by name, from a trace that `report.trace` wrote; empty without any.

    The trace is read up to the action that is one too many.
    """
    try:
        check_regular(path)
        with path.open(encoding="utf-8") as file:
            return _bars(iter(lambda: file.readline(LONGEST), ""))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RecordError(f"{path} is no trace that dure wrote ({type(error).__name__}: {error}).") from error


def _bars(lines: Iterable[str]) -> Mapping[str, Sequence[Bar]]:
    names: dict[int, str] = {}
    rows: dict[str, list[Bar]] = {}
    for line in lines:
        if not line.startswith('{"ph"'):
            continue
        event = json.loads(line.rstrip(",\n"))
        if event["name"] == "process_name":
            names[event["pid"]] = event["args"]["name"]
        found = _ACTION.fullmatch(event["name"]) if event.get("cat") == "compute" else None
        if found is not None:
            row = rows.setdefault(names[event["pid"]], [])
            if len(row) == MOST:
                break
            start = event["ts"] / 1e6
            row.append(Bar(start, start + event["dur"] / 1e6, **found.groupdict("")))
    return {name: rows[name] for name in names.values() if name in rows}
