"""The price of a strategy's machines, by the prices in the cluster file."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dure.runtime.virtual.cluster import Cluster


def cost_per_hour(cluster: Cluster, server_machines: int) -> float | None:
    """The price of an hour of all machines of workers and so many of servers; None if the file has no prices."""
    prices = [kind.price for kind in cluster.machines]
    if not all(price is not None for price in prices):
        return None
    total = sum(kind.count * price for kind, price in zip(cluster.machines, prices, strict=True) if price is not None)
    return total + server_machines * (cluster.servers.price or 0.0)
