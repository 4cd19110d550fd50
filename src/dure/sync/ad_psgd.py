"""AD-PSGD: workers average with one neighbor at a time, beside their gradients and without a server.

Lian, Zhang, Zhang, Liu, "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018.

    at every worker i, two tasks that share x_i
        compute         x' <- x_i;   g <- gradient of f at x';   x_i <- x_i - lr g
        communicate     pick a neighbor j;   x_i, x_j <- (x_i + x_j) / 2, atomically

| in the paper                    | here                                                               |
|---------------------------------|--------------------------------------------------------------------|
| W_k, doubly stochastic          | an exchange of two models (`topology.gossip`); the graph is the topology's |
| no deadlock, bipartite graph    | any graph: a busy worker lets lower ranks wait and sends higher ranks on |
| averaging thread                | an averaging begins with every gradient, unless the last is still under way or |
|                                 | a neighbor has begun one since the last gradient                    |
| gradient step                   | one of the worker's optimizer, whose state is never averaged        |
| result                          | the mean of all x_i                                                 |

An update moves the mean by lr / K: K updates are about one step of BSP. One worker alone is serial SGD.

A slow worker delays no other; its neighbors average with a model that lags. If a worker fails, the graph leaves it out
and connects its neighbors. A paused worker is not asked until it answers again. A newcomer begins as a copy of a
neighbor. A worker that has done its steps averages no more; the others go on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dure.sync.base import Reasons, Traits

if TYPE_CHECKING:
    from dure.sync.worker import Worker


@dataclass(frozen=True, slots=True)
class ADPSGD:
    """Gossip: each worker averages its model with one neighbor at a time, while it computes gradients."""

    paper: ClassVar[str] = (
        "Lian, Zhang, Zhang and Liu, Asynchronous Decentralized Parallel Stochastic Gradient Descent, ICML 2018"
    )

    traits: ClassVar[Traits] = Traits(
        needs=("peers",),
        reasons=Reasons(
            topology="its workers meet in pairs, each at its own time, and have no server between them",
        ),
        delivers="mean",
        staged=True,
        keeps={},
    )

    async def work(self, worker: Worker) -> None:
        while True:
            await worker.begin_step()
            await worker.node.sleep(0.0)  # lets pending questions and answers of neighbors run
            worker.peer.average()
            gradient = await worker.gradient()
            worker.params = worker.params.clone()  # messages that are being sent must not change
            worker.step(gradient)
