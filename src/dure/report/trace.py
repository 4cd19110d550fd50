"""Writes the activities of all nodes over time as a Chrome trace, for https://ui.perfetto.dev; reads pipelines.

Format: "Trace Event Format" (Google, 2016), JSON object form. One process per rank; in it one thread each for

    compute | communicate (send, recv, communicate) | wait | apply

Spans that overlap in one thread, as two messages on the wire at once, go to further threads, "communicate 2" and so on,
as viewers show overlapping spans nested. Times are microseconds, exact to the nanosecond.
"""

from __future__ import annotations

import heapq
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO, Literal

from dure.core.meter import Span
from dure.core.regular_file import check_regular
from dure.errors import RecordError
from dure.report.files import replacing
from dure.report.gantt import Bar, BarKind

_THREADS: dict[str, str] = {
    "compute": "compute",
    "send": "communicate",
    "recv": "communicate",
    "communicate": "communicate",
    "wait": "wait",
    "apply": "apply",
}
_ORDER = ("compute", "communicate", "wait", "apply")


def write_trace(path: str | Path, spans: Iterable[Span], *, time: Literal["virtual", "real"]) -> None:
    """Write `spans`, in any order, to `path`. The file is complete or absent.

    Raises `ValueError` for a span that ends before it starts, is not finite, or has an unknown kind.
    """
    if time not in ("virtual", "real"):
        raise ValueError(f"time is 'virtual' or 'real', got {time!r}.")
    ordered = sorted(spans, key=_when)
    ranks = sorted({span.rank_name for span in ordered}, key=_rank_order)
    with replacing(Path(path)) as file:
        file.write(f'{{"displayTimeUnit": "ms", "otherData": {{"time": "{time}"}}, "traceEvents": [\n')
        _write_events(file, ordered, ranks)
        file.write("\n]}\n")


def _when(span: Span) -> tuple[float, float]:
    if not (math.isfinite(span.start) and span.start <= span.end < math.inf):
        raise ValueError(f"a span ends at or after its start, both finite seconds; got {span}.")
    if span.kind not in _THREADS:
        raise ValueError(f"a span's kind is one of {', '.join(_THREADS)}; got {span.kind!r} in {span}.")
    return span.start, span.end


def _rank_order(name: str) -> tuple[int, tuple[tuple[int, str], ...]]:
    """Sorts workers before servers before others; "worker 10" after "worker 9"."""
    role = 0 if name.startswith("worker") else 1 if name.startswith("server") else 2
    parts = re.split(r"(\d+)", name)
    return role, tuple((int(part), "") if part.isdecimal() else (-1, part) for part in parts)


class _Lanes:
    """Assigns each span of one rank and thread to the lowest lane that is free at its start."""

    def __init__(self) -> None:
        self._busy: list[tuple[int, int]] = []
        self._free: list[int] = []
        self._lanes = 0

    def take(self, start: int, end: int) -> int:
        while self._busy and self._busy[0][0] <= start:
            heapq.heappush(self._free, heapq.heappop(self._busy)[1])
        if self._free:
            lane = heapq.heappop(self._free)
        else:
            lane, self._lanes = self._lanes, self._lanes + 1
        heapq.heappush(self._busy, (end, lane))
        return lane


def _write_events(file: IO[str], ordered: Sequence[Span], ranks: Sequence[str]) -> None:
    """Write one event per line. Thread numbers are unique over all processes, as some viewers need."""
    text = lru_cache(maxsize=4096)(json.dumps)
    processes = {rank: number for number, rank in enumerate(ranks, start=1)}
    lanes: dict[tuple[str, str], _Lanes] = {}
    threads: dict[tuple[str, str, int], int] = {}
    file.write(",\n".join(_process_names(processes)))
    for span in ordered:
        process, thread = processes[span.rank_name], _THREADS[span.kind]
        start, end = round(span.start * 1e9), round(span.end * 1e9)
        lane = lanes.setdefault((span.rank_name, thread), _Lanes()).take(start, end)
        key = (span.rank_name, thread, lane)
        if key not in threads:
            threads[key] = len(ranks) + 1 + len(threads)
            file.write(",\n" + ",\n".join(_thread_names(process, threads[key], thread, lane)))
        file.write(
            f',\n{{"ph": "X", "pid": {process}, "tid": {threads[key]}, "ts": {_microseconds(start)}, '
            f'"dur": {_microseconds(end - start)}, "cat": "{span.kind}", "name": {text(span.detail or span.kind)}}}'
        )


def _microseconds(nanoseconds: int) -> str:
    """Exact decimal text: rounded to a float, neighbouring spans could overlap."""
    sign = "-" if nanoseconds < 0 else ""
    whole, rest = divmod(abs(nanoseconds), 1000)
    return f"{sign}{whole}.{rest:03d}"


def _process_names(processes: dict[str, int]) -> list[str]:
    return [
        json.dumps({"ph": "M", "pid": process, "tid": 0, "name": name, "args": args})
        for rank, process in processes.items()
        for name, args in (("process_name", {"name": rank}), ("process_sort_index", {"sort_index": process}))
    ]


def _thread_names(process: int, number: int, thread: str, lane: int) -> list[str]:
    shown = f"{thread} {lane + 1}" if lane else thread
    place = 1000 * _ORDER.index(thread) + lane
    return [
        json.dumps({"ph": "M", "pid": process, "tid": number, "name": name, "args": args})
        for name, args in (("thread_name", {"name": shown}), ("thread_sort_index", {"sort_index": place}))
    ]


# ---- the actions of pipelines in a trace

ACTIONS = {
    "F": BarKind("#9cc8f2", "forward"),
    "B": BarKind("#a6dba0", "backward"),
    "I": BarKind("#8ad6ce", "backward: gradient of the inputs"),
    "W": BarKind("#f6cd83", "backward: gradient of the weights"),
    "S": BarKind("#cdb9e6", "step of the synthesizer"),
}
"""The kinds of actions of a pipeline."""

MOST = 36
"""Actions of one worker in a timeline."""

LONGEST = 1 << 20
"""Most characters of a line of a trace."""

_ACTION = re.compile(r"(?P<kind>[FBIWS])(?P<number>\d+(?:\.\d+)?'*)(?: (?P<weights>w\d+(?:\+\d+)?))?")
"""The text of an action in a trace: its kind, mini-batch and micro-batch, and the weights that it reads."""


def timeline(path: Path) -> Mapping[str, Sequence[Bar]]:
    """The first actions of each worker by name, from a trace that `write_trace` wrote; empty without any.

    The trace is read up to the action that is one too many.
    """
    try:
        check_regular(path)
        with path.open(encoding="utf-8") as file:
            return _bars(iter(lambda: file.readline(LONGEST), ""))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RecordError(
            f"{path} is no trace that dure wrote ({type(error).__name__}: {error}). Remove the file "
            "to make the report without it."
        ) from error


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
            row.append(_bar(found, event["ts"] / 1e6, event["dur"] / 1e6))
    return {name: rows[name] for name in names.values() if name in rows}


def _bar(action: re.Match[str], start: float, seconds: float) -> Bar:
    """An action over its weights; of a later chunk of its worker, which has more primes, darker."""
    kind, number, weights = action.group("kind", "number", "weights")
    about = f"{action[0]}: {start:.4g} to {start + seconds:.4g} s"
    return Bar(kind, start, start + seconds, (f"{kind}{number}", weights or ""), about, shade=number.count("'"))
