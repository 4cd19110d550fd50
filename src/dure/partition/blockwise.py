"""A model that one worker computes chunk by chunk, as with sharded parameters: each chunk is a group of blocks.

    for t = 0, 1, 2, ...      F(1) .. F(n), B(n) .. B(1), U

The chunks are as many as the model has blocks, but small blocks are joined: each chunk is a message.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dure.errors import UsageError
from dure.job.job import trial_rows
from dure.partition.blocks import blocks_of, call_of, is_one_block
from dure.partition.borders import whole_borders
from dure.partition.orders import Action
from dure.partition.pipeline import Pipeline

if TYPE_CHECKING:
    from dure.job.job import Job
    from dure.job.replica import Replica
    from dure.partition.shared_layers import SharedLayers

LEAST_CHUNKS, LARGE_NBYTES = 16, 4 << 20
"""Blocks are joined to no fewer chunks than these, and to chunks of about so many bytes at most."""


@dataclass(frozen=True)
class Blockwise(Pipeline):
    """One worker with `chunks` of the model, of which it needs the parameters of one at a time."""

    chunks: int = 1

    def order(self, rank: int, batches: range) -> Iterator[Action]:
        for batch in batches:
            for chunk in range(self.chunks):
                yield Action("F", batch, chunk=chunk)
            for chunk in reversed(range(self.chunks)):
                yield Action("B", batch, chunk=chunk)
            yield Action("U", batch)


def blockwise(job: Job, whole: Replica, shared: SharedLayers | None) -> Blockwise:
    """The chunks of a job's model. Raises `UsageError` for a model that has one block."""
    module = whole.module
    if is_one_block(job, module):
        raise _saves_nothing(job, f"is one block, a {type(module).__name__}", shared)
    blocks = blocks_of(job, module)
    starts = list(range(len(blocks)))
    if shared is not None:
        plan, rows = shared.plan(job, module), trial_rows(job, module)
        starts = [0, *whole_borders(job, plan, shared.ways, call_of(job), lambda each: blocks_of(job, each), rows)]
    groups = [blocks[start:stop] for start, stop in zip(starts, [*starts[1:], len(blocks)], strict=True)]
    trained = sum(any(each.requires_grad for block in group for each in block.parameters()) for group in groups)
    if trained < 2:
        raise _saves_nothing(
            job, "has one block with trained parameters, and frozen ones are whole at every worker", shared
        )
    return Blockwise(stages=1, chunks=min(trained, max(LEAST_CHUNKS, whole.params.nbytes // LARGE_NBYTES)))


def _saves_nothing(job: Job, model: str, shared: SharedLayers | None) -> UsageError:
    return UsageError(
        f"zero:stage=3 frees the parameters of a block while the others compute, and the model of "
        f"{job.name or 'the job'} {model}: all would be there at once. Let Job.stages name its blocks "
        "(stages=lambda module: [module.embedding, *module.layers, module.head]), or use "
        f"zero:stage={2 if shared is None else 1}."
    )
