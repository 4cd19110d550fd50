"""`dure plan`: the strategies that suit a job on a cluster, in the order of their rank, with reasons.

    plan(PlanOptions(job="mnist-cnn", on="cluster.yaml"))

    1  scene        the job, and the cluster: from a file, uniform, or this machine, which is measured
    2  search       candidates of all catalogues, timed by timing-only virtual runs (`search.py`)
    3  learning     optional: the best few with real gradients in virtual time, up to a target (`learning.py`)
    4  answer       order, bottlenecks, reasons, sweeps (`ranking.py`, `explain.py`, `sweeps.py`)

All seconds are virtual: predictions by the model of the cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dure.errors import UsageError
from dure.job.initial_model import is_on_meta
from dure.job.job import load_job
from dure.planner.answer import Ranking
from dure.planner.calibration import calibrated, is_measured
from dure.planner.candidates import PLAIN
from dure.planner.commands import command_of
from dure.planner.deadline import Deadline
from dure.planner.explain import bottleneck, why, would_change
from dure.planner.fitting import smallest_change
from dure.planner.job_profile import profile_job
from dure.planner.learning import LearningCurve, learned
from dure.planner.options import PlanOptions
from dure.planner.ranking import Ranked, in_order
from dure.planner.scene import Scene
from dure.planner.search import Found, search
from dure.planner.sweeps import sweeps
from dure.planner.timing import timed
from dure.runtime.virtual.cluster import Cluster

if TYPE_CHECKING:
    from dure.job.job import Job

SHOWN = 10
"""Strategies with a bottleneck in the answer, and in the sweeps."""

Say = Callable[[str, int, int | None], None]
"""Receives the part of the planning, and how much of it is done, of how much."""


def plan(job: str | Job, *, on: str | Cluster = "", **options: Any) -> Ranking:
    """Rank the strategies for `job` on a cluster. Seconds are predicted, in virtual time.

    `job` is a built-in name, `"FILE.py:FUNCTION"`, or a `Job`. `on` is a cluster file, a `Cluster`, or "virtual" (a
    uniform cluster); if it is left out, this machine is measured. `options` are those of `options.PlanOptions`.

    Raises:
        UsageError: an option is wrong, or no strategy fits; the message has the smallest change with which one fits.
    """
    name, given = (job, None) if isinstance(job, str) else (job.name or "job", job)
    place, cluster = (on, None) if isinstance(on, str) else ("", on)
    return planned(PlanOptions(job=name, on=place, **options), given, cluster)


def planned(
    config: PlanOptions, job: Job | None = None, cluster: Cluster | None = None, say: Say = lambda *_: None
) -> Ranking:
    """Rank the strategies that `config` asks for; `job` and `cluster` are objects in place of its names."""
    scene = scene_of(config, job, cluster, say)
    found = search(scene, config.within, lambda done, of, strategy: say(f"timing {strategy}", done, of))
    if not found.rows:
        raise UsageError(smallest_change(scene, found.refused))
    target, curves = config.goal, {}
    if target is not None:
        best = [row.strategy for row in _to_learn(found.rows, config.learn)]
        curves = learned(scene, best, target, config.steps, say)
        found.rows = _with_targets(found, curves)
    shown = _shown(found)
    bottlenecks = {}
    for number, row in enumerate(shown):
        say(f"explaining {row.strategy}", number, len(shown))
        bottlenecks[row.strategy] = bottleneck(scene, row)
    ordered = sorted((row.strategy for row in shown[:SHOWN]), key=found.order.index)
    say("sweeping bandwidths, workers and batches", 0, None)
    swept = sweeps(scene, ordered, Deadline(config.within / 2))
    commands = {row.strategy: command_of(scene, config, row) for row in found.rows}
    return Ranking(
        scene=scene,
        on=config.on or "this machine",
        found=found,
        bottlenecks=bottlenecks,
        why=why(found.rows, bottlenecks),
        would_change=would_change(scene, found.rows, swept),
        sweeps=swept,
        curves=curves,
        commands=commands,
        target=target,
        spans=timed(scene, found.rows[0].strategy, trace=True).spans,
    )


def scene_of(config: PlanOptions, job: Job | None, cluster: Cluster | None, say: Say) -> Scene:
    """The job and the cluster that `config` names. This machine is measured if it names none."""
    if job is None:
        if not config.job:
            raise UsageError("no job is named. Write, for example, dure plan digits-mlp.")
        job = load_job(config.job, config.data, batch_size=config.batch_size)
    if cluster is None:
        cluster = _cluster(config, job, say)
    if config.workers not in (None, cluster.workers):
        raise UsageError(
            f"--workers {config.workers} was asked for, and the cluster has {cluster.workers}. Leave --workers out, or "
            "describe machines with as many workers."
        )
    times = None
    if is_measured(cluster) and not is_on_meta(job):
        say("measuring the job's blocks", 0, None)
        profile = profile_job(job)
        cluster, times = calibrated(cluster, job, profile), profile.times
    return Scene(job, cluster, (config.batch_size or job.batch_size) * cluster.workers, times)


def _cluster(config: PlanOptions, job: Job, say: Say) -> Cluster:
    if config.on == "virtual":
        return Cluster.uniform(config.workers or 4)
    if config.on and config.on != "local":
        if not Path(config.on).is_file():
            raise UsageError(
                f'"{config.on}" is no place of a plan and no file: write virtual, the path of a cluster file, or leave '
                "--on out for this machine."
            )
        return Cluster.from_yaml(config.on)
    from dure.planner.probe.probe import probe

    say("measuring this machine", 0, None)
    found = probe(job, workers=config.workers or 4, codecs=(), name=config.job, data=config.data)
    assert found is not None
    cluster: Cluster = found["cluster"]
    return cluster


def _to_learn(rows: Sequence[Ranked], count: int) -> list[Ranked]:
    """The best rows, of each method the first, and plain data parallelism."""
    best: list[Ranked] = []
    methods: set[str] = set()
    for row in rows:
        method = row.strategy.split()[0].partition(":")[0]
        if row.strategy == PLAIN or (method not in methods and len(best) < count):
            best.append(row)
            methods.add(method)
    return best


def _with_targets(found: Found, curves: Mapping[str, LearningCurve]) -> list[Ranked]:
    from dure.planner.ranking import with_target

    rows = [
        with_target(row, curves[row.strategy].seconds_to_target) if row.strategy in curves else row
        for row in found.rows
    ]
    return in_order(sorted(rows, key=lambda row: found.order.index(row.strategy)))


def _shown(found: Found) -> list[Ranked]:
    """The first rows, and plain data parallelism if it is none of them."""
    first = found.rows[:SHOWN]
    return [*first, *(row for row in found.rows[SHOWN:] if row.strategy == PLAIN)]
