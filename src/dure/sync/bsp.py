"""Bulk synchronous parallel: every step applies the mean gradient of all workers.

Valiant, "A Bridging Model for Parallel Computation", CACM 1990; as synchronous SGD in Chen et al.,
"Revisiting Distributed Synchronous SGD", 2016.

    for t = 0, 1, 2, ...                              at every worker k
        g_k  <- gradient of f at w on a batch of size B_k
        g    <- sum of B_k g_k / sum of B_k           over all workers
        w    <- Opt(w, g)

| in the paper            | here                                                             |
|-------------------------|------------------------------------------------------------------|
| superstep and barrier   | the group's mean gradient (collectives); the clock's group (server) |
| divisor                 | the batch sizes of the contributors: it shrinks if a worker fails |

K workers with batches of B equal one worker with a batch of K B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dure.sync.base import Messages, ServerRule, Traits
from dure.topology.parameter_server.policies import Barrier

if TYPE_CHECKING:
    from dure.job.optimizer import OptimizerSpec
    from dure.sync.worker import Worker


@dataclass(frozen=True, slots=True)
class BSP:
    """Synchronous SGD: every step applies the mean gradient of all workers."""

    paper: ClassVar[str] = "Valiant, A Bridging Model for Parallel Computation, CACM 1990"

    traits: ClassVar[Traits] = Traits(
        needs=("mean gradient", "servers"),
        messages=Messages(over=("mean gradient", "servers"), votes=True),
        lockstep=True,
        delivers="replica",
        staged=True,
        regroups=True,
        keeps={},
    )

    def server_rule(self, optimizer: OptimizerSpec) -> ServerRule:
        return ServerRule(optimizer, Barrier())

    async def work(self, worker: Worker) -> None:
        if not worker.over_servers:
            while True:  # also over hybrid, whose sessions exchange rows with servers
                worker.step(await worker.mean_gradient())
        await worker.server.next_version(lend=True)
        while True:
            await worker.server.push_pull(await worker.gradient())
