"""Compares runs: the figures of the HTML report as values and as text, and the table of the terminal.

A run is compared with the first run *of the same kind of time*. Virtual seconds come from a model and real ones from
the wall clock, so no ratio is taken between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from dure.core.target import Target
from dure.report import labels
from dure.report.labels import (
    NOTHING,
    bytes_text,
    count_text,
    mean_text,
    number_text,
    percent_text,
    rate_text,
    ratio_text,
    return_text,
    seconds_text,
)
from dure.report.metrics import time_to
from dure.report.record import RunRecord

_REAL_PLACES = ("local", "torchrun", "ray")


@dataclass(frozen=True, slots=True)
class Entry:
    """One run of a comparison: its figures, and its speed-up on the first run of its kind of time.

    `reached` is the time to the target. `speedup` is that of the first run divided by it: 2.0 means half the time.
    """

    run: RunRecord
    figures: Mapping[str, Any]
    label: str
    strategy: str
    time: str
    reached: float | None
    speedup: float | None

    @property
    def diverged(self) -> bool:
        losses = [row.get("loss") for row in self.run.history[-1:]] + [self.figures.get("loss")]
        return any(loss is not None and not math.isfinite(loss) for loss in losses)

    @property
    def finished(self) -> bool:
        return bool(self.run.figures)

    @property
    def break_even(self) -> Mapping[str, Any]:
        """The cost and the savings of the codec (`dure.run.break_even`); empty for a run without one."""
        return self.figures.get("payoff") or {}

    def step_at(self, bandwidth: float | None) -> Mapping[str, float] | None:
        """Seconds of a step on links of `bandwidth`, with the run's codec and without it."""
        steps: Sequence[Mapping[str, float]] = self.break_even.get("steps", ())
        return next((step for step in steps if step["bandwidth"] == bandwidth), None)

    @property
    def experience(self) -> Mapping[str, Any]:
        """The figures of reinforcement learning (`dure.rl.companions`); empty for a run without."""
        return self.figures.get("experience") or {}

    def figure(self, *path: str) -> float | None:
        """The number in the summary under the keys of `path`, from the outermost on; None if the summary lacks it."""
        value: Any = self.figures
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def entries(runs: Sequence[RunRecord], *, target: Target) -> list[Entry]:
    """One entry per run, in order. `target` is the accuracy or loss whose time is compared."""
    figures = [run.summary() for run in runs]
    strategies = labels.strategies(runs, figures)
    times = [_kind_of_time(run, values) for run, values in zip(runs, figures, strict=True)]
    reached = [time_to(run.history, target) for run in runs]
    first: dict[str, float | None] = {}
    for kind, seconds in zip(times, reached, strict=True):
        first.setdefault(kind, seconds)
    unique = labels.unique(strategies, times)
    return [
        Entry(run, values, label, strategy, kind, seconds, _ratio(first[kind], seconds))
        for run, values, label, strategy, kind, seconds in zip(
            runs, figures, unique, strategies, times, reached, strict=True
        )
    ]


def has_accuracy(found: Sequence[Entry]) -> bool:
    """Whether any run has an accuracy: a job may define none."""
    return any(row.get("accuracy") is not None for entry in found for row in (*entry.run.history, entry.figures))


def has_experience(found: Sequence[Entry]) -> bool:
    """Whether any run has figures of reinforcement learning."""
    return any(entry.experience for entry in found)


def has_loss(found: Sequence[Entry]) -> bool:
    """Whether losses are shown: not if all runs are reinforcement learning without one."""
    rows = (row for entry in found for row in (*entry.run.history, entry.figures))
    return any(not entry.experience for entry in found) or any(row.get("loss") is not None for row in rows)


def has_target(found: Sequence[Entry], target: Target) -> bool:
    """Whether a time to `target` exists; for an accuracy, only if some run has one."""
    return has_loss(found) if target.measure == "loss" else has_accuracy(found)


def _ratio(first: float | None, seconds: float | None) -> float | None:
    return first / seconds if first is not None and seconds else None


def _kind_of_time(run: RunRecord, figures: Mapping[str, Any]) -> str:
    """The kind of time in the summary; for a run that did not finish, the kind of the place where it ran."""
    where = str(run.config.get("on") or "")
    guess = "real" if where.split(":")[0] in _REAL_PLACES else "virtual" if where else "unknown"
    return str(figures.get("time") or guess)


def loss_text(entry: Entry) -> str:
    """The final loss, or "diverged" if it is not finite."""
    return "diverged" if entry.diverged else number_text(entry.figure("loss"))


# --- the whole summary, row by row


@dataclass(frozen=True, slots=True)
class FigureRow:
    """One figure of all runs: its name, its text for each run, and the indices of the best runs, if any is best."""

    name: str
    cells: tuple[str, ...]
    best: frozenset[int] = frozenset()


def figure_rows(found: Sequence[Entry], *, target: Target) -> list[tuple[str, list[FigureRow]]]:
    """All figures of the summaries in groups: (heading, rows)."""
    shares = ("compute", "communicate", "wait")
    return [
        *([("Result", result)] if (result := _result(found, target)) else []),
        *_experience(found),
        ("Work", _work(found)),
        (
            "Communication",
            [
                _figure_row(found, "Sent by workers", bytes_text, "bytes_sent", lowest=True),
                _figure_row(found, "Received by workers", bytes_text, "bytes_received"),
                _figure_row(found, "Messages", count_text, "messages"),
            ],
        ),
        (
            "Agreement",
            [
                _figure_row(found, "Updates applied", count_text, "updates_applied"),
                _figure_row(found, "Updates refused", count_text, "updates_refused"),
                _figure_row(found, "Staleness, mean", mean_text, "staleness", "mean"),
                _figure_row(found, "Staleness, largest", count_text, "staleness", "max"),
                *_skew(found),
                _figure_row(found, "Failures survived", count_text, "failures_survived"),
            ],
        ),
        ("Share of time", [_figure_row(found, part.capitalize(), percent_text, "time_share", part) for part in shares]),
        *_compression(found),
    ]


def _skew(found: Sequence[Entry]) -> list[FigureRow]:
    """The rows on version skew; none if no run has pulled from several servers."""
    if all(entry.figure("version_skew", "max") is None for entry in found):
        return []
    return [
        _figure_row(found, "Version skew, mean", mean_text, "version_skew", "mean"),
        _figure_row(found, "Version skew, largest", count_text, "version_skew", "max"),
    ]


def _experience(found: Sequence[Entry]) -> list[tuple[str, list[FigureRow]]]:
    """The rows on reinforcement learning; none if no run has such figures."""
    if not has_experience(found):
        return []
    row, group = partial(_figure_row, found), "experience"
    environments = tuple(str(entry.experience.get("env") or NOTHING) for entry in found)
    rows = [
        row("Mean return, last evaluation", return_text, group, "mean_return", highest=True),
        row("Mean return, best evaluation", return_text, group, "best_return", highest=True),
        row("Mean return of late training episodes", return_text, group, "recent_return"),
        FigureRow("Environment", environments),
        row("Actors", count_text, group, "actors"),
        row("Episodes", count_text, group, "episodes"),
        row("Frames", count_text, group, "frames"),
        FigureRow(
            "Frames per second",
            tuple(count_text(entry.figure(group, "frames_per_second")) for entry in found),
            _best(found, lambda entry: _negative(entry.figure(group, "frames_per_second"))),
        ),
        row("Transitions in replays", count_text, group, "replay", "size"),
        row("Transitions inserted", count_text, group, "replay", "inserts"),
        row("Transitions sampled", count_text, group, "replay", "samples"),
        row("Samples per insert", mean_text, group, "replay", "ratio"),
        row("Bytes of replays", bytes_text, group, "replay", "bytes"),
        row("Parameter lag, mean", mean_text, group, "param_lag", "mean"),
        row("Parameter lag, largest", count_text, group, "param_lag", "max"),
    ]
    return [("Experience", rows)]


def _compression(found: Sequence[Entry]) -> list[tuple[str, list[FigureRow]]]:
    """The rows on codecs, with the time that they take and save; none if no run has one."""
    costs = [entry.break_even for entry in found]
    if not any(costs):
        return []
    steps = [
        FigureRow(f"A step at {rate_text(rate)}", tuple(_both_ways(entry.step_at(rate)) for entry in found))
        for rate in bandwidths(found)
    ]
    coding = FigureRow("Encoding and decoding, a step", tuple(seconds_text(cost.get("coding")) for cost in costs))
    below = FigureRow("Pays on links below", tuple(_pays_below(cost) for cost in costs))
    return [("Compression (a model)", [coding, *steps, below])]


def bandwidths(found: Sequence[Entry]) -> list[float]:
    """Bytes per second of the links for which the records have the cost of codecs."""
    return sorted({step["bandwidth"] for entry in found for step in entry.break_even.get("steps", ())})


def _both_ways(step: Mapping[str, float] | None) -> str:
    return f"{seconds_text(step['seconds'])} (fp32 {seconds_text(step['fp32'])})" if step else NOTHING


def _pays_below(cost: Mapping[str, Any]) -> str:
    if not cost:
        return NOTHING
    return "none" if cost["break_even"] is None else rate_text(cost["break_even"])


def break_even_sentences(found: Sequence[Entry]) -> list[str]:
    """A sentence for each run with a codec, with the links on which the codec saves time."""
    return [f"{entry.label}: {_break_even_sentence(entry)}" for entry in found if entry.break_even]


def _break_even_sentence(entry: Entry) -> str:
    cost = entry.break_even
    even, here = cost["break_even"], entry.step_at(cost["link"])
    if even is None:
        return "no fewer bytes than float32 has are sent, so compression pays on no link."
    where = f"It pays on links below {rate_text(even)}" if math.isfinite(even) else "It pays on every link"
    if here is None:
        return f"encoding and decoding take {seconds_text(cost['coding'])} of a step. {where}."
    pays = "pays" if here["seconds"] < here["fp32"] else "does not pay"
    return (
        f"compression {pays} on this cluster's links of {rate_text(cost['link'])}, where a step takes "
        f"{seconds_text(here['seconds'])} with it and {seconds_text(here['fp32'])} without. {where}."
    )


def _figure_row(
    found: Sequence[Entry],
    name: str,
    text: Callable[[float | None], str],
    *path: str,
    lowest: bool = False,
    highest: bool = False,
) -> FigureRow:
    values = [entry.figure(*path) for entry in found]
    best = frozenset[int]()
    if lowest or highest:
        best = _best(
            found, lambda entry: _negative(entry.figure(*path)) if highest else entry.figure(*path), across=True
        )
    return FigureRow(name, tuple(map(text, values)), best)


def _result(found: Sequence[Entry], target: Target) -> list[FigureRow]:
    result = []
    if has_loss(found):
        result.append(FigureRow("Loss", tuple(map(loss_text, found)), _best(found, _loss_rank, across=True)))
    if has_accuracy(found):
        accuracies = tuple(percent_text(entry.figure("accuracy")) for entry in found)
        best = _best(found, lambda e: _negative(e.figure("accuracy")), across=True)
        result.append(FigureRow("Test accuracy", accuracies, best))
        result.append(_figure_row(found, "Best test accuracy", percent_text, "best_accuracy"))
    if has_target(found, target):
        reached = tuple(seconds_text(entry.reached) for entry in found)
        result.append(FigureRow(f"Time to {target.short}", reached, _best(found, lambda entry: entry.reached)))
        result.append(FigureRow("Speed-up on the first run", tuple(ratio_text(entry.speedup) for entry in found)))
    return result


def _work(found: Sequence[Entry]) -> list[FigureRow]:
    speeds = tuple(count_text(_speed(entry)) for entry in found)
    devices = [_devices(entry) for entry in found]
    return [
        FigureRow("Kind of time", tuple(entry.time for entry in found)),
        _figure_row(found, "Whole run", seconds_text, "seconds"),
        _figure_row(found, "Evaluations, in real time", seconds_text, "evaluation_seconds"),
        _figure_row(found, "Workers", count_text, "workers"),
        *([FigureRow("Devices", tuple(text or "cpu" for text in devices))] if any(devices) else []),
        _figure_row(found, "Mini-batches per worker", count_text, "steps"),
        _figure_row(found, "Learning rate", number_text, "lr"),
        _figure_row(found, "Samples", count_text, "samples"),
        FigureRow("Samples per second", speeds, _best(found, lambda entry: _negative(_speed(entry)))),
    ]


def _devices(entry: Entry) -> str:
    """The devices of a run's workers, each once; empty for a run on the CPU alone."""
    return ", ".join(sorted({str(device) for device in entry.figures.get("devices") or ()}))


def _speed(entry: Entry) -> float | None:
    samples, seconds = entry.figure("samples"), entry.figure("seconds")
    return samples / seconds if samples is not None and seconds else None


def _negative(value: float | None) -> float | None:
    return None if value is None else -value


def _loss_rank(entry: Entry) -> float | None:
    return None if entry.diverged else entry.figure("loss")


def _best(found: Sequence[Entry], rank: Callable[[Entry], float | None], *, across: bool = False) -> frozenset[int]:
    """Indices of the lowest `rank` within each kind of time (`across`: of all), if the ranks differ."""
    best: set[int] = set()
    for kind in [None] if across else sorted({entry.time for entry in found}):
        ranked = [(rank(e), place) for place, e in enumerate(found) if kind is None or e.time == kind]
        values = [(value, place) for value, place in ranked if value is not None and math.isfinite(value)]
        if len(values) > 1 and len({value for value, _ in values}) > 1:
            lowest = min(values)[0]
            best |= {place for value, place in values if value == lowest}
    return frozenset(best)


# --- the table of the terminal, with the most important figures


@dataclass(frozen=True, slots=True)
class FittedComparison:
    """Prints the comparison of `runs` with rich: in a narrow terminal as several tables, so that no cell is cut."""

    runs: Sequence[RunRecord]
    target: Target

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        found = entries(self.runs, target=self.target)
        columns = _columns(found, self.target)
        letters = 2 * options.max_width // 5  # a longer strategy takes several lines
        parts: list[dict[str, list[str]]] = [{}]
        for head, texts in columns.items():
            wider = {**parts[-1], head: texts}
            if parts[-1] and _width(_table(found, wider, letters), console, options) > options.max_width:
                parts.append({head: texts})
            else:
                parts[-1] = wider
        for part in parts:
            yield _table(found, part, letters)
        caption = _caption(found, self.target)
        if caption:
            yield Text(caption, style="table.caption")


def comparison_table(runs: Sequence[RunRecord], *, target: Target = Target()) -> Table:
    """The comparison of `runs` as one rich table of any width. Without runs the table has no rows.

    The columns of accuracies, and that of the time to one, are left out if no run has an accuracy.
    """
    found = entries(runs, target=target)
    table = _table(found, _columns(found, target))
    table.caption = _caption(found, target)
    return table


def _table(found: Sequence[Entry], columns: Mapping[str, Sequence[str]], letters: int = 0) -> Table:
    """A table of some columns. A strategy of up to `letters` letters stays on one line."""
    labels = [entry.label if entry.finished else f"{entry.label} (unfinished)" for entry in found]
    longest = max(map(len, labels), default=0)
    table = Table(caption_justify="left", header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("strategy", overflow="fold", min_width=min(longest, letters))
    for name, texts in columns.items():
        table.add_column(name, justify="right", no_wrap=True, min_width=max(map(len, (name, *texts))))
    for place, label in enumerate(labels):
        cells = [label, *(texts[place] for texts in columns.values())]
        table.add_row(*(Text(text, style="bold red" if text == "diverged" else "") for text in cells))
    return table


def _width(table: Table, console: Console, options: ConsoleOptions) -> int:
    """The width of a terminal that cuts no number of `table`."""
    return Measurement.get(console, options.update_width(10_000), table).minimum


def _columns(found: Sequence[Entry], target: Target) -> dict[str, list[str]]:
    """The cells of each column, by its name."""
    columns: dict[str, list[str]] = {}
    if has_target(found, target) or not found:
        columns[f"to {target.short}"] = [seconds_text(entry.reached) for entry in found]
        columns["speed-up"] = [ratio_text(entry.speedup) for entry in found]
    columns["whole run"] = [seconds_text(entry.figure("seconds")) for entry in found]
    if has_experience(found):
        columns["return"] = [return_text(entry.figure("experience", "mean_return")) for entry in found]
        columns["best"] = [return_text(entry.figure("experience", "best_return")) for entry in found]
        columns["frames"] = [count_text(entry.figure("experience", "frames")) for entry in found]
        columns["frames/s"] = [count_text(entry.figure("experience", "frames_per_second")) for entry in found]
    if has_loss(found) or not found:
        columns["loss"] = [loss_text(entry) for entry in found]
    if has_accuracy(found) or not found:
        columns["accuracy"] = [percent_text(entry.figure("accuracy")) for entry in found]
    columns["sent"] = [bytes_text(entry.figure("bytes_sent")) for entry in found]
    columns["received"] = [bytes_text(entry.figure("bytes_received")) for entry in found]
    columns["stale"] = [mean_text(entry.figure("staleness", "mean")) for entry in found]
    for name, part in (("compute", "compute"), ("comm.", "communicate"), ("wait", "wait")):
        columns[name] = [_percent_of(entry, part) for entry in found]
    return columns


def _percent_of(entry: Entry, part: str) -> str:
    share = entry.figure("time_share", part)
    return NOTHING if share is None else f"{100 * share:.0f} %"


def _caption(found: Sequence[Entry], target: Target) -> str | None:
    kinds = {entry.time for entry in found}
    lines = break_even_sentences(found)
    if kinds == {"virtual"}:
        lines = ["time is virtual: a model of machines and network", *lines]
    if kinds == {"virtual", "real"}:
        lines = ["speed-up is within virtual runs and within real runs", *lines]
    if found and has_loss(found) and not has_target(found, target):
        lines = [*lines, "the job has no accuracy: --target-loss compares the times to a loss"]
    return "\n".join(lines) or None
