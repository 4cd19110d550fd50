"""The closed form of a strategy's step, beside its timing in virtual time: no simulation, the same figures.

The forms are those of `step_forms`, `exchanges` and `pipeline_forms`; X is an exchange, c the slowest worker's step.

    strategy                         seconds of a step of all workers
    bsp over the engine's ring       c and the ring, overlapped with backward
    bsp over others, or a codec      c + X
    averaging, bmuf, diloco, easgd   c + X / period
    backup, k-sync                   (c of the first K + X of K) P / K, and two messages without bytes each for the
                                     offer and for the next version
    downpour, easgd over servers     workers apart: computation, and each period a pull and a push
    ssp                              as downpour, at the pace of the slowest worker
    k-batch-async                    workers apart: computation, and X of K workers
    ad-psgd                          workers apart: computation alone, as exchanges are beside it
    partitions                       of a mini-batch, instead of c + X

Other methods, other topologies, votes, events of a cluster, and pipelines on one host have no form here, nor have
pipelines with random steps. Traces have one where workers are apart, by their means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dure.core.deployment import SERVER, WORKER
from dure.planner.exchanges import Copies, exchange, over_servers
from dure.planner.pipeline_forms import mini_batch
from dure.planner.stage_passes import StageFigures
from dure.planner.step_durations import StepDuration, several, shared, slowest
from dure.planner.step_forms import Between, ClosedForm, apart, overlapped, ring
from dure.planner.transfers import Flow, Transfers
from dure.run.strategy import member_text
from dure.runtime.virtual.paths import paths_of
from dure.sync.ad_psgd import ADPSGD
from dure.sync.averaging import Averaging
from dure.sync.backup import Backup
from dure.sync.bmuf import BMUF
from dure.sync.bsp import BSP
from dure.sync.diloco import DiLoCo
from dure.sync.downpour import Downpour
from dure.sync.easgd import EASGD
from dure.sync.k_async import KBatchAsync
from dure.sync.k_sync import KSync
from dure.sync.ssp import SSP
from dure.topology.collective.choice import Collective
from dure.topology.parameter_server.choice import ParameterServer

if TYPE_CHECKING:
    from dure.run.setup import Setup
    from dure.runtime.virtual.cluster import Cluster


def closed_form(setup: Setup, cluster: Cluster) -> ClosedForm | None:
    """The seconds of a step of `setup` on `cluster` by a closed form, and its name; None where none is known."""
    form = FORMS.get(type(setup.strategy.sync))
    if form is None or cluster.events:
        return None
    return form(setup.strategy.sync, StepFigures(setup, cluster))


@dataclass(frozen=True)
class StepFigures:
    """Figures of a step of `setup` on `cluster`."""

    setup: Setup
    cluster: Cluster

    @cached_property
    def transfers(self) -> Transfers:
        """The messages among the run's nodes."""
        return Transfers(self.cluster, self.cluster.placed(self.setup.deployment.places()))

    @cached_property
    def durations(self) -> list[StepDuration]:
        """The duration of each worker's mini-batch, if it had the whole model."""
        setup, found = self.setup, []
        for worker in range(setup.workers):
            drawn = self.cluster.durations(worker, setup.config.seeded)
            flops = setup.job.flops_per_sample * setup.batch_sizes[setup.replica_of(worker)]
            found.append(StepDuration(drawn.compute.mean(flops) / drawn.speed, drawn.compute))
        return found

    @property
    def constant(self) -> bool:
        """Whether all steps of a worker take equally long."""
        return all(each.constant for each in self.durations)

    def slowest(self, first: int | None = None, steps: int = 1) -> float | None:
        """Seconds until all workers, or the `first` of them, have made so many `steps`; None if no form is known."""
        together = [several(each, steps) for each in self.durations]
        known = [each for each in together if each is not None]
        if len(known) < len(together):
            return None
        host = self.cluster.host
        return slowest(known, first) if host is None else shared(known, host.cores, first)

    def copies(self, part: int = 0) -> Copies:
        """The workers that hold a part of the model, or all of it."""
        setup, deployment = self.setup, self.setup.deployment
        servers, numbers = deployment.names(SERVER), range(part, setup.workers, setup.parts)
        each, workers = len(servers) // setup.parts, deployment.names(WORKER)
        speed = min(self.cluster.durations(number, setup.config.seeded).speed for number in numbers)
        own = servers[part * each : (part + 1) * each]
        return Copies(setup.of_worker(part), self.transfers, [workers[number] for number in numbers], own, speed)


def _synchronous(_sync: BSP, figures: StepFigures) -> ClosedForm | None:
    setup, copies = figures.setup, figures.copies()
    if setup.stages is not None:
        return _partitioned(figures, 1)
    computed, topology = figures.slowest(), setup.strategy.topology
    if computed is None:
        return None
    if setup.workers == 1 and isinstance(topology, Collective):
        return ClosedForm("one worker", computed)
    if isinstance(topology, Collective) and topology.algorithm == "engine" and setup.codec is None:
        paths = paths_of(figures.cluster, copies.places, gradient=True)
        slices = [(left, ring(n * copies.itemsize, copies.count, paths)) for n, left in setup.topology.slices]
        return ClosedForm("ring beside backward", overlapped(computed, figures.cluster.backward, slices))
    exchanged = exchange(copies)
    return None if exchanged is None else ClosedForm("step, then exchange", computed + exchanged)


def _periodic(figures: StepFigures, period: int) -> ClosedForm | None:
    if figures.setup.stages is not None:
        return _partitioned(figures, period)
    computed, exchanged = figures.slowest(steps=period), exchange(figures.copies())
    if computed is None or exchanged is None:
        return None
    return ClosedForm(f"exchange every {period} steps", (computed + exchanged) / period)


def _averaging(sync: Averaging, figures: StepFigures) -> ClosedForm | None:
    chosen = sync.schedule, sync.weights, sync.state, sync.pace
    return _periodic(figures, sync.period) if chosen == ("fixed", "samples", "keep", "steps") else None


def _blocks(sync: BMUF | DiLoCo, figures: StepFigures) -> ClosedForm | None:
    return _periodic(figures, sync.period) if (sync.overlap, sync.fragments) == (0, 1) else None


def _elastic(sync: EASGD, figures: StepFigures) -> ClosedForm | None:
    if not isinstance(figures.setup.strategy.topology, ParameterServer):
        return _periodic(figures, sync.period)
    return _apart(figures, 2, sync.period)


def _first_of(sync: Backup | KSync, figures: StepFigures) -> ClosedForm | None:
    copies = figures.copies()
    first = sync.quorum(copies.count)
    computed = figures.slowest(first)
    if computed is None:
        return None
    trips = (2 if len(copies.servers) > 1 else 4) * copies.small
    update = computed + over_servers(copies, first) + trips
    return ClosedForm(f"first {first} of {copies.count}", update * copies.count / first)


def _downpour(sync: Downpour, figures: StepFigures) -> ClosedForm | None:
    plain = (sync.n_push, sync.n_fetch, sync.warm_start, sync.overlap) == (1, 1, 0.0, False)
    return _apart(figures, 0 if sync.at_once else 2, 1) if plain else None


def _bounded(sync: SSP, figures: StepFigures) -> ClosedForm | None:
    if sync.form != "snapshot":
        return None
    small = 4 if len(figures.copies().servers) > 1 else 0
    return _apart(figures, small, 1, bounded=math.isfinite(sync.bound))


def _apart(figures: StepFigures, small: int, period: int, *, bounded: bool = False) -> ClosedForm | None:
    """The step of workers apart, with a push, a pull and `small` messages without bytes each `period`.

    `bounded`: the pace is that of the slowest worker.
    """
    copies, transfers = figures.copies(), figures.transfers
    if figures.setup.stages is not None:
        return None
    alone = []
    for worker, duration in zip(copies.workers, figures.durations, strict=True):
        there, back = (transfers.seconds(flows) for flows in (copies.pushes([worker]), copies.pulls([worker])))
        exchanged = copies.encoding + there + back + copies.applying + small * copies.small
        alone.append(duration.mean + exchanged / period)
    if bounded:
        alone = [max(alone)] * copies.count
    return _with_busiest(figures, copies, alone, small, period)


def _with_busiest(figures: StepFigures, copies: Copies, alone: list[float], small: int, period: int = 1) -> ClosedForm:
    """The step of workers apart that need so many seconds `alone`, or of what is busiest. `small`: as in `_apart`."""
    requests = [Flow(worker, server, 0) for worker in copies.workers for server in copies.servers] * small
    flows = [*copies.pushes(copies.workers), *copies.pulls(copies.workers), *requests]
    applying = copies.count * copies.applying
    computing = sum(each.mean for each in figures.durations) * period + applying * len(copies.servers)
    busiest = max(figures.transfers.busiest(flows, computing), applying) / period
    seconds, free = apart(alone, busiest), apart(alone, 0.0)
    return ClosedForm("workers apart" if seconds == free else "busiest server, link or core", seconds)


def _grouped(sync: KBatchAsync, figures: StepFigures) -> ClosedForm | None:
    copies = figures.copies()
    if figures.cluster.host is not None:
        return None
    group = min(sync.quorum(copies.count), copies.count)
    exchanged = over_servers(copies, group, pulling=group)
    return _with_busiest(figures, copies, [each.mean + exchanged for each in figures.durations], 0)


def _gossip(_sync: ADPSGD, figures: StepFigures) -> ClosedForm | None:
    if figures.cluster.host is not None or figures.setup.stages is not None:
        return None
    return ClosedForm("exchange beside steps", apart([each.mean for each in figures.durations], 0.0))


def _partitioned(figures: StepFigures, period: int) -> ClosedForm | None:
    """The step of a model in parts, which exchange every `period` steps."""
    setup, stages = figures.setup, figures.setup.stages
    assert stages is not None
    if not figures.constant or figures.cluster.host is not None:
        return None
    names = setup.deployment.names(WORKER)
    parts = StageFigures(stages, figures.transfers, names, [each.mean for each in figures.durations])
    exchanges = []
    for rank in stages.layout.ranks:
        exchanged = exchange(figures.copies(rank * stages.layout.ways))
        if exchanged is None:
            return None
        exchanges.append(exchanged / period + parts.summed_over_ways(rank))
    seconds = mini_batch(stages.pipeline, parts.passes(), exchanges, Between(parts.ask, parts.crossing()))
    if seconds is None:
        return None
    if setup.job.optimizer.clip is not None:
        seconds += 2 * parts.ask  # the norm of the whole gradient
    return ClosedForm(member_text("partition", setup.strategy.partition).partition(":")[0], seconds)


FORMS: Mapping[type, Callable[[Any, StepFigures], ClosedForm | None]] = {
    BSP: _synchronous,
    Averaging: _averaging,
    BMUF: _blocks,
    DiLoCo: _blocks,
    EASGD: _elastic,
    Backup: _first_of,
    KSync: _first_of,
    Downpour: _downpour,
    SSP: _bounded,
    KBatchAsync: _grouped,
    ADPSGD: _gossip,
}
