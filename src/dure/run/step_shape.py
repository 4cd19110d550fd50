"""The steps of a job on a cluster: their seconds and spread, the times at which a gradient is complete, its slices."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from dure.codec.fp32 import Float32
from dure.core.deployment import SERVER
from dure.core.devices import KERNEL, Device, device
from dure.core.vectors import size
from dure.job.job import PRECISIONS
from dure.partition.backward import DeviceSpeed, by_operations, costs_of, even, stated
from dure.runtime.virtual.accelerators import slowest_of
from dure.runtime.virtual.server_software import CompletedVariable
from dure.sync.base import Periodic, traits_of
from dure.sync.bsp import BSP
from dure.topology.collective.choice import Collective

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dure.core.step_shape import StepShape
    from dure.job.initial_model import InitialModel
    from dure.job.job import Job
    from dure.run.setup import Setup
    from dure.runtime.virtual.cluster import Cluster
    from dure.runtime.virtual.compute import Compute
    from dure.runtime.virtual.network import Network


def step_shape(setup: Setup, cluster: Cluster) -> StepShape:
    """The shape of the steps of `setup`, whose tensors are those that all workers sum.

    The job's seconds of blocks count first, then the operations of blocks where the workers are accelerators, then the
    share of backward that the cluster states.
    """
    batch = setup.batch_sizes[0]
    if setup.stages is not None and setup.stages.layout.costs is not None:
        batch = setup.job.own_batch_size  # the step of which parts count as shares
    found = shape_of_whole(setup.job, setup.model, cluster, batch)
    if setup.stages is not None:  # a worker has a part of the model, and sums its gradient at the end
        return replace(found, tensors=())
    apart = set(setup.topology.apart)
    return replace(found, tensors=tuple(each for each in found.tensors if each.number not in apart)) if apart else found


def shape_of_whole(job: Job, model: InitialModel, cluster: Cluster, batch: int) -> StepShape:
    """The shape of the steps of a whole model, of `batch` samples each."""
    known, replica = model.step_shapes, model.replica
    speed = speed_of(cluster, job, replica.params.dtype) if cluster.accelerated or cluster.servers.overlap else None
    key = (batch, speed, cluster.backward)
    if key not in known:
        found = stated(job, replica)
        if found is None and speed is not None:
            found = by_operations(job, replica, batch, speed)
        known[key] = even(job, replica, cluster.backward) if found is None else found
    return known[key]


def slowest(setup: Setup, cluster: Cluster) -> float:
    """The seconds of a step at the slowest worker over those of a mean one, where workers wait for each other.

    Accelerators whose steps are equal differ by the engine's `spread`. The sum of the steps of a period differs less.
    Workers that never wait take the mean.
    """
    method = setup.strategy.sync
    if not cluster.accelerated or not (traits_of(method).lockstep or isinstance(setup.strategy.topology, Collective)):
        return 1.0
    period = method.period if isinstance(method, Periodic) else 1
    return 1.0 + cluster.engine_in_use.spread * slowest_of(setup.workers) / math.sqrt(period)


def completed_variables(setup: Setup, cluster: Cluster, shape: StepShape) -> dict[str, list[CompletedVariable]] | None:
    """The variables at each server in the order of backward; None if they are not pushed during it."""
    strategy = setup.strategy
    pushed = cluster.servers.overlap and isinstance(strategy.sync, BSP) and strategy.pushes_together
    if not pushed or not isinstance(strategy.codec, Float32):
        return None
    layers, itemsize = setup.model.replica.layers, setup.model.replica.params.element_size()
    before = 1.0 - shape.backward - shape.update
    found: dict[str, list[CompletedVariable]] = {}
    for number, name in enumerate(setup.deployment.names(SERVER)):
        ranges = setup.topology.ranges[number]
        parts = (
            (sum(max(0, min(stop, layer.stop) - max(start, layer.start)) for start, stop in ranges), each.done)
            for each in shape.tensors
            for layer in (layers[each.number],)
        )
        found[name] = [CompletedVariable(n * itemsize, before + shape.backward * done) for n, done in parts if n]
    return found


def slices_of(setup: Setup, shape: StepShape) -> list[tuple[int, float]]:
    """The slices of a gradient in backward by `shape` (`VirtualRuntime.slices`)."""
    if setup.job.block_seconds is None or setup.stages is not None:
        return setup.topology.slices
    layers = setup.model.replica.layers
    done = {layers[each.number].start: each.done for each in shape.tensors}
    return [
        (stop - start, 1 - max(done[each.start] for each in layers if start <= each.start < stop))
        for start, stop in setup.topology.slice_ranges
    ]


def of_shard(setup: Setup, cluster: Cluster, shape: StepShape) -> tuple[StepShape, float]:
    """The shape of a step whose worker updates its shard alone, and its seconds over those of `shape`.

    A model in stages counts the update in the passes of its stages (`StageLayout.updated`).
    """
    if not cluster.accelerated or setup.shards is None or setup.stages is not None:
        return shape, 1.0
    updated = shape.update / setup.shards.ranks
    left = 1.0 - shape.update + updated
    return replace(shape, backward=shape.backward / left, update=updated / left), left


def delays_by_shards(setup: Setup, cluster: Cluster, network: Network) -> tuple[float, float]:
    """The seconds by which forward and backward are longer where accelerators gather parameters meanwhile.

    As with buckets of a gradient: nothing is computed at the start of a collective, and less while it is under way;
    each tensor makes backward longer. Nothing is computed beside the first gather and the last scatter.
    """
    shards = setup.shards
    if not (cluster.accelerated and setup.keeps_shards) or setup.stages is None or shards is None:
        return 0.0, 0.0
    engine, replica = cluster.engine_in_use, setup.of_worker(0).model.replica
    alike, itemsize = setup.stages.workers_of(0), replica.params.element_size()
    near, across = alike[: shards.ranks], alike[:: shards.ranks]

    def lost(kind: str, numel: int, members: Sequence[str]) -> float:
        if not numel or len(members) == 1:
            return 0.0
        seconds = network.cost(kind, numel * itemsize, members, itemsize).seconds
        return seconds - max(0.0, seconds - engine.start) / (1.0 + engine.contention)

    parts = [(size(unit), size([shards.cuts(number)[0]])) for number, unit in enumerate(shards.units)][1:]
    gathers = [lost("all_gather", own, near) for _, own in parts]
    scatters = [lost("reduce_scatter", unit, near) + lost("all_reduce", own, across) for unit, own in parts]
    tensors, layout, batch = engine.rules.tensor * len(replica.layers), setup.stages.layout, setup.batch_sizes[0]
    shares = [layout.pass_shares(stage, batch, batch) for stage in range(layout.depth)]
    ahead, back = (sum(each.total for each in passes) for passes in zip(*shares, strict=True))  # not 1: of the update
    return sum(gathers[1:]) / ahead, (sum(gathers[:-1]) + sum(scatters[1:]) + tensors) / back


USUAL = 16.0
"""Intensity of a device that the cluster does not name: that of a V100 in fp32."""


def speed_of(cluster: Cluster, job: Job, dtype: torch.dtype) -> DeviceSpeed:
    """The speed of the first kind of machines in the engine's cost of blocks."""
    name, given = cluster.machines[0].gpu, cluster.engine.intensity
    if given is not None or name is None:
        return DeviceSpeed(USUAL if given is None else given)
    return _of_device(device(name), _precision(job, dtype))


def _of_device(here: Device, precision: str) -> DeviceSpeed:
    return DeviceSpeed(here.intensity(precision), KERNEL * here.speed(precision))


def _precision(job: Job, dtype: torch.dtype) -> str:
    """The precision of a job's matrix products: as it says, or that of parameters of `dtype`."""
    return job.precision or next((name for name, kind in PRECISIONS.items() if kind == dtype), "fp32")


def device_seconds(job: Job, name: str) -> float:
    """Seconds of a step of the job's own mini-batch on the device of the catalogue that is called so."""
    known: dict[str, float] = job.__dict__.setdefault("_device_seconds", {})
    if name not in known:
        here, module = device(name), job.build(0)
        precision = _precision(job, next(module.parameters()).dtype)
        costs = costs_of(job, module, job.own_batch_size, _of_device(here, precision))
        known[name] = (job.own_flops if costs is None else costs.step) / here.speed(precision)
    return known[name]


def _of_catalogue(compute: Compute, seconds: float) -> Compute:
    """`compute` with `seconds` that nobody has stated."""
    found: Compute = compute.changed(seconds=seconds).stating(compute.model_fields_set)
    return found


def referred(cluster: Cluster, job: Job) -> Cluster:
    """`cluster`, whose stated seconds are those of a step of the job's own mini-batch where it does not say.

    Machines that name a device and no speed take the seconds of that device. A job with companions has no step of its
    own: their seconds are those of any step.
    """
    if job.companions is not None:
        return cluster
    kinds = tuple(
        kind.changed(compute=_of_catalogue(kind.compute, device_seconds(job, kind.gpu)))
        if kind.gpu is not None and kind.compute.assumes_speed
        else kind
        for kind in cluster.machines
    )
    found = cluster if kinds == cluster.machines else cluster.changed(machines=kinds)
    return found.referred(job.own_flops) if found.states_seconds else found
