"""K-async and K-batch-async SGD: an update needs K gradients of any versions; no worker starts over.

Dutta, Joshi, Ghosh, Dube, Nagpurkar, "Slow and Stale Gradients Can Win the Race: Error-Runtime Trade-offs in
Distributed SGD", AISTATS 2018.

    for j = 0, 1, 2, ...                              at the server, with P workers
        K-async:        wait until K workers have pushed a gradient; those K wait for the update
        K-batch-async:  wait until K gradients have been pushed; a worker goes on at the newest w after each push
        w_j+1  <- w_j - (lr / K) sum of the K gradients
        the other workers go on with what they compute, at the older w that they have

| in the paper               | here                                                                   |
|----------------------------|------------------------------------------------------------------------|
| K of P                     | `k`; all but one live worker in twenty (or but one) if left out        |
| w - (lr / K) sum           | the job's optimizer on the mean of the K                               |
| staleness, in updates      | unbounded; by K-batch-async (P - 1) / K on average                     |

No gradient is dropped: those of a slow worker come late, and count. ``k=1`` is asynchronous SGD; k-async with
K = P is BSP. K-batch-async is the n-softsync of Zhang, Gupta, Lian, Liu (2016) with K = P / n; their rate by staleness
is ``+staleness-lr``. The server does not wait for a failed worker. If fewer than K workers are left, an update of
K-async takes the gradients of all of them; the last group of K-batch-async may be smaller than K.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from dure.core.parameter import parameter
from dure.sync.base import Messages, Reasons, ServerRule, Traits
from dure.topology.parameter_server.admission import most
from dure.topology.parameter_server.policies import AnyOf

if TYPE_CHECKING:
    from dure.job.optimizer import OptimizerSpec
    from dure.sync.worker import Worker


@dataclass(frozen=True, slots=True)
class KAsync:
    """Asynchronous SGD on the gradients of any `k` workers, however stale; those `k` wait for the update."""

    paper: ClassVar[str] = (
        "Dutta, Joshi, Ghosh, Dube and Nagpurkar, Slow and Stale Gradients Can Win the Race, AISTATS 2018"
    )

    k: int | None = parameter(
        None,
        "workers whose gradients make an update; none: all but one in twenty, or all but one",
        range=">= 1",
        unit="workers",
        symbol="K",
    )

    traits: ClassVar[Traits] = Traits(
        needs=("servers",),
        reasons=Reasons(
            topology="its workers are at different versions",
            collective="a collective needs all of them at the same one",
            stages="its servers group the gradients that come first, and each stage would form other groups",
        ),
        messages=Messages(over=("servers",)),
        stale_gradients=True,
        sampling="whole",
    )

    def __post_init__(self) -> None:
        if self.k is not None and self.k < 1:
            raise ValueError(f"k counts workers and must be >= 1, got {self.k}. Use 1 for asynchronous SGD.")

    @property
    def _fewest(self) -> int:
        """The least number of workers."""
        return self.k or 1

    def adapted(self) -> Traits:
        """The traits under these parameters."""
        return replace(self.traits, fewest=self._fewest)

    def quorum(self, workers: int) -> int:
        """K, the gradients of an update, with `workers` live ones."""
        return most(workers) if self.k is None else self.k

    def server_rule(self, optimizer: OptimizerSpec) -> ServerRule:
        return ServerRule(optimizer, AnyOf(self.quorum, distinct=True), quorum=self.quorum)

    async def work(self, worker: Worker) -> None:
        await worker.server.next_version(lend=True)
        while True:
            await worker.server.push_pull(await worker.gradient())


@dataclass(frozen=True, slots=True)
class KBatchAsync:
    """Asynchronous SGD on any `k` gradients, however stale; no worker waits."""

    paper: ClassVar[str] = (
        "Dutta, Joshi, Ghosh, Dube and Nagpurkar, Slow and Stale Gradients Can Win the Race, AISTATS 2018"
    )

    k: int | None = parameter(
        None,
        "mini-batches that make an update; none: as many as all workers but one in twenty, or but one",
        range=">= 1",
        unit="mini-batches",
        symbol="K",
    )

    traits: ClassVar[Traits] = Traits(
        needs=("servers",),
        reasons=Reasons(
            topology="its workers push at different times",
            collective="a collective needs all of them at once",
            stages="its servers group the gradients that come first, and each stage would form other groups",
        ),
        messages=Messages(over=("servers",)),
        stale_gradients=True,
        sampling="whole",
    )

    def __post_init__(self) -> None:
        if self.k is not None and self.k < 1:
            raise ValueError(f"k counts mini-batches and must be >= 1, got {self.k}. Use 1 for asynchronous SGD.")

    def quorum(self, workers: int) -> int:
        """K, the gradients of an update, with `workers` live ones."""
        return most(workers) if self.k is None else self.k

    def server_rule(self, optimizer: OptimizerSpec) -> ServerRule:
        return ServerRule(optimizer, AnyOf(self.quorum, distinct=False), quorum=self.quorum)

    async def work(self, worker: Worker) -> None:
        await worker.server.next_version(lend=True)
        while True:
            await worker.server.push_pull(await worker.gradient())
