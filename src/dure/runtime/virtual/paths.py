"""The costs of a message between the workers of a cluster, from its description alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from dure.core.collective_cost import HostedRanks, Path, Paths
from dure.runtime.virtual.cluster import Cluster


def paths_of(cluster: Cluster, places: Sequence[int], *, gradient: bool = False) -> Paths:
    """The costs of the rounds of a collective among `places` (`Cluster.placed`), in the order of ranks.

    `gradient`: its tensor leaves during backward.
    """
    machines = [cluster.machine_of(place) for place in places]
    path = path_of(cluster, machines, gradient=gradient)
    if len(set(machines)) == len(set(places)):
        return path
    inside = {each: cluster.inside_of(each) for each in machines}
    return HostedRanks(
        machines,
        {each: path._replace(**cluster.link_of(each).model_dump()) for each in machines},
        {each: path._replace(beta=0.0, **link.model_dump()) for each, link in inside.items()},
    )


def path_of(cluster: Cluster, machines: Iterable[int], *, gradient: bool = False) -> Path:
    """The slowest link between `machines`, which bounds a round of a collective."""
    host = cluster.host
    if host is not None:
        round_ = host.gradient if gradient else host.all_reduce
        return Path(0.0, round_.start, math.inf, round_.byte)
    links = [cluster.link_of(machine) for machine in set(machines)]
    latency, bandwidth = max(link.latency for link in links), min(link.bandwidth for link in links)
    return Path(latency, cluster.alpha, bandwidth, cluster.beta, cluster.gamma, cluster.header)
