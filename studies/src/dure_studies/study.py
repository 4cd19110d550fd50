"""A study: runs of several settings with several seeds, and statements that each seed confirms or refutes.

`dure reproduce NAME` finds the `STUDY` of a module, and calls `reproduce` and `table` of it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from dure.core.regular_file import check_output
from dure.core.target import Target
from dure.errors import DivergedError
from dure_studies.flags import DATA, OUT, ROUNDS, SEEDS, check_counts
from dure_studies.output import Row as Row
from dure_studies.output import draw, judged, spread, statement_table, table_of

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from dure.job.job import Job
    from dure.report.figures import Band
    from dure.report.run import Run
    from dure.runtime.virtual.cluster import Cluster

OfSeed = Mapping[str, Row]
"""Rows of one seed, by the names of their settings."""

EVALUATIONS = 25
TUNING_SEED = 1000
"""The seed of the runs that choose a learning rate: none of the seeds that are reported."""


class Statement(NamedTuple):
    """A sentence, and whether the rows of one seed agree with it."""

    text: str
    holds: Callable[[OfSeed], bool]


def less(text: str, figure: str, small: str, large: str) -> Statement:
    """The statement that `figure` of the setting `small` is less than that of the setting `large`."""
    return Statement(text, lambda rows: bool(rows[small][figure] < rows[large][figure]))


@dataclass(frozen=True)
class Setting:
    """A strategy on a cluster, with `options` of `dure.train`. `at` is its place on the horizontal axis of `line`."""

    strategy: str
    cluster: Cluster
    _: KW_ONLY
    options: Mapping[str, Any] = field(default_factory=dict)
    share: float = 1.0
    """Steps of a worker, as a share of the study's rounds."""
    panel: str = ""
    line: str = ""
    at: float | None = None
    job: str = ""
    """The job, if another than the study's."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Values that `Study.measure` needs beside the options."""
    rates: Sequence[float] = ()
    """Learning rates, of which `at_best_rate` chooses one. "{lr}" in `strategy` stands for it."""

    def at_rate(self, lr: float) -> Setting:
        """This setting with one learning rate."""
        text = self.strategy.format(lr=lr)
        return replace(self, strategy=text, options={**self.options, "lr": lr}, rates=())

    def train(self, job: Job, *, seed: int, **options: Any) -> Run:
        """A run of this setting in virtual time, with `options` of `dure.train` beside its own."""
        from dure.run.train import train

        return train(job, strategy=self.strategy, on=self.cluster, seed=seed, **options | dict(self.options))


class FigureColumn(NamedTuple):
    """A figure of the rows: its name there, its heading, and how to write its mean over seeds."""

    figure: str
    heading: str
    form: str

    def cell(self, rows: Sequence[Row]) -> str:
        """The mean over seeds, or the share of seeds without a value."""
        values = [float(row[self.figure]) for row in rows if row.get(self.figure) is not None]
        known = [value for value in values if math.isfinite(value)]
        diverged = sum(row.get("why") == "diverged" for row in rows)
        if not values:
            return ""
        if diverged:
            return f"diverged: {diverged} of {len(rows)}"
        if len(known) < len(rows):
            return f"not reached: {len(rows) - len(known)} of {len(rows)}"
        return self.form.format(statistics.fmean(known))


LEARNT = (
    FigureColumn("lr", "rate", "{:g}"),
    FigureColumn("accuracy", "accuracy", "{:.2%}"),
    FigureColumn("seconds", "seconds", "{:.3g}"),
    FigureColumn("seconds_to_target", "seconds to target", "{:.3g}"),
    FigureColumn("samples_to_target", "samples to target", "{:,.0f}"),
    FigureColumn("megabytes", "MB sent", "{:,.1f}"),
    FigureColumn("staleness", "staleness", "{:.2f}"),
    FigureColumn("loss", "loss", "{:.4f}"),
)
"""The figures that `learnt` gives. A study shows some of them."""

DIVERGED: Mapping[str, Any] = {
    "accuracy": 0.0,
    "best_accuracy": 0.0,
    "loss": math.inf,
    "seconds": math.nan,
    "steps": math.nan,
    "seconds_to_target": math.inf,
    "samples_to_target": math.inf,
    "megabytes": math.nan,
    "staleness": math.nan,
    "why": "diverged",
    "history": (),
}
"""Figures of a run that diverged, such that it loses each comparison."""

Measure = Callable[["Study", Any, Setting, int, int], Row]
"""Gives the figures of a setting: of the study, on a job or None, with a number of rounds and a seed."""


def at_best_rate(study: Study, job: Any, setting: Setting, rounds: int) -> Setting:
    """The setting at the one of its rates that is fastest to the target, or if none reaches it, most accurate."""
    if not setting.rates:
        return setting
    found = {lr: study.measure(study, job, setting.at_rate(lr), rounds, TUNING_SEED) for lr in setting.rates}
    return setting.at_rate(min(found, key=lambda lr: (found[lr]["seconds_to_target"], -found[lr]["accuracy"])))


def learnt(study: Study, job: Job, setting: Setting, rounds: int, seed: int) -> Row:
    """Figures of a run with real gradients in virtual time; `seconds_to_target` is infinite where none reached it."""
    steps = max(1, round(rounds * setting.share))
    try:
        run = setting.train(job, seed=seed, steps=steps, eval_every=max(1, steps // EVALUATIONS), exact=True)
    except DivergedError:
        return dict(DIVERGED)
    return figures(run, study.target)


def figures(run: Run, target: float) -> Row:
    """The figures of a run by which settings are compared, with its history."""
    from dure.report.metrics import time_to

    summary = run.summary()
    seconds = time_to(run.history, Target(target))
    samples = next((row["samples"] for row in run.history if row.get("accuracy", 0.0) >= target), math.inf)
    return {
        **{name: summary[name] for name in ("accuracy", "best_accuracy", "loss", "seconds", "steps")},
        "seconds_to_target": math.inf if seconds is None else seconds,
        "samples_to_target": samples,
        "megabytes": summary["bytes_sent"] / 1e6,
        "staleness": summary["staleness"]["mean"],
        "why": "",
        "history": [{name: row.get(name) for name in ("step", "seconds", "accuracy", "loss")} for row in run.history],
    }


@dataclass(frozen=True, kw_only=True)
class Study:
    """Settings that are measured with each seed, statements about them, and a picture.

    `x` is "seconds" or "step" for curves of `y` over a run, or the heading of the axis of `Setting.at`.
    """

    name: str
    about: str
    """The caption of the table: job and source."""
    nature: str = "Seconds are virtual, gradients are real."
    settings: Callable[[], Mapping[str, Setting]]
    statements: Sequence[Statement]
    columns: Sequence[str | FigureColumn] = ("accuracy", "seconds", "seconds_to_target", "megabytes")
    """Figures of `LEARNT` by name, and others."""
    rounds: int = 500
    seeds: int = 3
    target: float = 0.9
    job: str = "mnist-mlp"
    """Empty for none."""
    measure: Measure = learnt
    x: str = "seconds"
    y: str = "accuracy"
    quick: Mapping[str, Any] = field(default_factory=lambda: {"rounds": 100, "seeds": 1})

    def reproduce(
        self,
        *,
        rounds: Annotated[int | None, ROUNDS] = None,
        seeds: Annotated[int | None, SEEDS] = None,
        data: Annotated[Path | None, DATA] = None,
        out: Annotated[Path | None, OUT] = None,
    ) -> dict[str, Any]:
        """Measure each setting with each seed; draw to `out`. `rounds` are steps of each worker.

        `statements` has for each sentence how many seeds confirm it.

        Raises `UsageError` for numbers that do not fit, `DataError` if data is missing; both before the training.
        """
        rounds = self.rounds if rounds is None else rounds
        seeds = self.seeds if seeds is None else seeds
        out = Path(f"{self.name}.svg") if out is None else out
        check_counts(rounds=rounds, seeds=seeds)
        check_output(out)
        given = self.settings()
        jobs = self._jobs(given.values(), data)
        job_of = {name: jobs[setting.job or self.job] for name, setting in given.items()}
        settings = {name: at_best_rate(self, job_of[name], setting, rounds) for name, setting in given.items()}
        rows = [
            {"setting": name, "seed": seed, "lr": setting.options.get("lr")}
            | self.measure(self, job_of[name], setting, rounds, seed)
            for name, setting in settings.items()
            for seed in range(seeds)
        ]
        drawn = self._draw(out, settings, rows)
        for row in rows:
            row.pop("history", None)
        return {
            "reproduce": self.name,
            "time": "virtual",
            "rounds": rounds,
            "seeds": seeds,
            "target": self.target,
            "data": "; ".join(sorted(job.source for job in jobs.values() if job is not None)),
            "picture": str(out) if drawn else "",
            "rows": rows,
            "statements": [_judged(statement, rows) for statement in self.statements],
        }

    def _jobs(self, settings: Iterable[Setting], data: Path | None) -> Mapping[str, Job | None]:
        from dure.job.job import load_job

        texts = {each.job or self.job for each in settings}
        return {text: load_job(text, data) if text else None for text in texts}

    def table(self, result: dict[str, Any]) -> Group:
        """A row for each setting with means over seeds, and a row for each statement."""
        from rich.console import Group

        return Group(self._figures_table(result), statement_table(result))

    def _figures_table(self, result: Row) -> Table:
        named = {column.figure: column for column in LEARNT}
        columns = [named[each] if isinstance(each, str) else each for each in self.columns]
        aims = any(column.figure.endswith("_to_target") for column in columns)
        target = f"; target: an accuracy of {result['target']:.0%}" if aims else ""
        picture = f" Picture: {result['picture']}" if result["picture"] else ""
        caption = (
            f"{self.about} Rounds: {result['rounds']}; means of {result['seeds']} seeds{target}. {self.nature}{picture}"
        )
        cells = [("setting", lambda own: str(own[0]["setting"])), *((each.heading, each.cell) for each in columns)]
        return table_of(_by_setting(result["rows"]).values(), cells, caption, texts=("setting",))

    def _draw(self, path: Path, settings: Mapping[str, Setting], rows: Sequence[Row]) -> bool:
        """Draw what has a place on an axis; False where nothing has."""
        from dure.report.figures import Band

        panels: dict[tuple[str, str], list[Band]] = {}
        points: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
        for name, own in _by_setting(rows).items():
            setting = settings[name]
            place, line = (self.y, setting.panel or self.name), setting.line or name
            if own[0].get(self.y if setting.at is not None else "history") is None:
                continue
            if setting.at is None:
                panels.setdefault(place, []).append(Band(line, *_curve(own, self.x, self.y)))
            else:
                values = [row[self.y] for row in own]
                found = points.setdefault((place[1], line), [])
                if all(map(math.isfinite, values)):
                    found.append((setting.at, statistics.fmean(values), spread(values)))
        for (panel, line), found in points.items():
            places, means, spreads = ([each[column] for each in found] for column in range(3))
            panels.setdefault((self.y, panel), []).append(Band(line, places, means, spreads))
        if panels:
            draw(path, panels, x=self.x, y="", percent=self.y == "accuracy")
        return bool(panels)


def _judged(statement: Statement, rows: Sequence[Row]) -> dict[str, Any]:
    seeds = sorted({row["seed"] for row in rows})
    by_seed = [{row["setting"]: row for row in rows if row["seed"] == seed} for seed in seeds]
    return judged(statement.text, [bool(statement.holds(each)) for each in by_seed])


def _by_setting(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["setting"], []).append(row)
    return found


def _curve(rows: Sequence[Row], x: str, y: str) -> tuple[list[float], list[float], list[float]]:
    """Places, means and spreads of `y` over those evaluations that each seed has."""
    columns = list(zip(*(row["history"] for row in rows if row["history"]), strict=False))
    places = [statistics.fmean(point[x] for point in column) for column in columns]
    values = [[point[y] for point in column] for column in columns]
    return places, [statistics.fmean(each) for each in values], [spread(each) for each in values]
