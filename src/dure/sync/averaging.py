"""Periodic model averaging: run apart for a while, then meet in the middle.

Su, Chen, "Experiments on Parallel Training of Deep Neural Network using Model Averaging", 2015;
as local SGD in Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019.

    for t = 1, 2, 3, ...                              at every worker k
        w_k  <- Opt_k(w_k, gradient of f at w_k)
        if t mod period = 0
            w_k  <- sum of B_k w_k / sum of B_k       over all workers

| in the paper                 | here                                                             |
|------------------------------|------------------------------------------------------------------|
| tau                          | `period`, in mini-batches                                        |
| average over a parameter server | shards that store the weighted mean of what a round pushed       |
| state of the local optimizer | momentum and Adam state stay with the worker, as they are         |

``period=1`` with plain SGD is BSP.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from dure.runtime.base import EndOfWork
from dure.sync.clock import Barrier, Policy

if TYPE_CHECKING:
    from dure.optim import OptimizerSpec
    from dure.worker import Worker


@dataclass(frozen=True, slots=True)
class Averaging:
    """Local SGD: average the models every `period` steps."""

    period: int = 10

    topologies: ClassVar[tuple[str, ...]] = ("collective", "ps")
    lockstep: ClassVar[bool] = True
    delivers: ClassVar[str] = "mean"

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ValueError(f"period counts mini-batches and must be >= 1, got {self.period}. Use 1 for every step.")

    def policy(self) -> Policy:
        return Barrier()

    def server_optimizer(self, optimizer: OptimizerSpec) -> OptimizerSpec:
        return replace(optimizer, name="assign")

    @property
    def reduce(self) -> str:
        return "mean"

    async def work(self, worker: Worker) -> None:
        try:
            while True:
                worker.step(await worker.gradient())
                if worker.clock % self.period == 0:
                    await self.average(worker)
        except EndOfWork:
            if worker.clock % self.period != 0:
                await self.average(worker)

    async def average(self, worker: Worker) -> None:
        if worker.server is None:
            await worker.mean_params()
        else:
            await worker.push(worker.params)
            await worker.admission()
            worker.adopt(await worker.pull())
