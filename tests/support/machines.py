"""Machines for nodes of a virtual cluster, without a run."""

from __future__ import annotations

from dure.runtime.virtual.cluster import Cluster


def placed(cluster: Cluster, servers: int = 0, *, colocated: bool = False) -> dict[str, int]:
    """Each worker on its machine; each server on one of its own, or beside a worker."""
    workers = cluster.workers
    places = {f"worker {rank}": rank for rank in range(workers)}
    return cluster.placed(
        places | {f"server {each}": each % workers if colocated else workers + each for each in range(servers)}
    )
