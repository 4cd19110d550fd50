"""K-sync and K-batch-sync SGD: an update needs K gradients of the newest version; the other workers start over.

Dutta, Joshi, Ghosh, Dube, Nagpurkar, "Slow and Stale Gradients Can Win the Race: Error-Runtime Trade-offs in
Distributed SGD", AISTATS 2018.

    for j = 0, 1, 2, ...                              at the server, with P workers
        K-sync:        wait until K workers have finished a mini-batch at w_j
        K-batch-sync:  wait until K mini-batches at w_j are finished, several by one worker if it is fast
        w_j+1  <- w_j - (lr / K) sum of the K gradients
        the other workers stop what they compute, and start over at w_j+1

| in the paper               | here                                                                   |
|----------------------------|------------------------------------------------------------------------|
| K of P                     | `k`; all but one live worker in twenty (or but one) if left out        |
| stop and start over        | abort by the clock (`Worker.gradient_unless_aborted`); on processes, refusal |
| w - (lr / K) sum           | the job's optimizer on the mean of the K                               |

No gradient is stale. With exponential times of mean 1 an update takes H_P - H_(P-K) by K-sync, K / P by K-batch-sync.
``k-sync:k=P`` is BSP; k-batch-sync with K = P is not, unless all are equally fast. Slow workers are left out of
K-sync's updates, so samples are drawn from the whole set. If fewer than K workers are left, an update of K-sync takes
the gradients of all of them; K-batch-sync takes several of each.

A process cannot stop a gradient halfway: it finishes the gradient, which is refused before its bytes are sent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from dure.core.parameter import parameter
from dure.sync.base import Messages, Reasons, ServerRule, Traits
from dure.topology.parameter_server.admission import most
from dure.topology.parameter_server.policies import FirstOf

if TYPE_CHECKING:
    from dure.job.optimizer import OptimizerSpec
    from dure.sync.worker import Worker


@dataclass(frozen=True, slots=True)
class KSync:
    """Synchronous SGD on the gradients of the first `k` workers; the other workers start over."""

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
            topology="it goes on without the slowest workers",
            collective="a collective needs all of them",
            stages="it leaves gradients out, and each stage would leave out others",
        ),
        messages=Messages(over=("servers",)),
        lockstep=True,
        sampling="whole",
    )

    def __post_init__(self) -> None:
        if self.k is not None and self.k < 1:
            raise ValueError(f"k counts workers and must be >= 1, got {self.k}. Use as many as there are for BSP.")

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
        return ServerRule(optimizer, FirstOf(self.quorum, distinct=True), quorum=self.quorum)

    async def work(self, worker: Worker) -> None:
        while True:
            worker.set_clock(await worker.server.next_version(lend=True))
            gradient = await worker.gradient_unless_aborted()
            if gradient is not None:
                await worker.server.push(gradient)


@dataclass(frozen=True, slots=True)
class KBatchSync:
    """Synchronous SGD on the first `k` mini-batches of any workers; unfinished ones start over."""

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
            topology="a fast worker gives several gradients to an update",
            collective="a collective takes one of each",
            stages="it leaves gradients out, and each stage would leave out others",
        ),
        messages=Messages(over=("servers",)),
        sampling="whole",
    )

    def __post_init__(self) -> None:
        if self.k is not None and self.k < 1:
            raise ValueError(f"k counts mini-batches and must be >= 1, got {self.k}. Use 1 for the first that comes.")

    def quorum(self, workers: int) -> int:
        """K, the gradients of an update, with `workers` live ones."""
        return most(workers) if self.k is None else self.k

    def server_rule(self, optimizer: OptimizerSpec) -> ServerRule:
        return ServerRule(optimizer, FirstOf(self.quorum, distinct=False), quorum=self.quorum)

    async def work(self, worker: Worker) -> None:
        while True:
            await worker.server.next_version(lend=True)
            gradient = await worker.gradient_unless_aborted()
            if gradient is not None:
                await worker.server.push(gradient)
