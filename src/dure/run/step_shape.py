"""The steps of a job on a cluster: their seconds and spread, the times at which a gradient is complete, its slices."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from dure.partition.backward import by_operations, even, stated
from dure.runtime.virtual.accelerators import slowest_of
from dure.sync.base import Periodic, traits_of
from dure.topology.collective.choice import Collective

if TYPE_CHECKING:
    from dure.core.step_shape import StepShape
    from dure.job.job import Job
    from dure.run.setup import Setup
    from dure.runtime.virtual.cluster import Cluster


def step_shape(setup: Setup, cluster: Cluster) -> StepShape:
    """The shape of the steps of `setup`, whose tensors are those that all workers sum.

    The job's seconds of blocks count first, then the operations of blocks where the workers are accelerators, then the
    share of backward that the cluster states.
    """
    known, batch = setup.model.step_shapes, setup.batch_sizes[0]
    key = (batch, cluster.engine.intensity if cluster.accelerated else None, cluster.backward)
    if key not in known:
        known[key] = _shape(setup, cluster, batch)
    found = known[key]
    if setup.stages is not None:  # a worker has a part of the model, and sums its gradient at the end
        return replace(found, tensors=())
    apart = set(setup.topology.apart)
    return replace(found, tensors=tuple(each for each in found.tensors if each.number not in apart)) if apart else found


def _shape(setup: Setup, cluster: Cluster, batch: int) -> StepShape:
    job, replica = setup.job, setup.model.replica
    found = stated(job, replica)
    if found is None and cluster.accelerated:
        found = by_operations(job, replica, batch, cluster.engine.intensity)
    return even(job, replica, cluster.backward) if found is None else found


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


def referred(cluster: Cluster, job: Job) -> Cluster:
    """`cluster`, whose stated seconds are those of a step of the job's own mini-batch where it does not say.

    A job with companions has no step of its own: their seconds are those of any step.
    """
    return cluster.referred(job.own_flops) if cluster.states_seconds and job.companions is None else cluster
