"""Pipelines whose stages are each shared by several workers, as in `gpipe:stages=2+tensor:ways=2`.

A copy of the model has K * W workers. Worker number `rank * W + way` holds part `way` of the layers of stage `rank`,
so the workers that share layers are next to each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from dure.core.text import quoted
from dure.partition.methods.gpipe import GPipe
from dure.partition.pipeline import Pipeline
from dure.partition.shared_layers import SharedLayers

ONE_STAGE = GPipe(stages=1, micro=1)
"""The pipeline of a model whose layers are shared, and that is not cut into stages."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """A model cut into the stages of `pipeline`, whose layers are `shared`."""

    pipeline: Pipeline
    shared: SharedLayers

    def __post_init__(self) -> None:
        for name, kind, example in (("pipeline", Pipeline, "GPipe()"), ("shared", SharedLayers, "TensorParallel()")):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name} must be an object such as {example}, got {quoted(getattr(self, name))}.")


def pipeline_of(partition: object) -> Pipeline | None:
    """The pipeline of a partition; None where workers hold whole models."""
    if isinstance(partition, Mesh):
        return partition.pipeline
    if isinstance(partition, SharedLayers):
        return ONE_STAGE
    return partition if isinstance(partition, Pipeline) else None


def shared_of(partition: object) -> SharedLayers | None:
    """The sharing of layers in a partition, if there is any."""
    if isinstance(partition, Mesh):
        return partition.shared
    return partition if isinstance(partition, SharedLayers) else None


def parts_of(partition: object) -> int:
    """The number of workers that hold one copy of the model together."""
    pipeline, shared = pipeline_of(partition), shared_of(partition)
    return (1 if pipeline is None else pipeline.stages) * (1 if shared is None else shared.ways)
