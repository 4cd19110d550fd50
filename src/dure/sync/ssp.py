"""Stale synchronous parallel: the fast may lead the slow, but not by much.

Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NeurIPS 2013.

    for c = 0, 1, 2, ...                              at every worker
        wait until  min over workers of clock >= c - bound
        w     <- pull
        g     <- gradient of f at w
        push g;   clock <- c + 1

| in the paper               | here                                                              |
|----------------------------|-------------------------------------------------------------------|
| s                          | `bound`                                                           |
| additive updates           | each push is one update of the server, of rate lr: K workers move K times lr per clock |
| read at clock c            | a snapshot: exactly the updates applied when the wait ended        |

``bound=0`` is BSP in its snapshot form, with K times the learning rate; ``bound=inf`` never waits (ASP).
A worker that is five times slower for good slows everybody to its rate once the lead is used up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dure.sync.clock import Bounded, Policy

if TYPE_CHECKING:
    from dure.optim import OptimizerSpec
    from dure.worker import Worker


@dataclass(frozen=True, slots=True)
class SSP:
    """Bounded staleness: no worker leads the slowest by more than `bound` clocks."""

    bound: float = 3

    topologies: ClassVar[tuple[str, ...]] = ("ps",)
    lockstep: ClassVar[bool] = False
    delivers: ClassVar[str] = "server"
    stale_gradients: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.bound >= 0:
            raise ValueError(f"bound counts clocks and must be >= 0, got {self.bound}. Use 0 for BSP or inf for ASP.")

    def policy(self) -> Policy:
        return Bounded(lead=self.bound)

    def server_optimizer(self, optimizer: OptimizerSpec) -> OptimizerSpec:
        return optimizer

    @property
    def reduce(self) -> str:
        return "sum"

    async def work(self, worker: Worker) -> None:
        while True:
            await worker.admission()
            await worker.refresh()
            await worker.push(await worker.gradient())
