"""A cluster whose steps were measured for a mini-batch, described for other mini-batches by the profile of the job.

`dure probe JOB` writes the seconds of a step of the job's own mini-batch. A plan has other mini-batches, and pipelines
micro-batches. The profile divides these seconds into overhead, calls and samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dure.runtime.virtual.compute import Trace

if TYPE_CHECKING:
    from dure.job.job import Job
    from dure.planner.job_profile import JobProfile
    from dure.runtime.virtual.cluster import Cluster
    from dure.runtime.virtual.compute import Compute


SMALLEST = 1e-6
"""Least share of a sample in a step: steps that samples do not make longer have no speed."""


def is_measured(cluster: Cluster) -> bool:
    """Whether the steps of the cluster's machines are seconds, not operations."""
    return any(kind.compute.seconds is not None for kind in cluster.machines)


def calibrated(cluster: Cluster, job: Job, profile: JobProfile) -> Cluster:
    """`cluster` with the seconds of steps divided by `profile`, so that they hold for other mini-batches."""
    kinds = tuple(
        kind.changed(compute=_divided(kind.compute, job, profile)) if kind.compute.seconds is not None else kind
        for kind in cluster.machines
    )
    return cluster.changed(machines=kinds, backward=profile.backward)


def _divided(compute: Compute, job: Job, profile: JobProfile) -> Compute:
    """`compute` by overhead and operations. Its seconds are those of the job's mini-batch."""
    assert compute.seconds is not None
    assert not isinstance(compute, Trace)  # which has no seconds
    factor = compute.seconds / profile.seconds(job.batch_size)
    sample = max(profile.sample, SMALLEST * profile.seconds(job.batch_size))
    return compute.changed(
        seconds=None,
        overhead=profile.overhead * factor,
        call=min(compute.call if compute.call is not None else profile.call * factor, profile.overhead * factor),
        flops_per_second=job.flops_per_sample / (sample * factor),
    )
