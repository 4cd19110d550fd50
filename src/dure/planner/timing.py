"""Timing of a strategy in a scene, by a timing-only run in virtual time: the code of the method itself, without values.

The speed of a worker is a number of its steps divided by their seconds. The steps that count come after the pipeline is
full (`warm` steps), are whole periods of the method, and end before the first worker has done its last step, since the
others would no longer meet it.

In virtual time all workers start at once, and workers of constant speed stay in step for hundreds of steps, in which
all messages meet at the servers. In a run of minutes they do not.

The speed of a strategy is the sum of the workers' speeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dure.codec.fp32 import Float32
from dure.core.deployment import SERVER, WORKER
from dure.partition.memory import MemoryUse
from dure.partition.mesh import parts_of, pipeline_of
from dure.planner.candidates import ONE, placed
from dure.run.config import TrainConfig
from dure.run.memory import of_workers
from dure.run.outcome import Outcome, Totals
from dure.run.prebuilt import Callbacks, Prebuilt
from dure.run.resolve import resolve
from dure.run.strategy import Strategy
from dure.run.virtual import VirtualRun
from dure.runtime.virtual.compute import Constant, LogNormal
from dure.sync.base import Periodic, traits_of
from dure.topology.collective.choice import Collective
from dure.topology.offers import offers_of

if TYPE_CHECKING:
    from dure.core.meter import Span
    from dure.planner.candidates import Scene
    from dure.run.setup import Setup
    from dure.runtime.virtual.cluster import Cluster
    from dure.sync.worker_state import WorkerState


class Window(NamedTuple):
    """A run of `steps`, of which whole periods count after the first `warm` ones."""

    warm: int
    period: int
    steps: int


class StepTimes:
    """Keeps the times of each worker's steps, and the bytes that all have sent at each step of the first that steps."""

    def __init__(self, warm: int, period: int) -> None:
        self._warm = warm
        self._period = period
        self._times: dict[int, list[float]] = {}
        self._sent: list[int] = []
        self._averaged: dict[int, list[int]] = {}

    def __call__(self, worker: WorkerState, now: float, sent: Callable[[], int]) -> None:
        """Note that a worker has finished a step."""
        self._times.setdefault(worker.number, []).append(now)
        if worker.sessions.peer is not None:
            self._averaged.setdefault(worker.number, []).append(worker.sessions.peer.averaged)
        if worker.number == next(iter(self._times)):
            self._sent.append(sent())

    @property
    def count(self) -> int:
        """The steps of all workers."""
        return sum(map(len, self._times.values()))

    @property
    def last(self) -> float:
        """The time of the last step of all workers."""
        return max(times[-1] for times in self._times.values())

    @property
    def exchanges(self) -> float:
        """The averages with neighbors, of a worker in each of the steps that count; 0 without gossip."""
        counted = averages = 0
        for worker, times in self._until_the_end().items():
            if worker in self._averaged:
                first, count = self._window(times)
                counted += count
                averages += self._averaged[worker][first + count] - self._averaged[worker][first]
        return averages / counted if counted else 0.0

    @property
    def sendings(self) -> int:
        """The steps that count, of the first worker, in which a worker has sent something."""
        first, count = self._window(next(iter(self._until_the_end().values())))
        sent = self._sent[first : first + count + 1]
        return sum(after > before for before, after in pairwise(sent))

    @property
    def equal_periods(self) -> bool:
        """Whether the periods that count last equally long at each worker."""
        for times in self._until_the_end().values():
            first, count = self._window(times)
            ends = times[first : first + count + 1 : self._period]
            lengths = [after - before for before, after in pairwise(ends)]
            if max(lengths, default=0.0) > (1 + UNEQUAL) * min(lengths, default=0.0):
                return False
        return True

    def steps_per_second(self) -> dict[int, float]:
        """The speed of each worker."""
        return {worker: _speed(times, *self._window(times)) for worker, times in self._until_the_end().items()}

    def bytes_per_second(self) -> float:
        """The bytes that all workers send in a second."""
        times = next(iter(self._until_the_end().values()))
        first, count = self._window(times)
        if count < 1:
            return self._sent[-1] / self._times[next(iter(self._times))][-1]
        return (self._sent[first + count] - self._sent[first]) / (times[first + count] - times[first])

    def _until_the_end(self) -> dict[int, Sequence[float]]:
        end = min(times[-1] for times in self._times.values())
        return {worker: [each for each in times if each <= end] for worker, times in self._times.items()}

    def _window(self, times: Sequence[float]) -> tuple[int, int]:
        """The first step that counts, and how many after it: whole periods; all of a slow worker with few steps."""
        first = min(self._warm, max(0, len(times) - 1 - self._period))
        return first, (len(times) - 1 - first) // self._period * self._period or len(times) - 1 - first


def _speed(times: Sequence[float], first: int, count: int) -> float:
    if count < 1:
        return 1 / times[-1] if times else 0.0
    return count / (times[first + count] - times[first])


def simulated_workers(setup: Setup, cluster: Cluster) -> int:
    """The workers of one replica where all replicas are alike; otherwise all.

    Replicas are alike if they have equal batches and equal machines of constant speed, meet in each step in collectives
    alone, and send no messages of their own over a card or an uplink that another replica uses, or by its cores. The
    accelerators of a machine have links of their own to each other, and use no core.
    """
    beside = cluster.machines[0].workers
    apart = setup.parts % beside == 0 or (cluster.accelerated and beside % setup.parts == 0)
    alone = setup.parts == 1 or (cluster.fabric is None and apart)
    alike = _in_step(setup) and _equal(cluster) and alone
    return setup.parts if alike and len(set(setup.batch_sizes)) == 1 else setup.workers


def _in_step(setup: Setup) -> bool:
    """Whether replicas meet in the engine's collectives alone: encoded gradients and other algorithms are messages."""
    strategy, topology = setup.strategy, setup.strategy.topology
    engine = isinstance(topology, Collective) and setup.topology.uses_engine
    return engine and isinstance(strategy.codec, Float32) and traits_of(strategy.sync).lockstep


def _equal(cluster: Cluster) -> bool:
    one, *others = cluster.machines
    constant = isinstance(one.compute, Constant) and isinstance(one.speed, float)
    return constant and not (others or cluster.events or cluster.host or cluster.unfairness)


SPREAD = 0.02
"""Standard deviation of the logarithm of a step's duration: small, so that workers drift apart as on real machines."""


class Unaligned(LogNormal):
    """Durations whose first step is longer by a random part of `lead` steps."""

    lead: float = 0.0

    def blocks(self, rng: np.random.Generator) -> Iterator[Sequence[float]]:
        blocks = super().blocks(rng)
        first, *others = next(blocks)
        yield [first + self.lead * rng.random(), *others]
        yield from blocks


def unaligned(cluster: Cluster, lead: int) -> Cluster:
    """`cluster` whose workers of constant speed begin at random times of the first `lead` steps."""
    kinds = [
        kind.changed(compute=Unaligned(sigma=SPREAD, lead=lead, **_mean(kind.compute)))
        if isinstance(kind.compute, Constant)
        else kind
        for kind in cluster.machines
    ]
    return cluster.changed(machines=tuple(kinds))


def _mean(compute: Constant) -> dict[str, float | None]:
    return {name: getattr(compute, name) for name in ("seconds", "flops", "flops_per_second", "overhead", "call")}


TOGETHER, APART, RANDOM = 1, 16, 60
"""Measured steps of each worker at least, and one period of the method: of workers in lockstep, whose periods are equal
in the steady state, of others, and of durations drawn at random."""

ENOUGH, LONGER, MOST = 8, 8, 4000
"""Steps with messages that suffice, factor of the steps where there are fewer, and steps that are not multiplied."""


COMPARED, UNEQUAL = 3, 1e-3
"""Periods of a short window, and the share by which the longest may exceed the shortest."""


@dataclass(frozen=True, slots=True)
class Timing:
    """A strategy in a scene, in virtual time. `seconds` are those of a step of all workers.

    `samples_per_second` counts the samples whose gradients are applied. `bytes_per_step` are the payload bytes that a
    worker sends in such a step, `staleness` is the mean of the applied updates, `memory` that of the largest worker.
    `shares` are shares of the workers' time: compute, communicate, wait. `worker_machines` counts
    machines of workers, `server_machines` machines of servers alone. `ending` are the seconds from the last step to the
    end of a run, in which the last exchange ends. `exchanges` are averages with neighbors, of a worker in each step.
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
    ending: float = 0.0
    exchanges: float = 0.0


LeastSeconds = Callable[[], float]
"""The seconds that a step of all workers takes at least, by what a timing has simulated so far."""


def timed(
    scene: Scene, strategy: str, *, trace: bool = False, began: Callable[[LeastSeconds], None] = lambda least: None
) -> Timing:
    """Time `strategy` in `scene`. `began` receives a bound, which another thread may read, when steps are equal.

    Raises `UsageError` where the strategy does not work there or does not fit.
    """
    if strategy == ONE:
        return _one_machine(scene, trace=trace)
    for window in _windows(config_of(scene, strategy).chosen(), scene.cluster):
        setup = setup_in(scene, strategy, trace=trace, steps=window.steps)
        outcome, stepped = _run(scene, setup, window, began)
        if stepped.equal_periods:
            break
    while setup.topology.graph is not None and stepped.sendings < ENOUGH and setup.steps < MOST:
        # exchanges behind the computation that take many steps
        setup = setup_in(scene, strategy, trace=trace, steps=LONGER * setup.steps)
        outcome, stepped = _run(scene, setup, window, began)
    memory, simulated = largest_memory(setup), simulated_workers(setup, scene.cluster)
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
        ending=max(0.0, outcome.totals.seconds - stepped.last),
        exchanges=stepped.exchanges,
    )


def _one_machine(scene: Scene, *, trace: bool) -> Timing:
    """The timing of one machine, whose steps have fewer samples than those of all workers."""
    alone, plain = placed(scene, ONE)
    timing = timed(alone, plain, trace=trace)
    steps = scene.batch / alone.batch
    return replace(timing, seconds=steps * timing.seconds, bytes_per_step=steps * timing.bytes_per_step)


def _run(
    scene: Scene, setup: Setup, window: Window, began: Callable[[LeastSeconds], None]
) -> tuple[Outcome, StepTimes]:
    stepped = StepTimes(window.warm, window.period)
    cluster, simulated = _running(scene.cluster, setup.strategy), simulated_workers(setup, scene.cluster)
    run = VirtualRun(setup, cluster, Callbacks(stepped=stepped), simulated)
    if _equal_steps(setup, cluster):
        share = scene.batch / sum(setup.batch_sizes)
        began(lambda: share * run.now / setup.steps)
    return run.run(), stepped


def _equal_steps(setup: Setup, cluster: Cluster) -> bool:
    """Whether all steps last as long, and none applies fewer samples than all workers have."""
    pipeline = pipeline_of(setup.strategy.partition)
    flushes = pipeline is None or pipeline.flushes
    return _in_step(setup) and flushes and _equal(cluster) and not isinstance(setup.sync, Periodic)


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
    return max((use for _, use in of_workers(setup, range(setup.workers))), key=lambda use: use.total)


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
    # processes of servers serve workers one after another, in an order that changes from step to step
    in_turn = "servers" in offers_of(strategy.topology) and bool(cluster.servers.variable or cluster.servers.process)
    least = (TOGETHER if together and not in_turn else APART) if constant else RANDOM
    uneven = any(kind != cluster.machines[0] or not isinstance(kind.speed, float) for kind in cluster.machines)
    uneven = uneven or in_turn
    # fast workers end before slow ones have done the step after the last period, which would then not count
    spare = period if together and uneven and period > 1 else 0
    return _warm_of(strategy, cluster) + period * math.ceil(least / period) + 1 + spare


def _windows(strategy: Strategy, cluster: Cluster) -> list[Window]:
    """The windows to try, until the periods of one are equal; those of the last one count as they are."""
    usual = Window(_warm_of(strategy, cluster), _period_of(strategy), _steps(strategy, cluster))
    short = _short_window(strategy, cluster)
    return [usual] if short is None or short.steps >= usual.steps else [short, usual]


def _short_window(strategy: Strategy, cluster: Cluster) -> Window | None:
    """The window of a pipeline without a flush, by its order; None for others.

    The order repeats after as many micro-batches as there are stages, and the pipeline is full after twice as many.
    Where messages take longer than the computation, they queue for more mini-batches than that.
    """
    pipeline = pipeline_of(strategy.partition)
    together = _together(strategy) and _equal(cluster) and not isinstance(strategy.sync, Periodic)
    if pipeline is None or pipeline.flushes or not together:
        return None
    stages, micro = pipeline.stages, pipeline.micro_batches
    warm, period = 1 + math.ceil(2 * stages / micro), stages // math.gcd(stages, micro)
    return Window(warm, period, warm + COMPARED * period + 1)


def _running(cluster: Cluster, strategy: Strategy) -> Cluster:
    return cluster if _together(strategy) else unaligned(cluster, lead=_period_of(strategy))


def _together(strategy: Strategy) -> bool:
    return traits_of(strategy.sync).lockstep or isinstance(strategy.topology, Collective)


def _period_of(strategy: Strategy) -> int:
    """The steps after which a method, or a pipeline, does again what it has done."""
    pipeline = pipeline_of(strategy.partition)
    period = strategy.sync.period if isinstance(strategy.sync, Periodic) else 1
    return math.lcm(period, 1 if pipeline is None or pipeline.flushes else pipeline.stages)


def _warm_of(strategy: Strategy, cluster: Cluster) -> int:
    """The steps until a pipeline is full, until fast workers lead by the bound, or until all workers have begun.

    The first mini-batch is loaded before a run. So workers wait for data, and others for them, from the second step on.
    """
    pipeline = pipeline_of(strategy.partition)
    lead = getattr(strategy.sync, "bound", 0.0)
    return (
        1
        + any(kind.input is not None for kind in cluster.machines)
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
