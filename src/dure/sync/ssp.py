"""Stale synchronous parallel: a worker may lead the slowest one by at most `bound` clocks.

Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NeurIPS 2013.

    for c = 0, 1, 2, ...                              at every worker
        if the cache is older than clock c - bound:
            wait until  min over workers of clock >= c - bound
            w (the cache)  <- pull;   its clock is that minimum
        g     <- gradient of f at w
        w     <- w + u,  u = Opt(g)                   read my writes
        push u;   clock <- c + 1

| in the paper               | here                                                              |
|----------------------------|-------------------------------------------------------------------|
| s                          | `bound`                                                           |
| cache and read-my-writes   | ``form=rmw``: the worker's optimizer makes u, the server adds     |
| a read from the servers    | ``form=snapshot``, the default: a pull at every clock             |
| additive updates           | snapshot: each g is one update of the server, of rate lr          |

A read holds every update of clock c - bound - 1 and earlier, and each of the worker's own exactly once. K workers move
the model K times per clock: ``bound=0`` is BSP with K times the learning rate; ``bound=inf`` never waits (ASP).
A worker that is always five times slower slows all others to its rate once their lead is used up. A failed worker
leaves the clock at once, a paused one after a while; a newcomer enters at the slowest clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from dure.core.catalogue import parameter
from dure.job.optimizer import OptimizerSpec
from dure.sync.base import Messages, Reasons, ServerRule, Traits
from dure.topology.parameter_server.policies import Bounded

if TYPE_CHECKING:
    from dure.sync.worker import Worker


@dataclass(frozen=True, slots=True)
class SSP:
    """Asynchronous SGD with bounded staleness: no worker leads the slowest one by more than `bound` clocks."""

    paper: ClassVar[str] = (
        "Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NeurIPS 2013"
    )

    bound: float = parameter(
        3,
        "clocks (completed steps) by which a worker may lead the slowest one; inf: no bound",
        range=">= 0",
        unit="clocks",
        symbol="s",
    )
    form: Literal["snapshot", "rmw"] = parameter(
        "snapshot",
        "snapshot: a pull at every clock; rmw: a cache with the worker's own updates, pulled when too old",
    )

    traits: ClassVar[Traits] = Traits(
        needs=("servers",),
        reasons=Reasons(
            topology="its workers are at different clocks",
            collective="a collective needs all of them at the same one",
            stages="its servers count the lead of each worker, and each stage would have a count of its own",
        ),
        messages=Messages(over=("servers",)),
        keeps={},
    )

    def __post_init__(self) -> None:
        if not self.bound >= 0:
            raise ValueError(f"bound counts clocks and must be >= 0, got {self.bound}. Use 0 for BSP or inf for ASP.")
        if self.form == "rmw" and self.bound == math.inf:
            raise ValueError("form=rmw uses a cache until it is too old for bound: with inf it never is. Use bound=3.")

    @property
    def _stale_gradients(self) -> bool:
        """Whether the servers get gradients, which remedies may correct, or finished updates."""
        return self.form == "snapshot"

    def adapted(self) -> Traits:
        """The traits under these parameters."""
        return replace(self.traits, stale_gradients=self._stale_gradients)

    def server_rule(self, optimizer: OptimizerSpec) -> ServerRule:
        return ServerRule(
            OptimizerSpec("add") if self.form == "rmw" else optimizer, Bounded(lead=self.bound), reduce="sum"
        )

    async def work(self, worker: Worker) -> None:
        if self.form == "rmw":
            await self.work_on_cache(worker)
        await worker.server.next_version(lend=True)
        while True:
            await worker.server.push_pull(await worker.gradient())

    async def work_on_cache(self, worker: Worker) -> None:
        while True:
            await worker.begin_step()
            if worker.kept_plain.get("cached", -math.inf) < worker.clock - self.bound:
                await worker.server.next_version()
                worker.kept_plain["cached"] = worker.server.slowest
            gradient = await worker.gradient()
            # The servers add changes up, so each worker reads its own writes: in its cache at once, in a pull later.
            before = worker.params.clone()
            worker.step(gradient)
            await worker.server.push(worker.params - before)
