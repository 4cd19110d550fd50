"""Variants of a cluster: other bandwidths, equal or unequal workers, other numbers of workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from dure.runtime.virtual.cluster import Cluster, InsideLink, Link
from dure.runtime.virtual.compute import Compute, Constant, LogNormal, Trace

L = TypeVar("L", Link, InsideLink)

SIGMA = 0.5
"""Spread of the durations of steps in a cluster with stragglers."""


def with_bandwidth(cluster: Cluster, factor: float) -> Cluster:
    """`cluster` with the bandwidths of all links between machines multiplied by `factor`."""
    return _with_links(cluster, lambda link: link.changed(bandwidth=link.bandwidth * factor))


def with_free_network(cluster: Cluster) -> Cluster:
    """`cluster` in which messages take almost no time; on one host, a synchronization costs no core."""

    def near(link: L) -> L:
        return link.changed(bandwidth=link.bandwidth * 1e6, latency=0.0)

    host = cluster.host
    if host is not None:
        free = host.all_reduce.changed(start=0.0, byte=0.0)
        host = host.changed(all_reduce=free, gradient=free)
    kinds = tuple(kind.changed(inside=kind.inside and near(kind.inside)) for kind in cluster.machines)
    inside = cluster.changed(machines=kinds, inside=near(cluster.inside), host=host, alpha=0.0, beta=0.0)
    return _with_links(inside, near)


def with_equal_workers(cluster: Cluster) -> Cluster:
    """`cluster` whose workers all have the mean speed, and steps of constant duration."""
    speeds = [cluster.durations(worker, 0).speed for worker in range(cluster.workers)]
    mean = sum(speeds) / len(speeds)
    kinds = [kind.changed(speed=mean, compute=Constant(**_common(kind.compute))) for kind in cluster.machines]
    return cluster.changed(machines=tuple(kinds), events=())


def with_stragglers(cluster: Cluster) -> Cluster:
    """`cluster` whose steps have log-normal durations of the same means."""
    kinds = [kind.changed(compute=LogNormal(sigma=SIGMA, **_common(kind.compute))) for kind in cluster.machines]
    return cluster.changed(machines=tuple(kinds))


def of_workers(cluster: Cluster, workers: int) -> Cluster | None:
    """`cluster` with another number of workers; None if its machines are of several kinds, or one would be in part."""
    kind = cluster.machines[0]
    if len(cluster.machines) > 1 or isinstance(kind.speed, tuple) or cluster.events:
        return None
    if kind.count == 1 and kind.workers > 1:
        return cluster.changed(machines=(kind.changed(workers=workers),))
    if workers % kind.workers:
        return None
    return cluster.changed(machines=(kind.changed(count=workers // kind.workers),))


def without_limits(cluster: Cluster) -> Cluster:
    """`cluster` whose workers have memory without limit."""
    return cluster.changed(machines=tuple(kind.changed(memory=None) for kind in cluster.machines))


def _with_links(cluster: Cluster, change: Callable[[Link], Link]) -> Cluster:
    kinds = tuple(kind.changed(link=kind.link and change(kind.link)) for kind in cluster.machines)
    servers = cluster.servers.changed(link=cluster.servers.link and change(cluster.servers.link))
    return cluster.changed(machines=kinds, servers=servers, link=change(cluster.link))


def _common(compute: Compute) -> dict[str, Any]:
    """The values that all distributions have; of a trace its mean."""
    found = {name: getattr(compute, name) for name in ("seconds", "flops_per_second", "overhead")}
    return found | {"seconds": compute.mean(0.0)} if isinstance(compute, Trace) else found
