"""The same job under several strategies, and one report of all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dure.core.packages import extra_is_there, import_extra
from dure.core.target import Target
from dure.core.text import log
from dure.errors import DivergedError, UsageError
from dure.report.files import Unwritten
from dure.run.config import FEW, CompareConfig, goal

if TYPE_CHECKING:
    from dure.job.job import Job
    from dure.report.run import Run
    from dure.run.config import TrainConfig
    from dure.run.prebuilt import Prebuilt
    from dure.run.strategy import Strategy
    from dure.runtime.virtual.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Comparison:
    """Finished runs, in the order in which they were asked for, and the file of their report, if it was written.

    `target` is the accuracy or loss whose time is compared.
    """

    runs: Sequence[Run]
    report: Path | None
    target: Target = Target()

    def summary(self) -> dict[str, Any]:
        """The JSON of `dure compare`."""
        return {
            "runs": [run.summary() for run in self.runs],
            "report": None if self.report is None else str(self.report),
        }

    def _repr_html_(self) -> str | None:
        """The tables and the curves of the runs, which a notebook shows."""
        from dure.report.html import display

        return display(self.runs, self.target)


def compare(
    job: str | Job, *strategies: str, on: str | Cluster | Sequence[str] = "local", **options: Any
) -> Comparison:
    """Train `job` under each of `strategies` in each place of `on`, and write a report.

    If no strategy is given, here or as the option of that name, `bsp`, `averaging:period=8`, `ssp:bound=3` and
    `downpour` are compared. `options` are those of the command `dure compare`, by name. Raises the errors of `train`,
    apart from `DivergedError`: the report says which run diverged.
    """
    by_name = options.get("strategies", ())
    if strategies and by_name:
        raise UsageError(f"strategies are given by place, {strategies}, and by name, {by_name}: give them once.")
    from dure.run.prebuilt import Prebuilt, named, placed

    (place, cluster), (name, given) = placed(on), named(job)
    if isinstance(place, list | tuple):
        place = [placed(each)[0] for each in place]
    config = CompareConfig.of({**options, "job": name, "strategies": strategies or by_name, "on": place})
    return run_all(config, Prebuilt(given, cluster))


def run_all(config: CompareConfig, prebuilt: Prebuilt) -> Comparison:
    """The runs of `config`, one after another. All strategies are checked before the first starts.

    A run that diverges keeps the rows that were computed. The others go on.
    """
    from dure.report.html import DEFAULT, free, write_report
    from dure.run.train import run, short_name

    if config.report is not None:
        import_extra("report", "--report")
    configs = list(config.runs())
    strategies = [each.chosen() for each in configs]
    if not config.strategies:
        log.warning("no strategy is named: comparing %s. `dure methods` lists all methods.", ", ".join(FEW))
    if config.report is None and not extra_is_there("report"):
        log.warning('no report is written: it needs pip install "dure[report]"')
    others = tuple(short_name(strategy, each) for each, strategy in zip(configs, strategies, strict=True))
    runs: list[Run] = []
    for each, strategy in zip(configs, strategies, strict=True):
        told = any(before.config["on"] == each.on for before in runs)
        try:
            runs.append(run(each, replace(prebuilt, strategy=strategy, told=told, others=others)))
        except DivergedError as error:
            log.warning("%s is compared as diverged: %s", strategy, error)
            runs.append(_diverged(each, strategy, error))
    target = goal(config.target, config.target_loss)
    path = config.report or (free(DEFAULT) if extra_is_there("report") else None)
    if path is None:
        return Comparison(runs, None, target)
    unwritten = Unwritten()
    with unwritten.tolerated(str(path)):
        write_report(path, runs, title=f"{config.job}: {len(runs)} runs", target=target)
    return Comparison(runs, None if unwritten.causes else path, target)


def _diverged(config: TrainConfig, strategy: Strategy, error: DivergedError) -> Run:
    """The record of a run that ended with `error`: the figures of its last row, a loss of NaN and the sentence."""
    from dure.report.record import versions
    from dure.report.run import Run

    run = Run(config.plain(), error.history, {}, config.out, versions(), config.seeded, written=config.written())
    names = {"job": config.job, "strategy": strategy.text(), "on": config.on, "workers": config.workers}
    return replace(run, figures={**names, **run.summary(), "loss": math.nan, "diverged": str(error)})
