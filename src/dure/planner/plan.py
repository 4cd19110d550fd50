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
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dure.core.spec_text import machines_in_line
from dure.core.user_code import explain_user_errors
from dure.errors import DureError, UsageError
from dure.job.initial_model import is_on_meta, numel_of, shapes_of
from dure.job.job import load_job
from dure.job.validation import try_to_count, validate_job
from dure.planner.answer import Ranking
from dure.planner.candidates import CODECS, ONE, PLAIN, Scene
from dure.planner.commands import command_of, script_of
from dure.planner.explain import (
    bottlenecks,
    crowded,
    no_answer,
    unstated,
    valueless,
    why,
    would_change,
    written_from_sends,
)
from dure.planner.fact_ranges import fact_ranges
from dure.planner.job_profile import calibrated, profile_job
from dure.planner.learning import LearningCurve, learned, unreached
from dure.planner.options import PlanOptions
from dure.planner.ranking import Ranked
from dure.planner.search import Found, search
from dure.planner.side_by_side import Deadline
from dure.planner.sweeps import sweeps
from dure.planner.timing import timed
from dure.run.prebuilt import named, placed
from dure.run.step_shape import referred
from dure.run.strategy import by_axis
from dure.runtime.virtual.cluster import Cluster

if TYPE_CHECKING:
    from dure.job.job import Job

SEARCH, EXPLAIN, FACTS, SWEEP, CHANGE = 0.6, 0.25, 0.5, 0.65, 0.5
"""Shares of the parts of a plan, in turn, in the seconds that are left: of the candidates, their bottlenecks, open
facts, sweeps, and stragglers. The rest is for the answer."""

SHOWN, SWEPT = 10, 6
"""Strategies with a bottleneck in the answer, and those of the sweeps."""

LARGE = 50_000_000
"""Parameters of a model from which on a plan computes with its shapes only."""

Say = Callable[[str, int, int | None], None]
"""Receives the part of the planning, and how much of it is done, of how much."""


def plan(job: str | Job, *, on: str | Cluster = "", **options: Any) -> Ranking:
    """Rank the strategies for `job` on a cluster. Seconds are predicted, in virtual time.

    `job` is a built-in name, `"FILE.py:FUNCTION"`, or a `Job`. `on` is a cluster file, a `Cluster`, or "virtual" (a
    uniform cluster); if it is left out, this machine is measured. `options` are those of
    the command `dure plan`, by name.

    Raises:
        UsageError: an option is wrong, or no strategy fits; the message has the smallest change with which one fits.
    """
    (place, cluster), (name, given) = placed(on), named(job)
    return planned(
        PlanOptions.of(
            {**options, "job": name if given is None else name or "job", "on": place if cluster is None else ""}
        ),
        given,
        cluster,
    )


def planned(
    config: PlanOptions, job: Job | None = None, cluster: Cluster | None = None, say: Say = lambda *_: None
) -> Ranking:
    """Rank the strategies that `config` asks for; `job` and `cluster` are objects in place of its names."""
    deadline = Deadline(config.within)
    scene = scene_of(config, job, cluster, say)
    found = search(scene, deadline.part(SEARCH), lambda done, of, strategy: say(f"timing {strategy}", done, of))
    if not found.has_answer:
        raise UsageError(no_answer(scene, found, config.within))
    target, curves = config.goal, {}
    if target is not None:
        best = [row.strategy for row in _families(found.rows, config.learn, lambda row: tuple(_names(row, "sync")))]
        curves = learned(scene, best, target, config.steps, say)
        found.rows = _with_targets(found, curves)
        deadline = Deadline((1 - SEARCH) * config.within)  # those runs have taken their own time
    shown = _families(found.rows, SHOWN, lambda row: row.strategy)
    say("timing the best without the network, and with equal workers", 0, None)
    causes = bottlenecks(scene, shown, deadline.part(EXPLAIN))
    winner = found.rows[0].strategy
    spans = timed(scene, winner, trace=True).spans  # what it measures of the model, later timings inherit
    open_ranges = fact_ranges(scene, found, _varied(found, config.vary), deadline.part(FACTS), say)
    families = _families(found.rows, SWEPT, lambda row: (*_names(row, "sync"), *_names(row, "partition")))
    ordered = sorted((row.strategy for row in families), key=found.order.index)
    say("sweeping bandwidths, workers and batches", 0, None)
    swept = sweeps(scene, ordered, deadline.part(SWEEP))
    scaled = {name for name, curve in curves.items() if curve.scaled}
    commands = {row.strategy: command_of(scene, config, row, scaled=row.strategy in scaled) for row in found.rows}
    script = script_of(commands[winner], scene.job, named=job is None and scene.has_values) if winner == PLAIN else None
    return Ranking(
        scene=scene,
        on=config.on or "this machine",
        found=found,
        bottlenecks=causes,
        why=[*why(found, causes), *unreached(curves, target), *_cautions(scene, winner), *valueless(scene)],
        would_change=would_change(scene, found.rows, swept, deadline.part(CHANGE)),
        sweeps=swept,
        open=open_ranges,
        curves=curves,
        commands=commands,
        target=target,
        spans=spans,
        ddp_script=script,
    )


def _cautions(scene: Scene, winner: str) -> list[str]:
    return [*crowded(scene), *unstated(scene), *written_from_sends(scene, winner)]


def scene_of(config: PlanOptions, job: Job | None, cluster: Cluster | None, say: Say) -> Scene:
    """The job and the cluster that `config` names. This machine is measured if it names none."""
    if job is None:
        if not config.job:
            raise UsageError("no job is named. Write, for example, dure plan digits-mlp.")
        job = load_job(config.job, config.data, batch_size=config.batch_size)
    if job.companions is not None:
        raise UsageError(
            f"{job.name} learns from what actors experience, and a plan knows training from data only. Compare "
            f"strategies by runs: dure compare {config.job or job.name} --strategy bsp --strategy averaging "
            "--workers 2 --on virtual."
        )
    name = config.job or job.name or "the job"
    here = cluster is None and config.on in ("", "local")
    if here and not is_on_meta(job):
        validate_job(job, name, rows=config.batch_size or job.batch_size)  # before this machine is measured with it
    if cluster is None:
        cluster = _cluster(config, job, say)
    if config.workers not in (None, cluster.workers):
        raise UsageError(
            f"--workers {config.workers} was asked for, and the cluster has {cluster.workers}. Leave --workers out, or "
            "describe machines with as many workers."
        )
    has_values = not is_on_meta(job)
    if is_on_meta(job) or (config.goal is None and not here):
        job = _without_values(job)
    try_to_count(job, name)
    times = None
    if not here:
        cluster = referred(cluster, job)
    elif cluster.states_seconds and not is_on_meta(job):
        say("measuring the job's blocks", 0, None)
        profile = profile_job(job)
        cluster, times = calibrated(cluster, job, profile), profile.times
    return Scene(job, cluster, (config.batch_size or job.batch_size) * cluster.workers, times, config.steps, has_values)


def _without_values(job: Job) -> Job:
    """`job` with shapes only, where its model is large or its data have no values."""
    try:
        with explain_user_errors("its model() raised"):
            return shapes_of(job) if is_on_meta(job) or numel_of(job) > LARGE else job
    except DureError:  # a model that needs values, or a wrong one
        return job


def _cluster(config: PlanOptions, job: Job, say: Say) -> Cluster:
    if config.on == "virtual":
        return Cluster.uniform(config.workers or 4)
    if config.on and config.on != "local":
        if not Path(config.on).is_file() and machines_in_line(config.on) is None:
            raise UsageError(
                f'"{config.on}" is no place of a plan and no file: write virtual, the path of a cluster file, '
                'machines as "4x8 v100-sxm2-16gb @ 100 Gbit/s", or leave --on out for this machine.'
            )
        return Cluster.described(config.on)
    from dure.planner.probe.probe import probe

    say("measuring this machine", 0, None)
    found = probe(job, workers=config.workers or 4, codecs=CODECS, name=config.job, data=config.data, curves=False)
    assert found is not None
    cluster: Cluster = found["cluster"]
    return cluster


def _families(rows: Sequence[Ranked], count: int, family: Callable[[Ranked], object]) -> list[Ranked]:
    """The first row of each family, at most `count` of them, plain data parallelism and one machine."""
    best: dict[object, Ranked] = {}
    for row in rows:
        best.setdefault(family(row), row)
    found = list(best.values())[:count]
    return found + [row for row in rows if row.strategy in (ONE, PLAIN) and row not in found]


def _varied(found: Found, count: int) -> list[Ranked]:
    """The rows that are timed over open facts: the answer, plain data parallelism, one machine, and the next best."""
    rows = _families(found.rows, count, lambda row: row.strategy)
    return sorted(rows, key=lambda row: (row is not found.rows[0], row.strategy not in (PLAIN, ONE)))


def _names(row: Ranked, axis: str) -> list[str]:
    """The names of the members of an axis, without their parameters."""
    if row.strategy == ONE:
        return [ONE]
    return [part.partition(":")[0] for part in by_axis(row.strategy).get(axis, "").split("+")]


def _with_targets(found: Found, curves: Mapping[str, LearningCurve]) -> list[Ranked]:
    from dure.planner.ranking import with_target

    rows = [
        with_target(row, curves[row.strategy].seconds_to_target) if row.strategy in curves else row
        for row in found.rows
    ]
    return replace(found, rows=rows).ranked
