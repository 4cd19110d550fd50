"""The memory of each worker of a virtual run, held against that of its machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dure.errors import UsageError
from dure.job.optimizer import FlatOptimizer
from dure.partition.memory import MemoryUse, of_model, of_stage

if TYPE_CHECKING:
    from dure.run.setup import Setup
    from dure.runtime.virtual.cluster import Cluster


def check_worker_memory(setup: Setup, cluster: Cluster) -> None:
    """Raise `UsageError` for the first worker that needs more memory than its machine has for it."""
    found: dict[tuple[int, int], MemoryUse] = {}
    for worker in range(setup.workers):
        limit = cluster.memory_of(worker)
        if limit is None:
            continue
        key = setup.batch_sizes[setup.replica_of(worker)], worker % setup.parts
        use = found[key] = found.get(key) or _use(setup, *key)
        if use.total > limit:
            raise UsageError(
                f"worker {worker} needs {use.total:,} bytes of memory or more ({use}), and machine "
                f"{setup.machines[worker]} has {limit:,} for it. {_advice(setup)}"
            )


def _use(setup: Setup, batch_size: int, rank: int) -> MemoryUse:
    vectors = len(FlatOptimizer(setup.job.optimizer, numel=1).vectors)
    if setup.stages is None:
        return of_model(setup.job, setup.replica, batch_size, vectors)
    return of_stage(setup.stages.layout, rank, batch_size, vectors)


def _advice(setup: Setup) -> str:
    if setup.stages is None:
        return "Split the model by layers, as in --partition gpipe:stages=2, or make the mini-batch smaller."
    pipeline = setup.stages.pipeline
    less = "" if pipeline.remat else "add remat=true, "
    return f"Use more stages than {pipeline.stages}, {less}or make the mini-batch smaller."
