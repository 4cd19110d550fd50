"""The memory that one worker needs, by kind: of a part of a model, or of the whole model.

    kind          | bytes
    weights       | P, those of the parameters that are trained
    gradient      | P
    optimizer     | P for each vector of the rule's state
    versions      | P for each older version of the weights that is kept at once
    activations   | the most that autograd keeps at once for backwards to come, and what one of them computes again
    method        | P for each vector that the method keeps (`Traits.keeps`)
    codec         | P for each vector that its coders keep, and a share of it for the stripe that a worker combines
    topology      | P for each vector that the topology keeps at a worker, such as room for a pull
    server        | the slices of servers beside the worker, times the vectors that a server keeps
    frozen        | those of the parameters that are not trained; of layers that workers share, their part
    messages      | of workers with a shard, the parts that arrive from the others

A worker with a shard keeps less of the first three (`Zero.keeps`). Temporary memory of computations and of other
messages is not counted, so a process needs more.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from dure.core.vectors import equal_ranges
from dure.partition.blocks import blocks_of, call_of, first_samples, is_one_block
from dure.partition.borders import KeptMemory, measure
from dure.partition.programmed import Programmed
from dure.partition.schedule import Orders, schedule, weights_read

if TYPE_CHECKING:
    from torch import nn

    from dure.job.job import Job
    from dure.job.replica import Replica
    from dure.partition.layout import StageLayout
    from dure.partition.pipeline import Pipeline
    from dure.partition.tensor.ways import Activations


class MemoryUse(NamedTuple):
    """Bytes of memory of one worker."""

    weights: int
    gradient: int
    optimizer: int
    versions: int
    activations: int
    method: int = 0
    codec: int = 0
    topology: int = 0
    server: int = 0
    frozen: int = 0
    messages: int = 0

    @property
    def total(self) -> int:
        """The sum of all kinds."""
        return sum(self)

    def __str__(self) -> str:
        return ", ".join(f"{kind} {nbytes:,}" for kind, nbytes in self._asdict().items() if nbytes)


def of_model(job: Job, whole: Replica, batch_size: int, vectors: int) -> MemoryUse:
    """The memory of a worker with a whole model, whose optimizer keeps so many `vectors`."""
    samples = -(-batch_size // job.accumulate)
    key = "activations", samples
    if key not in whole.figures:
        before = whole.buffers_flat()
        inputs, _ = first_samples(job, samples, whole.device)
        again = job.recompute and not is_one_block(job, whole.module)
        blocks = blocks_of(job, whole.module) if again else [whole.module]
        found, numbers = measure(blocks, call_of(job, whole=not again), inputs), range(len(blocks))
        if before.numel():
            whole.load_buffers(before)
        own = found.activations(numbers)
        whole.figures[key] = sum(found.recomputed(numbers, own)) if job.recompute else own.nbytes
    nbytes = whole.params.nbytes
    return MemoryUse(nbytes, nbytes, vectors * nbytes, 0, whole.figures[key], frozen=frozen_nbytes([whole.module]))


def frozen_nbytes(modules: Iterable[nn.Module]) -> int:
    """The bytes of the parameters of `modules` that are not trained."""
    frozen = {id(each): each.nbytes for module in modules for each in module.parameters() if not each.requires_grad}
    return sum(frozen.values())


OfChunk = Callable[[int, int], "Activations"]
"""The memory that autograd keeps at a worker for the backward of a chunk, for a micro-batch of so many samples."""


def of_part(
    layout: StageLayout, part: int, batch_size: int, vectors: int, activations: OfChunk | None = None
) -> MemoryUse:
    """The memory of worker `part` of a copy of a model, whose optimizer keeps so many `vectors`.

    `activations` are those of a worker that shares layers with others.
    """
    rank = part // layout.ways
    nbytes = sum(held.stop - held.start for held in layout.held[part]) * layout.whole.params.element_size()
    versions = _versions(layout)[rank]
    optimizers = vectors * layout.pipeline.versions  # each version of the model has one of its own

    def of_chunk(chunk: int, rows: int) -> Activations:
        return layout.activations(layout.pipeline.stage_of(rank, chunk), rows)

    most = _activations(layout, rank, batch_size, activations or of_chunk)
    blocks = [layout.blocks[number] for stage in layout.stages_of(rank) for number in layout.blocks_in(stage)]
    frozen = frozen_nbytes(blocks) // layout.ways
    return MemoryUse(nbytes, nbytes, optimizers * nbytes, (versions - 1) * nbytes, most, frozen=frozen)


def steady(pipeline: Pipeline) -> range:
    """Enough mini-batches to reach the steady state of a pipeline."""
    return range(2 if pipeline.flushes else 4 * pipeline.stages)


def _versions(layout: StageLayout) -> list[int]:
    """The most versions of its weights that each rank of a pipeline keeps at once: one schedule shows all of them."""
    pipeline, known = layout.pipeline, layout.whole.figures
    if pipeline.flushes or isinstance(pipeline, Programmed):
        return [1] * pipeline.stages
    key = "versions", pipeline
    if not isinstance(pipeline, Hashable):  # a class of the user's
        return _most_versions(pipeline)
    if key not in known:
        known[key] = _most_versions(pipeline)
    found: list[int] = known[key]
    return found


def _most_versions(pipeline: Pipeline) -> list[int]:
    workers = schedule(Orders.of(pipeline, steady(pipeline))).workers
    return [weights_read(pipeline, rank, work).most_versions for rank, work in enumerate(workers)]


def _activations(layout: StageLayout, rank: int, batch_size: int, activations: OfChunk) -> int:
    """The most bytes that a worker keeps at once between forwards and backwards, and one of these computes again."""
    pipeline = layout.pipeline
    rows = [stop - start for start, stop in equal_ranges(batch_size, pipeline.micro_batches)]

    @cache
    def kept(chunk: int, rows: int) -> KeptMemory:
        return layout.kept(pipeline.stage_of(rank, chunk), rows, activations(chunk, rows))

    if isinstance(pipeline, Programmed) or pipeline.overwrites:  # activations are those of one forward
        return sum(sum(kept(chunk, rows[0])) for chunk in range(pipeline.chunks))
    held = most = 0
    for action in pipeline.order(rank, steady(pipeline)):
        if action.kind == "U":
            continue
        own = kept(action.chunk, rows[action.micro])
        held += own.between if action.kind == "F" else 0
        most = max(most, held + (0 if action.kind == "F" else own.again))
        held -= own.between if action.kind in ("B", "W") else 0
    return most
