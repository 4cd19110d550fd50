"""Partitions that are joined: `gpipe:stages=2+tensor:ways=2`, and sharded data parallelism behind either or both.

A copy of the model has K * W workers. Worker number `rank * W + way` holds part `way` of the layers of stage `rank`,
so the workers that share layers are next to each other. `zero` shards each part over the workers that hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dure.core.text import quoted
from dure.partition.methods.gpipe import GPipe
from dure.partition.methods.zero import Zero
from dure.partition.pipeline import Pipeline
from dure.partition.shared_layers import SharedLayers

ONE_STAGE = GPipe(stages=1, micro=1)
"""The pipeline of a model whose layers are shared, and that is not cut into stages."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """A model cut into the stages of `pipeline`, whose layers are `shared`, and whose parts are sharded by `zero`.

    At least two of the three are given; the others are None.
    """

    pipeline: Pipeline | None = None
    shared: SharedLayers | None = None
    zero: Zero | None = None

    def __post_init__(self) -> None:
        kinds: Sequence[tuple[str, type, str]] = (
            ("pipeline", Pipeline, "GPipe()"),
            ("shared", SharedLayers, "TensorParallel()"),
            ("zero", Zero, "Zero()"),
        )
        for name, kind, example in kinds:
            if not isinstance(getattr(self, name), kind | None):
                raise ValueError(f"{name} must be an object such as {example}, got {quoted(getattr(self, name))}.")
        if len(self.members) < 2:
            raise ValueError("a mesh joins two objects or more, such as pipeline=GPipe() and zero=Zero().")

    @property
    def members(self) -> list[Pipeline | SharedLayers | Zero]:
        """The partitions that are joined, in order."""
        return [each for each in (self.pipeline, self.shared, self.zero) if each is not None]


def pipeline_of(partition: object) -> Pipeline | None:
    """The pipeline of a partition; None where workers hold whole models."""
    if isinstance(partition, Mesh) and partition.pipeline is not None:
        return partition.pipeline
    if shared_of(partition) is not None:
        return ONE_STAGE
    return partition if isinstance(partition, Pipeline) else None


def shared_of(partition: object) -> SharedLayers | None:
    """The sharing of layers in a partition, if there is any."""
    if isinstance(partition, Mesh):
        return partition.shared
    return partition if isinstance(partition, SharedLayers) else None


def zero_of(partition: object) -> Zero | None:
    """The sharding over the workers that hold the same part of a model, if there is any."""
    if isinstance(partition, Mesh):
        return partition.zero
    return partition if isinstance(partition, Zero) else None


def parts_of(partition: object) -> int:
    """The number of workers that hold one copy of the model together."""
    pipeline, shared = pipeline_of(partition), shared_of(partition)
    return (1 if pipeline is None else pipeline.stages) * (1 if shared is None else shared.ways)
