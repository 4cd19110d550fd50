"""Writes the report: one HTML file that opens offline, needs no network and runs no script.

Jinja2 (autoescape) escapes text from outside, as names, paths and strategies, on the page; matplotlib escapes it in
figures.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dure.core.packages import extra_is_there, import_extra
from dure.core.target import Target
from dure.core.text import printable
from dure.errors import UsageError
from dure.report import comparison, figures, labels
from dure.report.comparison import Accuracy, Entry, FigureRow, Place
from dure.report.figures import Look
from dure.report.files import replacing, to_json
from dure.report.gantt import BarRow, Gantt, svg
from dure.report.metrics import frame_rates
from dure.report.record import TRACE, RunRecord
from dure.report.trace import ACTIONS, timeline

if TYPE_CHECKING:
    from jinja2 import Environment, Template
    from markupsafe import Markup

_X_TITLES = {"step": "against mini-batches", "bytes": "against bytes sent", "frames": "against frames"}
_DISTANCE = {"consensus": "Distance between models"}
_MEASURES = {"loss": "Loss", "accuracy": "Test accuracy"}
_RETURNS = {"mean_return": "Mean return of evaluations", "recent_return": "Mean return of training episodes"}
_EXPERIENCE = {
    "frames_per_second": "Frames per second",
    "replay_ratio": "Samples per insert",
    "param_lag": "Parameter lag",
    "replay_size": "Transitions in replays",
}
"""Titles of curves, by the keys of a history."""

_SENTENCES = {
    "virtual": "Gradients are real. Seconds are predicted by a model of these machines and their network.",
    "real": "Seconds are measured by the clock while processes worked.",
    "unknown": "The record does not say whether time is virtual or real.",
}

_HEADLINE = (
    *("Loss", "Test accuracy", comparison.SPEED_UP, "Mean return, last evaluation", "Frames", "Time"),
    *("Whole run", "Sent by workers", "Received by workers"),
)
"""Figures in the tables and headings of the places: the table of more figures leaves them out."""


DEFAULT = Path("report.html")
"""The file of a report if none is named and this name is free."""


def free(path: Path) -> Path:
    """`path`; if it exists, the first of path-2, path-3, ... that does not."""
    numbered = (path.with_stem(f"{path.stem}-{number}") for number in count(2))
    return next(each for each in chain([path], numbered) if not each.exists())


@dataclass(frozen=True, slots=True)
class Panel:
    """One figure of the page: its caption and its SVG."""

    title: str
    svg: str


def write_report(
    path: str | Path,
    runs: Sequence[RunRecord],
    *,
    title: str = "Comparison of strategies",
    target: Target = Target(),
) -> Path:
    """Write the report of `runs` to `path`, and return the path. The file is complete or absent.

    Runs are compared with the first one. `target` is the accuracy or loss whose time is compared.
    """
    import_extra("report", "a report")
    if not runs:
        raise UsageError("a report needs at least one run, got none. Name the folders of finished runs.")
    page = render(runs, title=title, target=target)
    with replacing(Path(path)) as file:
        file.write(page)
    return Path(path)


def render(runs: Sequence[RunRecord], *, title: str, target: Target) -> str:
    """The page as text. The same runs give the same text."""
    found = comparison.entries(runs, target=target)
    given = figures.looks(found)
    return _template("report.html.j2", "page.css").render(
        title=title,
        subtitle=_subtitle(runs, title),
        places=_place_tables(found, given, target),
        accuracies=_accuracy_tables(found, target),
        has=_columns(found, target),
        rows=list(zip(found, given, strict=True)),
        returns=_returns(found, given, target),
        experience=_experience(found, given, target),
        curves=_curves(found, given, target),
        staleness=_version_counts(found, given, "staleness"),
        fresh=[entry.label for entry in found if entry.figure("staleness", "max") == 0],
        skew=_version_counts(found, given, "version_skew"),
        consistent=[entry.label for entry in found if entry.figure("version_skew", "max") == 0],
        graphs=_graphs(found, given),
        consensus=[panel for _, panels in _panels(found, given, target, _DISTANCE, ("step",)) for panel in panels],
        timelines=_timelines(found),
        shares=[(entry, _shares(entry)) for entry in found if sum(_shares(entry).values()) > 0],
        share_colors=figures.SHARES,
        break_evens=[entry for entry in found if entry.break_even],
        rates=comparison.bandwidths(found),
        pays=comparison.break_even_sentences(found),
        costs=_COSTS,
        groups=_more_figures(found, target),
        origins=[_origin(entry) for entry in found],
    )


def display(runs: Sequence[RunRecord], target: Target = Target()) -> str | None:
    """The runs for a notebook: the table of each place, and their curves; None without the extra of reports."""
    if not (runs and extra_is_there("report")):
        return None
    found = comparison.entries(runs, target=target)
    given = figures.looks(found)
    return _template("display.html.j2", "display.css").render(
        subtitle=_subtitle(runs, ""),
        places=_place_tables(found, given, target),
        accuracies=[text for each in comparison.accuracies(found) for text in (each.sentence, each.order()) if text],
        has=_columns(found, target),
        curves=_panels(found, given, target, _MEASURES | _RETURNS, ()),
    )


def _template(name: str, style: str) -> Template:
    from markupsafe import Markup

    made = environment()
    made.finalize = _printable
    texts = {name: getattr(labels, name) for name in _TEXTS}
    made.globals.update(texts, loss_text=comparison.loss_text, style=Markup(resource(style)))  # noqa: S704  (our own file)
    return made.get_template(name)


def _columns(found: Sequence[Entry], target: Target) -> dict[str, Any]:
    """The columns that not all comparisons have; "target" is the text of the target."""
    return {
        "target": str(target) if comparison.has_target(found, target) else "",
        "accuracy": comparison.has_accuracy(found),
        "experience": comparison.has_experience(found),
        "loss": comparison.has_loss(found),
    }


def environment() -> Environment:
    """The settings of all pages: every text that is not our own is escaped, and a name that is missing is an error."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    made = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(resource),
    )
    made.filters.update(svg=Markup, breakable=breakable)
    return made


def resource(name: str) -> str:
    """The text of a file of this package."""
    return resources.files("dure.report").joinpath(name).read_text(encoding="utf-8")


def _printable(value: object) -> object:
    return printable(value) if type(value) is str else value  # marked-up text was made from printable parts


_COSTS = {
    "measured": "measured on this machine, on gradients of this model, when the run had ended",
    "cluster": "the cluster file's",
    "default": "those that dure has measured, on another machine",
}
"""Sources of the cost of a codec."""

_TEXTS = (
    *("rate_text", "seconds_text", "bytes_text", "percent_text", "ratio_text", "return_text", "count_text"),
    "NOTHING",
)


def _subtitle(runs: Sequence[RunRecord], title: str) -> str:
    """The properties that all runs share and the title lacks: "digits-mlp · 8 workers · ps:shards=2 · seed 0"."""
    job = labels.shared_job(runs)
    parts = ["" if job in title else job]
    workers = _common([str(run.summary().get("workers") or "") for run in runs])
    parts.append(f"{workers} worker{'s' if workers != '1' else ''}" if workers else "")
    parts.append(labels.shared_strategy(runs))
    seed = _common([str(run.seed) if run.seed is not None else "" for run in runs])
    parts.append(f"seed {seed}" if seed else "")
    return " · ".join(part for part in parts if part)


def _common(texts: Sequence[str]) -> str:
    return texts[0] if len(set(texts)) == 1 else ""


@dataclass(frozen=True, slots=True)
class PlaceTable:
    """The runs of a place, each with its look and the length of its bar; sentences on the best of them."""

    place: Place
    sentence: str
    conclusions: Sequence[str]
    rows: Sequence[tuple[Entry, Look, float]]


def _place_tables(found: Sequence[Entry], given: Sequence[Look], target: Target) -> list[PlaceTable]:
    """A table for each place: no scale holds the seconds of two."""
    tables, checked = [], comparison.accuracies(found)
    for place, among in comparison.by_place(found):
        looks = [look for entry, look in zip(found, given, strict=True) if entry.place == place]
        basis = comparison.basis_of(place, checked)
        sentence = f"{_SENTENCES.get(place.time, _SENTENCES['unknown'])} {basis}".rstrip()
        conclusions = [*_fastest(among, target), *_highest(among)]
        tables.append(PlaceTable(place, sentence, conclusions, list(zip(among, looks, _bars(among), strict=True))))
    return tables


def _accuracy_tables(found: Sequence[Entry], target: Target) -> list[tuple[Accuracy, list[str], list[list[str]]]]:
    """For virtual and real runs on the same hosts: the sentence, the heads and the rows of a table of errors."""
    tables = []
    for accuracy in comparison.accuracies(found):
        names, columns = accuracy.columns(target)
        tables.append((accuracy, list(columns), [[*row] for row in zip(names, *columns.values(), strict=True)]))
    return tables


def _more_figures(found: Sequence[Entry], target: Target) -> list[tuple[str, list[FigureRow]]]:
    """The figures that the tables of the places lack, in groups."""
    shown = (*_HEADLINE, f"Time to {target.short}")
    groups = [
        (heading, [row for row in rows if row.name not in shown])
        for heading, rows in comparison.figure_rows(found, target=target)
    ]
    return [(heading, rows) for heading, rows in groups if rows]


def _fastest(among: Sequence[Entry], target: Target) -> list[str]:
    """The run of a place that reached the target first, in a sentence."""
    arrived = sorted((entry for entry in among if entry.reached is not None), key=lambda e: e.reached or 0.0)
    if arrived:
        return [_first_arrival(arrived[0], among[0], len(among), target)]
    return [f"No run reached {target}."] if comparison.has_target(among, target) else []


def _highest(among: Sequence[Entry]) -> list[str]:
    """The run of a place with the highest mean return of an evaluation, in a sentence."""
    rows = [(entry, row) for entry in among for row in entry.run.history if row.get("mean_return") is not None]
    if not rows:
        return []
    entry, row = max(rows, key=lambda pair: (pair[1]["mean_return"], -pair[1]["seconds"]))
    reached = f"{labels.return_text(row['mean_return'])} after {labels.seconds_text(row['seconds'])}"
    return [f"{entry.strategy} reached the highest mean return of an evaluation: {reached}{_of_time(entry)}."]


def _first_arrival(best: Entry, first: Entry, among: int, target: Target) -> str:
    when = f"{target} after {labels.seconds_text(best.reached)}{_of_time(best)}"
    if among == 1:
        return f"{best.strategy} reached {when}."
    if best is first or best.speedup is None:
        return f"{best.strategy} reached {when}, before all others."
    return f"{best.strategy} reached {when}, {best.speedup:.1f} times as fast as {first.strategy}."


def _of_time(entry: Entry) -> str:
    return f" of {entry.time} time" if entry.time != "unknown" else ""


def _bars(among: Sequence[Entry]) -> list[float]:
    """The length of each run's bar in per cent of the slowest run of its place; 0 without a time."""
    slowest = max((entry.reached or 0.0 for entry in among), default=0.0)
    return [100 * (entry.reached or 0.0) / (slowest or 1.0) for entry in among]


def _curves(found: Sequence[Entry], given: Sequence[Look], target: Target) -> list[tuple[str, list[Panel]]]:
    """Rows of panels with loss and accuracy: over the time of each place, over steps and over bytes."""
    return _panels(found, given, target, _MEASURES, ("step", "bytes"))


def _returns(found: Sequence[Entry], given: Sequence[Look], target: Target) -> list[tuple[str, list[Panel]]]:
    """Rows of panels with returns: over the time of each place, and over frames."""
    return _panels(found, given, target, _RETURNS, ("frames",))


def _experience(found: Sequence[Entry], given: Sequence[Look], target: Target) -> list[tuple[str, list[Panel]]]:
    """Rows of panels with the amounts of reinforcement learning, over the time of each place."""
    rated = [
        replace(entry, run=replace(entry.run, history=[*entry.run.history, *frame_rates(entry.run.history)]))
        for entry in found
    ]
    return _panels(rated, given, target, _EXPERIENCE, ())


def _panels(
    found: Sequence[Entry], given: Sequence[Look], target: Target, names: Mapping[str, str], x_axes: Sequence[str]
) -> list[tuple[str, list[Panel]]]:
    """Rows of panels, one for each key of `names` that has values: over the time of each place, and over `x_axes`."""
    rows: list[tuple[str, str, list[int]]] = []
    distinct = [place for place, _ in comparison.by_place(found)]
    for place, short in comparison.short_names(distinct).items():
        title = f"against {place.time} time" if place.time != "unknown" else "against time"
        title += f", {short}" if short not in ("", place.time) else ""
        rows.append((title, "seconds", [index for index, entry in enumerate(found) if entry.place == place]))
    rows += [(_X_TITLES[x], x, list(range(len(found)))) for x in x_axes]
    drawn = []
    for title, x, indices in rows:
        some, styles = [found[index] for index in indices], [given[index] for index in indices]
        panels = []
        for y, name in names.items():
            svg = figures.curves(some, styles, x=x, y=y, target=target)
            panels += [Panel(f"{name} {title}", svg)] if svg else []
        if panels:
            drawn.append((title, panels))
    return drawn


def _version_counts(found: Sequence[Entry], given: Sequence[Look], key: str) -> list[Panel]:
    """One histogram for each run that has one under `key`, on equal axes."""
    largest = max((int(entry.figure(key, "max") or 0) for entry in found), default=0)
    return [
        Panel(entry.label, svg)
        for entry, look in zip(found, given, strict=True)
        if (svg := figures.version_counts(entry, look, key, largest=largest))
    ]


def _graphs(found: Sequence[Entry], given: Sequence[Look]) -> list[Panel]:
    """One panel for each graph of workers in the records, with its speed of mixing and the names of its runs."""
    runs: dict[str, list[int]] = {}
    for place, entry in enumerate(found):
        if entry.figures.get("graph"):
            runs.setdefault(to_json(entry.figures["graph"]), []).append(place)
    panels = []
    for places in runs.values():
        graph = found[places[0]].figures["graph"]
        labels = ", ".join(found[place].label for place in places)
        about = (
            f"{labels}: {graph['neighbors']} neighbors each, spectral gap {graph['gap']:.3g} of an averaging; "
            f"{graph['averagings_to_halve']:,} averagings among {graph['workers']} halve the squared distances"
        )
        panels.append(Panel(about, figures.graph(graph["edges"], graph["workers"], color=given[places[0]].color)))
    return panels


def _timelines(found: Sequence[Entry]) -> list[Panel]:
    """For each run over pipelines with a trace, its beginning."""
    drawn = []
    for entry in found:
        path = entry.run.path / TRACE if entry.run.path else None
        rows = timeline(path) if path is not None and path.exists() else {}
        if rows:
            end = max(bar.end for bars in rows.values() for bar in bars)
            chart = Gantt("", "", {name: BarRow(bars) for name, bars in rows.items()}, end, ACTIONS, idle="no action")
            drawn.append(Panel(entry.label, svg(chart)))
    return drawn


def _shares(entry: Entry) -> dict[str, float]:
    """Per cent of the workers' time by activity."""
    return {part: 100 * (entry.figure("time_share", part) or 0.0) for part in figures.SHARES}


def breakable(text: str) -> Markup:
    """Escapes `text`, and lets a browser break a long strategy after commas."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"(,)", r"\1<wbr>", str(escape(printable(text)))))  # noqa: S704  (escaped just here)


def _origin(entry: Entry) -> dict[str, str]:
    """The origin of a run, and the options that repeat it."""
    run, figures_ = entry.run, entry.figures
    return {
        "label": entry.label,
        "where": entry.place.heading,
        "seed": str(run.seed) if run.seed is not None else labels.NOTHING,
        "hash": str(figures_.get("params_sha256") or labels.NOTHING),
        "versions": ", ".join(f"{name} {number}" for name, number in run.versions.items()) or labels.NOTHING,
        "folder": str(run.path) if run.path else labels.NOTHING,
        "config": to_json(_written(run), indent=2) if run.config else "",
    }


def _written(run: RunRecord) -> dict[str, Any]:
    """The options of a run that are not defaults; of an older record, those that have a value."""
    if run.written:
        return {name: run.config[name] for name in run.written if name in run.config and name != "out"}
    return {name: value for name, value in run.config.items() if value not in (None, "", False, [])}
