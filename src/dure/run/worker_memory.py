"""The memory of each worker, held against that of its machine in virtual time, and of its process in a real run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dure.errors import UsageError
from dure.job.optimizer import FlatOptimizer
from dure.partition.memory import MemoryUse, of_model, of_part
from dure.partition.mesh import ONE_STAGE

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
        use = found[key] = found.get(key) or memory_use(setup, key[1], key[0])
        if use.total > limit:
            raise UsageError(
                f"worker {worker} needs {use.total:,} bytes of memory or more ({use}), and machine "
                f"{setup.machines[worker]} has {limit:,} for it. {_advice(setup)}"
            )


def check_process_memory(setup: Setup, worker: int, limit: int | None) -> None:
    """Raise `UsageError` if the process of a worker needs more memory than its control groups allow.

    The activations of a whole model are not known here, and not counted.
    """
    if limit is None:
        return
    if setup.stages is None:
        nbytes = setup.replica.params.nbytes
        use = MemoryUse(nbytes, nbytes, _vectors(setup) * nbytes, 0, 0)
    else:
        use = memory_use(setup, worker % setup.parts, setup.batch_sizes[setup.replica_of(worker)])
    backward = use.weights  # the gradients of all layers, before they are in the flat gradient
    if use.total + backward > limit:
        raise UsageError(
            f"worker {worker} needs {use.total + backward:,} bytes of memory or more ({use}, backward {backward:,}), "
            f"and its control group allows {limit:,}. {_advice(setup)}"
        )


def _vectors(setup: Setup) -> int:
    """The vectors of the optimizer's state."""
    return len(FlatOptimizer(setup.job.optimizer, numel=1).vectors)


def memory_use(setup: Setup, part: int, batch_size: int | None = None) -> MemoryUse:
    """The memory of a worker with `part` of the model, for mini-batches of `batch_size`, those of copy 0 if None."""
    size = setup.batch_sizes[0] if batch_size is None else batch_size
    if setup.stages is None:
        return of_model(setup.job, setup.replica, size, _vectors(setup))
    activations = None if setup.stages.shared is None else setup.stages.modules[part].kept
    return of_part(setup.stages.layout, part, size, _vectors(setup), activations)


def _advice(setup: Setup) -> str:
    if setup.stages is None:
        return "Split the model, as in --partition gpipe:stages=2 or tensor:ways=2, or make the mini-batch smaller."
    pipeline, shared = setup.stages.pipeline, setup.stages.shared
    ways = [] if shared is None else [f"more ways than {shared.ways}"]
    stages = [] if shared is not None and not shared.in_pipelines else [f"more stages than {pipeline.stages}"]
    less = "" if pipeline.remat or pipeline is ONE_STAGE else "add remat=true, "
    return f"Use {' or '.join([*ways, *stages])}, {less}or make the mini-batch smaller."
