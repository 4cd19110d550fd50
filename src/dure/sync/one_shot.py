"""One-shot averaging (SimuParallelSGD): workers train alone to the end, then average their models once.

Zinkevich, Weimer, Smola, Li, "Parallelized Stochastic Gradient Descent", NeurIPS 2010, algorithm 3.

    for t = 1, ..., T                                 at every worker k, on data of its own
        w_k  <- Opt_k(w_k, gradient of f at w_k)
    v  <- sum of B_k w_k / sum of B_k                 over all workers, once

| in the paper                  | here                                                                |
|-------------------------------|---------------------------------------------------------------------|
| T = m / k examples, shuffled  | the worker's share of the data, in an order of its own; its `steps` |
| w_0 = 0 everywhere            | the job's initial model, the same everywhere                        |
| constant rate, one example    | the job's optimizer and mini-batches; nothing of its state is shared |
| v = (1/k) sum of w_k          | weighted by batch size, where workers differ                        |

It is `averaging` with a period of the whole run. A slow worker delays only the end. Over servers, a failed worker is
left out of the mean; a late worker makes all its steps, and the others wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dure.core.node import EndOfWork
from dure.job.optimizer import OptimizerSpec
from dure.sync.base import ServerRule, Traits
from dure.topology.parameter_server.policies import Barrier

if TYPE_CHECKING:
    from dure.sync.worker import Worker


@dataclass(frozen=True, slots=True)
class OneShot:
    """Independent training of every worker, and one average of all models at the end."""

    paper: ClassVar[str] = "Zinkevich et al., Parallelized Stochastic Gradient Descent, NeurIPS 2010"

    traits: ClassVar[Traits] = Traits(
        needs=("group", "servers"),
        lockstep=True,
        delivers="mean",
        alone=True,
        staged=True,
    )

    def server_rule(self, optimizer: OptimizerSpec) -> ServerRule:
        return ServerRule(OptimizerSpec("assign"), Barrier())

    async def work(self, worker: Worker) -> None:
        if worker.state.stats:
            return  # the other workers have averaged without this one
        try:
            while True:
                worker.step(await worker.gradient())
                worker.heartbeat()
        except EndOfWork:
            if not worker.over_servers:
                await worker.group.mean_params()
            else:
                await worker.server.push(worker.params, stats={"clock": worker.clock})
                await worker.server.next_version()
