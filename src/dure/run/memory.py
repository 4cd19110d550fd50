"""The memory that the workers of a run need, held against that of their machines and control groups.

A member of a strategy declares the vectors that it keeps: a method by `Traits.keeps`, a codec by `Codec.keeps`, a
topology by `Topology.worker_vectors` and `server_vectors`. Sharded data parallelism declares by `Zero.keeps` the part
that a worker keeps. `partition.memory` has the kinds of memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from dure.codec.base import CodecMemory
from dure.codec.fp32 import Float32
from dure.core.deployment import SERVER, WORKER
from dure.errors import StrategyError, UsageError
from dure.job.optimizer import vectors_of
from dure.partition.blocks import is_one_block
from dure.partition.memory import MemoryUse, frozen_nbytes, of_model, of_part
from dure.partition.mesh import ONE_STAGE, Mesh, pipeline_of, shared_of
from dure.partition.methods.zero import Zero
from dure.run.strategy import member_text
from dure.topology.offers import offers_of

if TYPE_CHECKING:
    from dure.partition.pipeline import Pipeline
    from dure.run.setup import Setup
    from dure.run.stages import Stages
    from dure.runtime.virtual.cluster import Cluster

NO_ROOM = "bytes of memory or more"
"""Words of an error about a strategy that has no room in memory; a search for others looks for them."""


def memory_use(setup: Setup, part: int, batch_size: int | None = None) -> MemoryUse:
    """The memory of a worker with `part` of the model, for mini-batches of `batch_size`, those of copy 0 if None.

    Servers beside it are not counted (`of_workers`).
    """
    size = setup.batch_sizes[0] if batch_size is None else batch_size
    vectors = vectors_of(setup.job.optimizer)
    if setup.stages is None or _is_whole(setup):
        return _with_members(of_model(setup.job, setup.replica, size, vectors), setup, part)
    activations = None if setup.stages.shared is None else setup.stages.modules[part].kept
    return _with_members(of_part(setup.stages.layout, part, size, vectors, activations), setup, part)


def _is_whole(setup: Setup) -> bool:
    """Whether a worker computes the whole model, block by block: blocks hand their outputs on without a copy."""
    return setup.keeps_shards and setup.parts == 1


def of_workers(setup: Setup, workers: Iterable[int]) -> Iterator[tuple[int, MemoryUse]]:
    """The memory of each of `workers`, with the servers beside it."""
    found: dict[tuple[int, int], MemoryUse] = {}
    beside = _beside_workers(setup)
    for worker in workers:
        size, part = key = setup.batch_sizes[setup.replica_of(worker)], worker % setup.parts
        use = found[key] = found.get(key) or memory_use(setup, part, size)
        yield worker, use._replace(server=beside.get(worker, 0))


def check_worker_memory(setup: Setup, cluster: Cluster) -> None:
    """Raise `UsageError` for the first worker that needs more memory than its machine has for it."""
    limits = {worker: limit for worker in range(setup.workers) if (limit := cluster.memory_of(worker)) is not None}
    for worker, use in of_workers(setup, limits):
        if use.total > limits[worker]:
            raise UsageError(
                f"worker {worker} needs {use.total:,} {NO_ROOM} ({use}), and machine "
                f"{setup.machines[worker]} has {limits[worker]:,} for it. {_kept(setup)}{_advice(setup)}"
            )


def check_process_memory(setup: Setup, worker: int, limit: int | None) -> None:
    """Raise `UsageError` if the process of a worker needs more memory than its control groups allow.

    The activations of a whole model are not known here, and not counted.
    """
    if limit is None:
        return
    if setup.stages is None or _is_whole(setup):
        nbytes = setup.replica.params.nbytes
        frozen, vectors = frozen_nbytes([setup.replica.module]), vectors_of(setup.job.optimizer)
        use = _with_members(MemoryUse(nbytes, nbytes, vectors * nbytes, 0, 0, frozen=frozen), setup, 0)
    else:
        use = memory_use(setup, worker % setup.parts, setup.batch_sizes[setup.replica_of(worker)])
    sharded = setup.zero is not None and setup.zero.stage > 1  # each slice or block is freed
    backward = 0 if sharded else use.weights  # the gradients of all layers, before they are in the flat gradient
    if use.total + backward > limit:
        raise UsageError(
            f"worker {worker} needs {use.total + backward:,} {NO_ROOM} ({use}, backward {backward:,}), "
            f"and its control group allows {limit:,}. {_kept(setup)}{_advice(setup)}"
        )


# ---- the members of a strategy


def _with_members(use: MemoryUse, setup: Setup, part: int) -> MemoryUse:
    """`use` with the vectors that method, codec and topology keep at a worker, and with the part that a shard is."""
    own = setup.of_worker(part)
    use = _sharded(use, own)
    coders = _codec_memory(own)
    stripe = coders.combiner / own.workers if _combines_stripes(own) else 0.0
    return use._replace(
        method=len(_method_vectors(own)) * use.weights,
        codec=round((coders.sender + stripe) * use.weights),
        topology=round(own.topology.worker_vectors * use.weights),
    )


def _sharded(use: MemoryUse, own: Setup) -> MemoryUse:
    """`use` of a worker that keeps a shard of its part of the model, if it does."""
    if own.zero is None or own.shards is None:
        return use
    kept, itemsize = own.zero.keeps(own.shards), own.replica.params.element_size()
    return use._replace(
        weights=kept.weights * itemsize,
        gradient=kept.gradient * itemsize,
        optimizer=vectors_of(own.job.optimizer) * kept.optimizer * itemsize,
        messages=kept.messages * itemsize,
    )


def _method_vectors(setup: Setup) -> tuple[str, ...]:
    encoded = not isinstance(setup.strategy.codec, Float32)
    return setup.traits.kept_over(offers_of(setup.strategy.topology), encoded=encoded)


def _codec_memory(setup: Setup) -> CodecMemory:
    return setup.strategy.codec.keeps(setup.workers)


def _combines_stripes(setup: Setup) -> bool:
    """Whether each worker combines the messages of all for its part of the vector."""
    return not setup.topology.servers and setup.strategy.codec.exchange == "reduce_scatter"


def _beside_workers(setup: Setup) -> dict[int, int]:
    """The bytes of the servers on the machine of each worker that has some."""
    found: dict[int, int] = {}
    for node in setup.deployment.nodes:
        if node.id.kind == SERVER and node.beside is not None and node.beside.kind == WORKER:
            worker = node.beside.rank
            found[worker] = found.get(worker, 0) + of_server(setup, node.id.rank)
    return found


def of_server(setup: Setup, number: int) -> int:
    """The bytes that server `number` keeps."""
    own = setup.of_server(number)
    vectors = own.topology.server_vectors
    if setup.strategy.codec.vote() is not None:
        vectors += _codec_memory(own).combiner
    return round(own.topology.held(number % own.topology.servers) * vectors * setup.replica.params.element_size())


# ---- errors


def _kept(setup: Setup) -> str:
    names = _method_vectors(setup)
    return f"{setup.strategy.text()['sync']} keeps {', '.join(names)} at each worker. " if names else ""


def _advice(setup: Setup) -> str:
    changes = [f"shard it, as in --partition {more}" for more in _sharded_more(setup)]
    if setup.zero is not None and not changes:
        changes = [f"use more workers than {setup.workers}"]
    if setup.parts == 1:
        changes.append("split the model, as in --partition gpipe:stages=2 or tensor:ways=2")
    elif setup.stages is not None:
        changes += _splits(setup, setup.stages)
    text = ", ".join([*changes, "or make the mini-batch smaller."])
    return text[0].upper() + text[1:]


def _sharded_more(setup: Setup) -> list[str]:
    """The partition that shards most, in addition to that of `setup`; none where no more can be sharded."""
    partition, zero = setup.strategy.partition, setup.zero
    pipeline = None if pipeline_of(partition) is ONE_STAGE or setup.parts == 1 else pipeline_of(partition)
    shared = shared_of(partition)
    stage, within = (0, None) if zero is None else (zero.stage, zero.within)
    blocks = not is_one_block(setup.job, setup.model.replica.module) and (shared is None or shared.in_pipelines)
    for more in (Zero(stage=3, within=within), Zero(stage=2, within=within), Zero(stage=1, within=within)):
        if more.stage <= stage or (more.stage == 3 and not blocks):
            continue
        if more.stage > 1 and setup.job.accumulate > 1:  # a worker sums whole gradients
            continue
        joined = more if setup.parts == 1 else Mesh(pipeline, shared, more)
        with suppress(StrategyError):
            return [member_text("partition", replace(setup.strategy, partition=joined).partition)]
    return []


def _splits(setup: Setup, stages: Stages) -> list[str]:
    """Changes of a model that is split, with which its parts are smaller."""
    pipeline, shared = stages.pipeline, stages.shared
    ways = [] if shared is None else [f"more ways than {shared.ways}"]
    deeper = [] if shared is not None and not shared.in_pipelines else [f"more stages than {pipeline.stages}"]
    deep = pipeline is not ONE_STAGE and not stages.sharded
    takes = deep and not setup.job.recompute and _takes_remat(pipeline)
    return [f"use {' or '.join([*ways, *deeper])}", *["add remat=true"] * takes]


def _takes_remat(pipeline: Pipeline) -> bool:
    """Whether the method can compute activations again, and does not do so yet."""
    try:
        return replace(pipeline, remat=True) != pipeline
    except ValueError:
        return False
