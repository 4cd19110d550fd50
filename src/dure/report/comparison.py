"""Compares runs: the figures of the HTML report as values and as text, and the table of the terminal.

A run is compared with the first run *of the same place*: of the same machines, and of the same kind of time. Virtual
seconds come from a model and real ones from the wall clock, so no speed-up is taken between them. Where a virtual
cluster was measured on the host of real runs, the error of virtual time is stated (`Accuracy`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from dure.core.target import NEAR, Target
from dure.report import labels
from dure.report.labels import (
    NOTHING,
    bytes_text,
    count_text,
    error_text,
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

SPEED_UP = "Speed-up on the first run"


@dataclass(frozen=True, slots=True)
class Place:
    """The kind of time and the machines of a run's seconds. No scale and no ratio holds the seconds of two places.

    `hosts` names the hosts of a real run, or those that `dure probe` measured for a virtual cluster, if they are known.
    `basis` are the assumed values of predicted seconds, and how wrong they may be, in words.
    """

    time: str
    on: str
    machines: str = ""
    hosts: tuple[str, ...] = ()
    basis: str = field(default="", compare=False)

    @property
    def heading(self) -> str:
        """The place in words: "Virtual time, lab.yaml: 8 machines, links of 100 Mbit/s"."""
        kind = "Time" if self.time == "unknown" else f"{self.time.capitalize()} time"
        return ", ".join(filter(None, [kind, self.machines or self.on]))


@dataclass(frozen=True, slots=True)
class Entry:
    """One run of a comparison: its figures, and its speed-up on the first run of its place.

    `label` names the run among all runs, `name` among those of its place. `reached` is the time to the target.
    `speedup` is that of the first run divided by it: 2.0 means half the time.
    """

    run: RunRecord
    figures: Mapping[str, Any]
    label: str
    name: str
    strategy: str
    place: Place
    reached: float | None
    speedup: float | None

    @property
    def time(self) -> str:
        """The kind of the run's time."""
        return self.place.time

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
    places = _places(runs, figures)
    shorts = short_names(list(dict.fromkeys(places)))
    every = labels.unique(strategies, [shorts[place] for place in places])
    reached = [time_to(run.history, target) for run in runs]
    found: list[Entry] = []
    for index, place in enumerate(places):
        among = [other for other, where in enumerate(places) if where == place]
        names = labels.unique([strategies[other] for other in among], [""] * len(among))
        name, speedup = names[among.index(index)], _ratio(reached[among[0]], reached[index])
        texts = (every[index], name, strategies[index])
        found.append(Entry(runs[index], figures[index], *texts, place, reached[index], speedup))
    return found


def by_place(found: Sequence[Entry]) -> list[tuple[Place, list[Entry]]]:
    """The places in the order of their first runs, each with its runs."""
    return [(place, [entry for entry in found if entry.place == place]) for place in _distinct(found)]


def _distinct(found: Sequence[Entry]) -> list[Place]:
    return list(dict.fromkeys(entry.place for entry in found))


def short_names(places: Sequence[Place]) -> dict[Place, str]:
    """A short name for each of several places: its kind of time, or if two are equal the place as given, or a number.

    A single place has no name.
    """
    if len(places) == 1:
        return {places[0]: ""}
    for texts in ([place.time for place in places], [place.on for place in places]):
        if len(set(texts)) == len(places):
            return dict(zip(places, texts, strict=True))
    return {place: f"{place.on} {number}" for number, place in enumerate(places, start=1)}


def _places(runs: Sequence[RunRecord], figures: Sequence[Mapping[str, Any]]) -> list[Place]:
    """The place of each run. A run that did not finish has that of a finished run of the same kind, if there is one."""
    found = [_place(run, values) for run, values in zip(runs, figures, strict=True)]
    known = {(place.time, place.on): place for place in reversed(found) if place.machines}
    return [place if place.machines else known.get((place.time, place.on), place) for place in found]


def _place(run: RunRecord, figures: Mapping[str, Any]) -> Place:
    on = str(figures.get("on") or run.config.get("on") or "")
    hosts = tuple(map(str, figures.get("hosts") or ()))
    basis = str(figures.get("basis") or "")
    return Place(_kind_of_time(run, figures), on, str(figures.get("machines") or ""), hosts, basis)


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
    every = "No cost of encoding is stated, so it pays on every link"
    where = f"It pays on links below {rate_text(even)}" if math.isfinite(even) else every
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
        result.append(FigureRow(SPEED_UP, tuple(ratio_text(entry.speedup) for entry in found)))
    return result


def _work(found: Sequence[Entry]) -> list[FigureRow]:
    speeds = tuple(count_text(_speed(entry)) for entry in found)
    devices = [_devices(entry) for entry in found]
    return [
        FigureRow("Time", tuple(entry.place.heading for entry in found)),
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
    """Indices of the lowest `rank` within each place (`across`: of all), if the ranks differ."""
    best: set[int] = set()
    for place in [None] if across else _distinct(found):
        ranked = [(rank(e), index) for index, e in enumerate(found) if place is None or e.place == place]
        values = [(value, index) for value, index in ranked if value is not None and math.isfinite(value)]
        if len(values) > 1 and len({value for value, _ in values}) > 1:
            lowest = min(values)[0]
            best |= {index for value, index in values if value == lowest}
    return frozenset(best)


# --- virtual time beside real time on the same machines


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Real runs, and virtual runs of the same strategies on a cluster that was measured on the same hosts, in pairs."""

    hosts: Sequence[str]
    pairs: Sequence[tuple[Entry, Entry]]

    @property
    def sentence(self) -> str:
        """The errors of virtual time: "How wrong virtual time is on vm: -12 % to +3 % for a step"."""
        errors = [error for real, virtual in self.pairs if (error := _error(_step(real), _step(virtual))) is not None]
        said = f"How wrong virtual time is on {', '.join(self.hosts)}"
        if not errors:
            return said
        texts = dict.fromkeys([error_text(min(errors)), error_text(max(errors))])
        return f"{said}: {' to '.join(texts)} for a step"

    def order(self) -> str:
        """The strategies whose order differs between real and virtual time, in a sentence; empty for one strategy.

        Times to the target are compared where all runs have reached it, and otherwise steps. Times whose ratio is NEAR
        or above count as equal.
        """
        if len(self.pairs) < 2:
            return ""
        to_target = all(entry.reached is not None for pair in self.pairs for entry in pair)
        of = (lambda entry: entry.reached) if to_target else _step
        timed = [(real.name, of(real) or 0.0, of(virtual) or 0.0) for real, virtual in self.pairs]
        pairs = [(a, b) for a, b in permutations(timed, 2) if a[1] < NEAR * b[1] and b[2] < NEAR * a[2]]
        what = "to the target" if to_target else "for a step"
        if not pairs:
            return f"Real and virtual order agree where times {what} differ by more than {100 * (1 - NEAR):.0f} %."
        first, other = max(pairs, key=lambda pair: pair[1][1] / pair[0][1])
        more = f" {len(pairs)} pairs differ so." if len(pairs) > 1 else ""
        return (
            f"Real and virtual order differ: {first[0]} is faster than {other[0]} in real time "
            f"({seconds_text(first[1])} and {seconds_text(other[1])} {what}), "
            f"and slower in virtual time ({seconds_text(first[2])} and {seconds_text(other[2])}).{more}"
        )

    def columns(self, target: Target) -> tuple[list[str], dict[str, list[str]]]:
        """The names of the strategies, and the columns: a step and the time to the target, real, virtual, and error."""
        columns = _beside("step", [(_step(real), _step(virtual)) for real, virtual in self.pairs])
        if any(entry.reached is not None for pair in self.pairs for entry in pair):
            reached = [(real.reached, virtual.reached) for real, virtual in self.pairs]
            columns |= _beside(f"to {target.short}", reached)
        return [real.name for real, _ in self.pairs], columns


def accuracies(found: Sequence[Entry]) -> list[Accuracy]:
    """The pairs of each real place with each virtual place of the same hosts, if the hosts are known."""
    places = by_place(found)
    return [
        Accuracy(real.hosts, pairs)
        for real, ran in places
        for virtual, predicted in places
        if (real.time, virtual.time) == ("real", "virtual") and real.hosts and real.hosts == virtual.hosts
        if (pairs := [(one, other) for one in ran for other in predicted if _same_work(one, other)])
    ]


def basis_of(place: Place, checked: Sequence[Accuracy]) -> str:
    """The basis of a place's seconds; empty where real runs show the errors of its seconds."""
    return "" if any(virtual.place == place for each in checked for _, virtual in each.pairs) else place.basis


def _same_work(one: Entry, other: Entry) -> bool:
    return all(one.figures.get(key) == other.figures.get(key) for key in ("job", "strategy", "workers", "seed"))


def _step(entry: Entry) -> float | None:
    """The seconds of a worker's mini-batch, the mean over the run."""
    seconds, steps = entry.figure("seconds"), entry.figure("steps")
    return seconds / steps if seconds is not None and steps else None


def _error(real: float | None, virtual: float | None) -> float | None:
    return virtual / real - 1 if virtual is not None and real else None


def _beside(what: str, pairs: Sequence[tuple[float | None, float | None]]) -> dict[str, list[str]]:
    return {
        f"{what}, real": [seconds_text(real) for real, _ in pairs],
        f"{what}, virtual": [seconds_text(virtual) for _, virtual in pairs],
        f"{what}, error": [error_text(_error(*pair)) for pair in pairs],
    }


# --- the table of the terminal, with the most important figures


@dataclass(frozen=True, slots=True)
class FittedComparison:
    """Prints the comparison of `runs` with rich: in a narrow terminal as several tables, so that no cell is cut."""

    runs: Sequence[RunRecord]
    target: Target

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        found = entries(self.runs, target=self.target)
        checked = accuracies(found)
        for number, (place, among) in enumerate(by_place(found)):
            yield Text(f"{chr(10) if number else ''}{place.heading}", style="bold")
            yield from _fitted(_names(among), _columns(among, self.target), console, options)
            if basis := basis_of(place, checked):
                yield Text(basis, style="table.caption")
        for accuracy in checked:
            yield Text(f"\n{accuracy.sentence}", style="bold")
            yield from _fitted(*accuracy.columns(self.target), console, options)
            if order := accuracy.order():
                yield Text(order)
        if not found:
            yield _table([], _columns(found, self.target))
        caption = _caption(found, self.target)
        if caption:
            yield Text(caption, style="table.caption")


def _fitted(
    names: Sequence[str], columns: Mapping[str, Sequence[str]], console: Console, options: ConsoleOptions
) -> Iterator[Table]:
    """The tables of some columns, as few as fit into the terminal's width."""
    letters = 2 * options.max_width // 5  # a longer strategy takes several lines
    parts: list[dict[str, Sequence[str]]] = [{}]
    for head, texts in columns.items():
        wider = {**parts[-1], head: texts}
        if parts[-1] and _width(_table(names, wider, letters), console, options) > options.max_width:
            parts.append({head: texts})
        else:
            parts[-1] = wider
    for part in parts:
        yield _table(names, part, letters)


def _names(among: Sequence[Entry]) -> list[str]:
    """The names of the runs of a place."""
    return [entry.name if entry.finished else f"{entry.name} (unfinished)" for entry in among]


def _table(names: Sequence[str], columns: Mapping[str, Sequence[str]], letters: int = 0) -> Table:
    """A table of some columns. A name of up to `letters` letters stays on one line."""
    longest = max(map(len, names), default=0)
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("strategy", overflow="fold", min_width=min(longest, letters))
    for name, texts in columns.items():
        table.add_column(name, justify="right", no_wrap=True, min_width=max(map(len, (name, *texts))))
    for row, name in enumerate(names):
        cells = [name, *(texts[row] for texts in columns.values())]
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
    lines = break_even_sentences(found)
    if any(entry.time == "virtual" for entry in found):
        lines = ["virtual seconds are predicted by a model of machines and network", *lines]
    if found and has_loss(found) and not has_target(found, target):
        lines = [*lines, "the job has no accuracy: --target-loss compares the times to a loss"]
    return "\n".join(lines) or None
