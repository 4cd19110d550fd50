"""Timing of a strategy in a scene, by a timing-only run in virtual time: the code of the method itself, no formula.

The speed is the sum of the workers' speeds in the steady state (`step_times.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dure.core.deployment import SERVER, WORKER
from dure.partition.memory import MemoryUse
from dure.partition.mesh import parts_of, pipeline_of
from dure.planner.alike import simulated_workers
from dure.planner.step_times import StepTimes
from dure.planner.unaligned import unaligned
from dure.run.callbacks import Callbacks
from dure.run.config import TrainConfig
from dure.run.outcome import Outcome, Totals
from dure.run.prebuilt import Prebuilt
from dure.run.resolve import resolve
from dure.run.strategy import Strategy
from dure.run.virtual import VirtualRun
from dure.run.workers import memory_use
from dure.runtime.virtual.compute import Constant
from dure.sync.base import Periodic, traits_of
from dure.topology.collective.choice import Collective

if TYPE_CHECKING:
    from dure.core.meter import Span
    from dure.planner.scene import Scene
    from dure.run.setup import Setup
    from dure.runtime.virtual.cluster import Cluster

TOGETHER, APART, RANDOM = 1, 16, 60
"""Measured steps of each worker at least, and one period of the method: of workers in lockstep, whose periods are equal
in the steady state, of others, and of durations drawn at random."""

ENOUGH, LONGER, MOST = 8, 8, 4000
"""Steps with messages that suffice, factor of the steps where there are fewer, and steps that are not multiplied."""


@dataclass(frozen=True, slots=True)
class Timing:
    """A strategy in a scene, in virtual time. `seconds` are those of a step of all workers.

    `samples_per_second` counts the samples whose gradients are applied. `bytes_per_step` are the payload bytes that a
    worker sends in such a step, `staleness` is the mean of the applied updates, `memory` that of the largest worker.
    `shares` are shares of the workers' time: compute, communicate, wait. `worker_machines` counts
    machines of workers, `server_machines` machines of servers alone.
    """

    seconds: float
    samples_per_second: float
    bytes_per_step: float
    staleness: float
    shares: dict[str, float]
    memory: MemoryUse
    batch_size: int
    copies: int
    worker_machines: int
    server_machines: int
    spans: tuple[Span, ...] = ()


def timed(scene: Scene, strategy: str, *, trace: bool = False) -> Timing:
    """Time `strategy` in `scene`. Raises `UsageError` where the strategy does not work there or does not fit."""
    setup = setup_in(scene, strategy, trace=trace)
    memory, simulated = largest_memory(setup), simulated_workers(setup, scene.cluster)
    cluster = _running(scene.cluster, setup.strategy)
    outcome, stepped = _run(setup, cluster, simulated)
    while setup.topology.graph is not None and stepped.sendings < ENOUGH and setup.steps < MOST:
        # exchanges behind the computation that take many steps
        setup = setup_in(scene, strategy, trace=trace, steps=LONGER * setup.steps)
        outcome, stepped = _run(setup, cluster, simulated)
    sizes, alike = setup.batch_sizes, setup.workers // simulated
    speed = alike * sum(sizes[setup.replica_of(worker)] * each for worker, each in stepped.steps_per_second().items())
    applied = speed * _applied(outcome.totals, stepped.count)
    step = scene.batch / applied
    return Timing(
        seconds=step,
        samples_per_second=applied,
        bytes_per_step=stepped.bytes_per_second() * step / simulated,
        staleness=outcome.totals.staleness.mean,
        shares=_shares(outcome.totals),
        memory=memory,
        batch_size=sizes[0],
        copies=setup.workers // setup.parts,
        worker_machines=len(set(setup.machines)),
        server_machines=server_machines(setup, scene.cluster),
        spans=tuple(outcome.spans),
    )


def _run(setup: Setup, cluster: Cluster, simulated: int) -> tuple[Outcome, StepTimes]:
    stepped = StepTimes(_warm_of(setup.strategy), _period_of(setup.strategy))
    return VirtualRun(setup, cluster, Callbacks(stepped=stepped), simulated).run(), stepped


def setup_in(scene: Scene, strategy: str, *, trace: bool = False, steps: int | None = None) -> Setup:
    """The set-up of a timing-only run of `strategy` in `scene`, of so many `steps` or those of the steady state."""
    config = config_of(scene, strategy)
    chosen = config.chosen()
    steps = steps or _steps(chosen, scene.cluster)
    given = {**config.plain(), "steps": steps, "eval_every": steps, "timing_only": True}
    setup, _ = resolve(
        TrainConfig.of(given), Prebuilt(scene.job, scene.cluster, chosen, model=scene.model, times=scene.times)
    )
    object.__setattr__(setup.config, "trace", trace)
    if setup.stages is not None:
        setup.stages.measure()
    return setup


def config_of(scene: Scene, strategy: str) -> TrainConfig:
    """The configuration of a run of `strategy` in `scene`: each copy of the model has its share of the batch."""
    config = TrainConfig(job=scene.job.name or "job", strategy=strategy, on="virtual", workers=scene.workers)
    copies = scene.workers // parts_of(config.chosen().partition) or 1
    return TrainConfig.of({**config.plain(), "batch_size": max(1, scene.batch // copies)})


def largest_memory(setup: Setup) -> MemoryUse:
    """The memory of the worker that needs most."""
    return max((memory_use(setup, part) for part in range(setup.parts)), key=lambda use: use.total)


def server_machines(setup: Setup, cluster: Cluster) -> int:
    """The machines that servers have for themselves."""
    if cluster.host is not None:
        return 0
    places = setup.deployment.places()
    workers = {place for name, place in places.items() if name.startswith(WORKER)}
    return len({place for name, place in places.items() if name.startswith(SERVER)} - workers)


def _steps(strategy: Strategy, cluster: Cluster) -> int:
    constant = all(isinstance(kind.compute, Constant) for kind in cluster.machines)
    together, period = _together(strategy), _period_of(strategy)
    least = (TOGETHER if together else APART) if constant else RANDOM
    uneven = any(kind != cluster.machines[0] or not isinstance(kind.speed, float) for kind in cluster.machines)
    # fast workers end before slow ones have done the step after the last period, which would then not count
    spare = period if together and uneven and period > 1 else 0
    return _warm_of(strategy) + period * math.ceil(least / period) + 1 + spare


def _running(cluster: Cluster, strategy: Strategy) -> Cluster:
    return cluster if _together(strategy) else unaligned(cluster, lead=_period_of(strategy))


def _together(strategy: Strategy) -> bool:
    return traits_of(strategy.sync).lockstep or isinstance(strategy.topology, Collective)


def _period_of(strategy: Strategy) -> int:
    """The steps after which a method, or a pipeline, does again what it has done."""
    pipeline = pipeline_of(strategy.partition)
    period = strategy.sync.period if isinstance(strategy.sync, Periodic) else 1
    return math.lcm(period, 1 if pipeline is None or pipeline.flushes else pipeline.stages)


def _warm_of(strategy: Strategy) -> int:
    """The steps until a pipeline is full, until fast workers lead by the bound, or until all workers have begun."""
    pipeline = pipeline_of(strategy.partition)
    lead = getattr(strategy.sync, "bound", 0.0)
    return (
        1
        + (int(lead) if math.isfinite(lead) else 0)
        + (0 if _together(strategy) else _period_of(strategy))
        + (0 if pipeline is None or pipeline.flushes else 2 * pipeline.stages)
    )


def _applied(totals: Totals, steps: int) -> float:
    """The share of steps whose gradients are applied: methods with backup workers drop the others.

    A worker that is always too late ends no step, so its gradients are not among the `steps` of all workers.
    """
    counts = totals.counts
    return min(1.0, counts["updates_applied"] / steps) if counts["updates_refused"] else 1.0


def _shares(totals: Totals) -> dict[str, float]:
    spent = sum(totals.time.values())
    return {kind: seconds / spent if spent else 0.0 for kind, seconds in totals.time.items()}
