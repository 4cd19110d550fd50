"""The closed form of a strategy's step, beside its timing in virtual time: no simulation, the same figures.

The forms are those of `steps`, `exchanges` and `pipelines`; X is an exchange, c the slowest worker's step.

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
    zero                             `shards`

Other methods, other topologies, votes, events of a cluster, and pipelines on one host have no form here, nor have
pipelines with random steps. Traces have one where workers are apart, by their means.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from oracles.forms.durations import StepDuration, several, shared, slowest
from oracles.forms.exchanges import Copies, exchange, over_servers
from oracles.forms.messages import Flow, Transfers
from oracles.forms.pipelines import mini_batch
from oracles.forms.shards import Exchanges, agreed, blockwise, half_ring, sliced
from oracles.forms.stages import StageFigures
from oracles.forms.steps import Between, apart, overlapped, ring

import dure
from dure.core.deployment import SERVER, WORKER
from dure.core.vectors import size
from dure.run.setup import Setup
from dure.runtime.virtual.cluster import Cluster
from dure.runtime.virtual.network import paths_of


def closed_form(setup, cluster):
    """The seconds of a step of `setup` on `cluster` by a closed form; None where none is known."""
    form = FORMS.get(type(setup.strategy.sync))
    return None if form is None or cluster.events else form(setup.strategy.sync, StepFigures(setup, cluster))


@dataclass(frozen=True)
class StepFigures:
    """Figures of a step of `setup` on `cluster`."""

    setup: Setup
    cluster: Cluster

    @cached_property
    def transfers(self):
        """The messages among the run's nodes."""
        return Transfers(self.cluster, self.cluster.placed(self.setup.deployment.places()))

    @cached_property
    def durations(self):
        """The duration of each worker's mini-batch, if it had the whole model."""
        setup, found = self.setup, []
        for worker in range(setup.workers):
            drawn = self.cluster.durations(worker, setup.config.seeded)
            flops = setup.job.flops_per_sample * setup.batch_sizes[setup.replica_of(worker)]
            found.append(StepDuration(drawn.compute.mean(flops) / drawn.speed, drawn.compute))
        return found

    @property
    def means(self):
        return [each.mean for each in self.durations]

    def slowest(self, first=None, steps=1):
        """Seconds until all workers, or the `first` of them, have made so many `steps`; None if no form is known."""
        together = [several(each, steps) for each in self.durations]
        if None in together:
            return None
        host = self.cluster.host
        return slowest(together, first) if host is None else shared(together, host.cores, first)

    def copies(self, part=0):
        """The workers that hold a part of the model, or all of it."""
        setup, deployment = self.setup, self.setup.deployment
        servers, numbers = deployment.names(SERVER), range(part, setup.workers, setup.parts)
        each, workers = len(servers) // setup.parts, deployment.names(WORKER)
        speed = min(self.cluster.durations(number, setup.config.seeded).speed for number in numbers)
        own = servers[part * each : (part + 1) * each]
        return Copies(setup.of_worker(part), self.transfers, [workers[number] for number in numbers], own, speed)


def _synchronous(_sync, figures):
    setup, copies = figures.setup, figures.copies()
    if setup.zero is not None:
        return _sharded(figures, copies)
    if setup.stages is not None:
        return _partitioned(figures, 1)
    computed, topology = figures.slowest(), setup.strategy.topology
    if computed is None or (setup.workers == 1 and isinstance(topology, dure.Collective)):
        return computed
    if isinstance(topology, dure.Collective) and topology.algorithm == "engine" and setup.codec is None:
        paths = paths_of(figures.cluster, copies.places, gradient=True)
        slices = [(left, ring(n * copies.itemsize, copies.count, paths)) for n, left in setup.topology.slices]
        return overlapped(computed, figures.cluster.backward, slices)
    exchanged = exchange(copies)
    return None if exchanged is None else computed + exchanged


def _sharded(figures, copies):
    """The step of whole models, of whose state, gradient or parameters each worker has a shard."""
    setup, cluster = figures.setup, figures.cluster
    if setup.parts > 1 or (cluster.host is not None and setup.keeps_shards):
        return None
    ranks, computed = setup.shards.ranks, figures.slowest()
    near, across = copies.places[:ranks], copies.places[::ranks]

    def exchanges(nbytes):
        parts = paths_of(cluster, near), paths_of(cluster, across)
        own = -(-nbytes // ranks)
        summed = ring(own, len(across), parts[1]) if len(across) > 1 else 0.0
        return Exchanges(half_ring(nbytes, ranks, parts[0]), half_ring(nbytes, ranks, parts[0], adds=True), summed)

    agreement = agreed(ranks, paths_of(cluster, near))
    if not setup.keeps_shards:
        paths = paths_of(cluster, near, gradient=True)
        each = [(left, half_ring(n * copies.itemsize, ranks, paths, adds=True)) for n, left in setup.topology.slices]
        return sliced(computed, cluster.backward, each, exchanges(copies.nbytes), agreement)
    if not all(duration.constant for duration in figures.durations):
        return None
    parts = StageFigures(setup.stages, figures.transfers, setup.deployment.names(WORKER), figures.means)
    root, *units = (exchanges(size(unit) * copies.itemsize) for unit in setup.shards.units)
    if not setup.shards.units[0]:
        root = Exchanges(0.0, 0.0)
    return blockwise(parts.passes_of_chunks(), units, root, agreement)


def _periodic(figures, period):
    if figures.setup.stages is not None:
        return _partitioned(figures, period)
    computed, exchanged = figures.slowest(steps=period), exchange(figures.copies())
    return None if computed is None or exchanged is None else (computed + exchanged) / period


def _averaging(sync, figures):
    chosen = sync.schedule, sync.weights, sync.state, sync.pace
    return _periodic(figures, sync.period) if chosen == ("fixed", "samples", "keep", "steps") else None


def _blocks(sync, figures):
    return _periodic(figures, sync.period) if (sync.overlap, sync.fragments) == (0, 1) else None


def _elastic(sync, figures):
    over = isinstance(figures.setup.strategy.topology, dure.ParameterServer)
    return _apart(figures, 2, sync.period) if over else _periodic(figures, sync.period)


def _first_of(sync, figures):
    copies = figures.copies()
    first = sync.quorum(copies.count)
    computed = figures.slowest(first)
    if computed is None:
        return None
    trips = (2 if len(copies.servers) > 1 else 4) * copies.small
    return (computed + over_servers(copies, first) + trips) * copies.count / first


def _downpour(sync, figures):
    plain = (sync.n_push, sync.n_fetch, sync.warm_start, sync.overlap) == (1, 1, 0.0, False)
    return _apart(figures, 0 if sync.at_once else 2, 1) if plain else None


def _bounded(sync, figures):
    if sync.form != "snapshot":
        return None
    small = 4 if len(figures.copies().servers) > 1 else 0
    return _apart(figures, small, 1, bounded=math.isfinite(sync.bound))


def _apart(figures, small, period, *, bounded=False):
    """The step of workers apart, with a push, a pull and `small` messages without bytes each `period`.

    `bounded`: the pace is that of the slowest worker.
    """
    copies, transfers = figures.copies(), figures.transfers
    if figures.setup.stages is not None:
        return None
    alone = []
    for worker, mean in zip(copies.workers, figures.means, strict=True):
        there, back = (transfers.seconds(flows) for flows in (copies.pushes([worker]), copies.pulls([worker])))
        exchanged = copies.encoding + there + back + copies.applying + small * copies.small
        alone.append(mean + exchanged / period)
    if bounded:
        alone = [max(alone)] * copies.count
    return _with_busiest(figures, copies, alone, small, period)


def _with_busiest(figures, copies, alone, small, period=1):
    """The step of workers apart that need so many seconds `alone`, or of what is busiest. `small`: as in `_apart`."""
    requests = [Flow(worker, server, 0) for worker in copies.workers for server in copies.servers] * small
    flows = [*copies.pushes(copies.workers), *copies.pulls(copies.workers), *requests]
    applying = copies.count * copies.applying
    computing = sum(figures.means) * period + applying * len(copies.servers)
    return apart(alone, max(figures.transfers.busiest(flows, computing), applying) / period)


def _grouped(sync, figures):
    copies = figures.copies()
    if figures.cluster.host is not None:
        return None
    group = min(sync.quorum(copies.count), copies.count)
    exchanged = over_servers(copies, group, pulling=group)
    return _with_busiest(figures, copies, [each + exchanged for each in figures.means], 0)


def _gossip(_sync, figures):
    if figures.cluster.host is not None or figures.setup.stages is not None:
        return None
    return apart(figures.means, 0.0)


def _partitioned(figures, period):
    """The step of a model in parts, which exchange every `period` steps."""
    setup, stages = figures.setup, figures.setup.stages
    if figures.cluster.host is not None or not all(each.constant for each in figures.durations):
        return None
    parts = StageFigures(stages, figures.transfers, setup.deployment.names(WORKER), figures.means)
    exchanges = []
    for rank in stages.layout.ranks:
        exchanged = exchange(figures.copies(rank * stages.layout.ways))
        if exchanged is None:
            return None
        exchanges.append(exchanged / period + parts.summed_over_ways(rank))
    seconds = mini_batch(stages.pipeline, parts.passes(), exchanges, Between(parts.ask, parts.crossing()))
    if seconds is None:
        return None
    clip = setup.job.optimizer.clip is not None  # by the norm of the whole gradient
    return seconds + 2 * parts.ask if clip else seconds


FORMS = {
    dure.BSP: _synchronous,
    dure.Averaging: _averaging,
    dure.BMUF: _blocks,
    dure.DiLoCo: _blocks,
    dure.EASGD: _elastic,
    dure.Backup: _first_of,
    dure.KSync: _first_of,
    dure.Downpour: _downpour,
    dure.SSP: _bounded,
    dure.KBatchAsync: _grouped,
    dure.ADPSGD: _gossip,
}
