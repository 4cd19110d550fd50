"""A lower bound on the seconds of a step, known without a timing: from computation, and bytes over the slowest link.

    whole models, in step      max over workers of the seconds of a mini-batch
    otherwise                  samples of a step / sum of the workers' speeds
    all-reduce of M bytes      2 (h - 1) / h M over the slowest card of the h machines that have the same part
    servers, s shards          updates of a step * M / s over the card of a server, M over the card of each worker; M
                               over all cards where any workers may push, less what stays within a machine
    sharded, stages 1 and 2    max(computation, half of that for an all-reduce of M) + the other half
    sharded, stage 3           max(computation, all messages) + the first gather and the last scatter
    sharded, within=W          as the all-reduce of a part of M among the hosts that have it
    input                      samples of a step / sum of those that the machines load in a second

M is the model, or the parts of it that a machine has, divided by the steps between two exchanges. Bytes that depend on
values, and those between the parts of a model, count as none. A search times candidates in the order of this bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dure.codec.coder import SliceLayout
from dure.codec.cost import is_fixed
from dure.codec.fp32 import Float32
from dure.partition.blockwise import blockwise
from dure.partition.layout import StageLayout
from dure.partition.mesh import parts_of, zero_of
from dure.partition.methods.zero import Zero
from dure.partition.sharded_stage import units_of
from dure.partition.whole import Whole
from dure.planner.candidates import ONE, placed
from dure.planner.timing import config_of
from dure.run.step_shape import shape_of_whole
from dure.run.strategy import Strategy
from dure.sync.base import server_rule_of, traits_of
from dure.topology.collective.choice import Collective
from dure.topology.parameter_server.choice import ParameterServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dure.planner.candidates import Scene
    from dure.runtime.virtual.cluster import Cluster
    from dure.runtime.virtual.compute import Compute


def least_seconds(scene: Scene, strategy: str) -> float:
    """The seconds that a step of all workers of `scene` takes at least under `strategy`."""
    if strategy == ONE:
        alone, plain = placed(scene, strategy)
        return scene.batch / alone.batch * least_seconds(alone, plain)
    chosen = Strategy.parse(strategy)
    computing, sent = _computing(scene, strategy, chosen), _communicating(scene, chosen)
    zero = zero_of(chosen.partition)
    if zero is not None:
        computing *= 1 - _spared(scene)
    if zero is not None and zero.within is None and parts_of(chosen.partition) == 1:
        return max(_sharded(scene, zero, computing, sent / 2), _loading(scene, chosen))
    return max(computing, sent, _loading(scene, chosen))


def _sharded(scene: Scene, zero: Zero, computing: float, once: float) -> float:
    """The seconds of a step of sharded data parallelism, where all parameters are gathered, or scattered, in `once`."""
    if zero.stage < 3:
        return max(computing, once) + once
    job, replica = scene.job, scene.model.replica
    units = units_of(StageLayout(job, blockwise(job, replica, None), replica), 0)
    root, *blocks = (sum(each.stop - each.start for each in unit) / replica.numel for unit in units)
    lane = (3 - root - blocks[-1]) * once
    return max(computing + 2 * (root + blocks[0]) * once, lane)


def _spared(scene: Scene) -> float:
    """The most of a step that a worker spares which updates a shard: accelerators count the seconds of an update."""
    if not scene.cluster.accelerated:
        return 0.0
    shape = shape_of_whole(scene.job, scene.model, scene.cluster, max(1, scene.batch // scene.workers))
    return shape.update * (1 - 1 / scene.workers)


def _loading(scene: Scene, chosen: Strategy) -> float:
    """The seconds in which machines load the samples of a step; 0 where one of them has no limit."""
    parts = parts_of(chosen.partition)
    seconds = [scene.cluster.loading(first, parts) for first in range(0, scene.workers, parts)]
    return scene.batch / sum(1 / each for each in seconds) if all(seconds) else 0.0


def _computing(scene: Scene, strategy: str, chosen: Strategy) -> float:
    flops, paces = scene.job.flops_per_sample, list(_paces(scene.cluster))
    if isinstance(chosen.partition, Whole | Zero) and traits_of(chosen.sync).lockstep and not _quorum(scene, chosen):
        size = config_of(scene, strategy).batch_size or 1
        return max(compute.mean(size * flops) / speed for compute, speed, _ in paces)
    samples = [compute.mean(flops) - compute.mean(0.0) for compute, _, _ in paces]
    if not all(samples):  # steps of a trace, or of stated seconds, which have no speed
        return 0.0
    return scene.batch / sum(count * speed / each for each, (_, speed, count) in zip(samples, paces, strict=True))


def _paces(cluster: Cluster) -> Iterator[tuple[Compute, float, int]]:
    """The durations and speeds of workers, and how many have them."""
    first = 0
    for kind in cluster.machines:
        workers = kind.count * kind.workers
        if isinstance(kind.speed, float):
            yield kind.compute, kind.speed, workers
        else:
            yield from ((kind.compute, cluster.durations(first + each, 0).speed, 1) for each in range(workers))
        first += workers


def _communicating(scene: Scene, chosen: Strategy) -> float:
    """The seconds of the card with the most bytes for its speed."""
    cluster, sync, topology = scene.cluster, chosen.sync, chosen.topology
    if cluster.host is not None:
        return 0.0
    machines = sum(kind.count for kind in cluster.machines)
    card = min(map(cluster.network_bandwidth, cluster.machines))
    nbytes = _message(scene, chosen) / getattr(sync, "period", getattr(sync, "n_push", 1))
    # Small messages wait for no others, so a card has no speed for them.
    if isinstance(topology, Collective):
        hosted = [kind.workers for kind in cluster.machines]
        parts = parts_of(chosen.partition) * _shared_by(chosen, max(hosted))
        alike = max(1.0, machines * min(1.0, max(hosted) / parts))
        # Groups of accelerators divide the cards of a machine; other collectives do not slow each other.
        share = min(1.0, (max(hosted) if cluster.accelerated else 1) / parts)
        if min(hosted) < parts:  # the machine with the slowest card may have a small part
            card = max(map(cluster.network_bandwidth, cluster.machines))
        if _message(scene, chosen) / scene.workers <= cluster.small:  # a part's piece for each copy
            return 0.0
        return 2 * (1 - 1 / alike) * share * nbytes / card
    if not isinstance(topology, ParameterServer) or not isinstance(chosen.partition, Whole):
        return 0.0
    if _message(scene, chosen) / topology.shards <= cluster.small:
        return 0.0
    return _server_load(scene, chosen, topology) * nbytes


def _shared_by(chosen: Strategy, hosted: int) -> int:
    """The workers of a shard group that is no larger than needs be; 1 where all workers with a part make one group."""
    zero = zero_of(chosen.partition)
    if zero is None or zero.within is None:
        return 1
    return hosted if zero.within == "host" else zero.within


def _server_load(scene: Scene, chosen: Strategy, topology: ParameterServer) -> float:
    """The seconds of a step for each byte of the model, of the card that has most to do for pushes."""
    cluster, quorum = scene.cluster, _quorum(scene, chosen)
    together = cluster.servers.per_machine and chosen.pushes_together
    cards = [cluster.network_bandwidth(kind) for kind in cluster.machines for _ in range(kind.count)]
    pushing = [1 if together else kind.workers for kind in cluster.machines for _ in range(kind.count)]
    updates = quorum or sum(pushing)
    served = [0.0] * len(cards)  # the share of the model that servers have on each machine of workers
    if topology.colocated:
        for shard in range(topology.shards):
            served[cluster.machine_of(shard % scene.workers)] += 1 / topology.shards
        server = 0.0
    else:
        server = updates / topology.shards / (cluster.servers.link or cluster.link).bandwidth
    if quorum or not traits_of(chosen.sync).lockstep:  # updates come from any workers, those beside servers among them
        return max(server, updates * (1 - max(served)) / sum(cards))
    loads = (
        max(own * (1 - here), here * (updates - own)) / card
        for own, here, card in zip(pushing, served, cards, strict=True)
    )
    return max(server, *loads)


def _quorum(scene: Scene, chosen: Strategy) -> int:
    """The updates of a step, where those of all workers are not needed; else 0."""
    quorum = server_rule_of(chosen.sync).quorum if isinstance(chosen.topology, ParameterServer) else None
    return 0 if quorum is None else quorum(scene.workers)


def _message(scene: Scene, chosen: Strategy) -> float:
    """The bytes of an update of the whole model; 0 where they depend on its values."""
    replica = scene.model.replica
    if isinstance(chosen.codec, Float32):
        return replica.params.nbytes
    coder = chosen.codec.coder(SliceLayout.plain(replica.numel))
    return coder.most_bytes if is_fixed(coder) else 0.0
