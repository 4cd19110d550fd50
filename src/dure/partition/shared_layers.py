"""The base of partitions inside layers: `ways` workers share each layer of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dure.core.catalogue import parameter

if TYPE_CHECKING:
    from torch import nn

    from dure.job.job import Job
    from dure.partition.tensor.plan import SplitPlan


@dataclass(frozen=True)
class SharedLayers:
    """A model whose layers `ways` workers share, by the `plan` of a job's model.

    `in_pipelines`: it joins a pipeline, as the plan splits each layer in its place and leaves the others as they are.
    """

    ways: int = parameter(2, "workers that share each layer", range=">= 1", symbol="W")

    in_pipelines: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.ways < 1:
            raise ValueError(f"ways={self.ways} splits nothing: write a whole number from 1, such as ways=2")

    def plan(self, job: Job, module: nn.Module) -> SplitPlan:
        """The plan for a whole model of the job. Raises `UsageError` for a model that it cannot split."""
        raise NotImplementedError(f"{type(self).__name__} has no plan: define plan(self, job, module)")
