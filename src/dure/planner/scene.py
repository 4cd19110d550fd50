"""A scene of a plan: a job, the cluster on which it will run, and the samples of a step of all workers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from dure.job.initial_model import InitialModel

if TYPE_CHECKING:
    from dure.job.job import Job
    from dure.partition.profile import BlockTimes
    from dure.runtime.virtual.cluster import Cluster


@dataclass(frozen=True)
class Scene:
    """`batch` samples of `job` in each step of all workers of `cluster`.

    `times` are the seconds of the model's blocks at a worker of speed 1, if they have been measured.
    """

    job: Job
    cluster: Cluster
    batch: int
    times: BlockTimes | None = None

    @property
    def workers(self) -> int:
        """The workers of the cluster."""
        return self.cluster.workers

    @cached_property
    def model(self) -> InitialModel:
        """The sizes of the job's model, for all timings of the scene."""
        return InitialModel(self.job, 0, timing_only=True)

    def on(self, cluster: Cluster) -> Scene:
        """This scene on another cluster, with as many samples per worker."""
        return self._with(cluster, self.batch * cluster.workers // self.workers)

    def of(self, batch: int) -> Scene:
        """This scene with another number of samples in a step."""
        return self._with(self.cluster, batch)

    def _with(self, cluster: Cluster, batch: int) -> Scene:
        other = replace(self, cluster=cluster, batch=max(1, batch))
        other.__dict__["model"] = self.model
        return other
