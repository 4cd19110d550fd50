"""`sync="auto"`: a plan chooses the strategy of a run.

    dure.train("mnist-cnn", sync="auto", on="cluster.yaml")

The candidates are timed for the run's job, cluster and batch, as by `dure plan`, and the run has the first of those of
all workers. Where one machine alone is as good, the line about the choice says so. Its mini-batches are such that all
workers together have as many samples in a step as with plain data parallelism.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dure.core.text import log
from dure.errors import UsageError
from dure.planner.candidates import ONE, PLAIN
from dure.planner.explain import no_answer
from dure.planner.options import PlanOptions
from dure.planner.plan import Say, scene_of
from dure.planner.search import Found, search
from dure.planner.side_by_side import Deadline
from dure.planner.timing import config_of
from dure.run import train as runs
from dure.run.config import TrainConfig
from dure.run.places import is_started_outside
from dure.run.prebuilt import named, placed
from dure.run.strategy import AXES

if TYPE_CHECKING:
    from dure.job.job import Job
    from dure.report.run import Run
    from dure.runtime.virtual.cluster import Cluster

AUTO = "auto"

WITHIN = 30.0
"""Real seconds for the choice, by default."""


def train(job: str | Job, *, sync: Any = None, on: str | Cluster = "", within: float = WITHIN, **options: Any) -> Run:
    """Train `job` with several workers, for real or in virtual time; return its record.

    `job` is a name, as `"mnist-mlp"`, `"mnist-mlp:depth=7"` or `"FILE.py:FUNCTION"`, or a `Job`. A `Job` runs in
    virtual time only, because each process of a real run has to make the job by its name. `sync` is a method as text
    (`"ssp:bound=3"`) or as an object (`SSP(bound=3)`); with "auto" a plan of `within` seconds chooses the whole
    strategy. `on` is "local" (the default), "torchrun", "ray", "virtual", a cluster file, or a `Cluster`. `options` are
    the options of the command `dure train`, by name.

    Raises:
        UsageError: the options contradict each other; the message names the nearest that work.
        DivergedError: the loss is no longer a number.
        DeadlockError: every worker waits, and none can continue.
        DureError: no update was applied, or another reason that the message names.
    """
    if AUTO not in (sync, options.get("strategy")):
        return runs.train(job, sync=sync, on=on, **options)
    (place, cluster), (name, given) = placed(on), named(job)
    asked = TrainConfig.of({**options, "sync": sync, "on": place, "job": name})
    config, said = decided(asked, within, job=given, cluster=cluster)
    log.warning("%s", said)
    chosen = {"strategy": config.strategy, "batch_size": config.batch_size}
    return runs.train(job, on=on, **{**options, **chosen})


def decided(
    config: TrainConfig,
    within: float = WITHIN,
    *,
    job: Job | None = None,
    cluster: Cluster | None = None,
    say: Say = lambda *_: None,
) -> tuple[TrainConfig, str]:
    """`config` with the strategy of a plan that takes `within` seconds, and a line about the choice.

    Raises `UsageError` where other options choose a part of the strategy, and where no strategy fits.
    """
    _check(config)
    on = "" if config.on == "local" else config.on
    options = PlanOptions(
        job=config.job,
        workers=config.most_workers,
        on=on,
        batch_size=config.batch_size,
        data=config.data,
        within=within,
        steps=config.steps,
    )
    scene = scene_of(options, job, cluster, say)
    found = search(scene, Deadline(within), lambda done, of, strategy: say(f"timing {strategy}", done, of))
    if not found.of_all:
        raise UsageError(no_answer(scene, found, within))
    strategy = found.of_all[0].strategy
    size = config_of(scene, strategy).batch_size
    return replace(config, strategy=strategy, sync=None, batch_size=size, workers=scene.workers), _said(found)


def _check(config: TrainConfig) -> None:
    if config.resume is not None:
        raise UsageError("auto chooses a strategy, and a resumed run has one in its record: leave auto out.")
    if is_started_outside(config.on):
        raise UsageError(
            f"auto plans before workers start, and --on {config.on} has started them. Run dure plan on one machine, "
            "and give its strategy to all: --strategy TEXT."
        )
    if config.elastic is not None:
        raise UsageError(f"auto plans for a fixed number of workers, and {config.workers} were asked for: give one.")
    others = [axis for axis in AXES if getattr(config, axis) not in (None, AUTO)]
    others += ["strategy"] * (config.strategy not in ("", AUTO))
    if others:
        raise UsageError(
            f"auto chooses the whole strategy, and {others[0]}={getattr(config, others[0])} was asked for: leave "
            "one of them out."
        )


def _said(found: Found) -> str:
    best = found.of_all[0]
    plain = next((row for row in found.rows if row.strategy == PLAIN), best)
    speed = f"{best.timing.samples_per_second:,.0f} samples/s predicted"
    if best is not plain:
        speed += f", plain data parallelism {plain.timing.samples_per_second:,.0f}"
    left = f", {len(found.left)} not timed for lack of seconds" if found.left else ""
    alone = ". One machine alone is as good" if found.rows[0].strategy == ONE else ""
    return f"auto: {best.strategy} ({speed}; the best of {len(found.of_all)} strategies{left}){alone}"
