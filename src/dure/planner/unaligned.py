"""Workers that do not begin their steps together, as after many steps of asynchronous methods.

In virtual time all workers start at once, and workers of constant speed stay in step for hundreds of steps, in which
all messages meet at the servers. In a run of minutes they do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dure.runtime.virtual.compute import Constant, LogNormal

if TYPE_CHECKING:
    from dure.runtime.virtual.cluster import Cluster

SPREAD = 0.02
"""Standard deviation of the logarithm of a step's duration: small, so that workers drift apart as on real machines."""


class Unaligned(LogNormal):
    """Durations whose first step is longer by a random part of `lead` steps."""

    lead: float = 0.0

    def blocks(self, rng: np.random.Generator) -> Iterator[Sequence[float]]:
        blocks = super().blocks(rng)
        first, *others = next(blocks)
        yield [first + self.lead * rng.random(), *others]
        yield from blocks


def unaligned(cluster: Cluster, lead: int) -> Cluster:
    """`cluster` whose workers of constant speed begin at random times of the first `lead` steps."""
    kinds = [
        kind.changed(compute=Unaligned(sigma=SPREAD, lead=lead, **_mean(kind.compute)))
        if isinstance(kind.compute, Constant)
        else kind
        for kind in cluster.machines
    ]
    return cluster.changed(machines=tuple(kinds))


def _mean(compute: Constant) -> dict[str, float | None]:
    return {name: getattr(compute, name) for name in ("seconds", "flops_per_second", "overhead", "call")}
