"""Downpour SGD: push and pull on one's own schedule, wait for nobody.

Dean et al., "Large Scale Distributed Deep Networks", NeurIPS 2012, algorithm 7.1.

    for step = 0, 1, 2, ...                           at every worker
        if step mod n_fetch = 0      w       <- pull
        g        <- gradient of f at w
        accrued  <- accrued + g
        w        <- w - local_lr g
        if step mod n_push = n_push - 1
            push accrued;            accrued <- 0

| in the paper                | here                                                              |
|-----------------------------|-------------------------------------------------------------------|
| Adagrad on the shards       | the job's optimizer, or `server` ("adagrad")                      |
| accrued gradient            | the sum, not the mean: the rate per push grows with `n_push`      |
| push, fetch in own threads  | each shard applies on arrival; shards may differ in order         |

One worker with ``n_push = n_fetch = 1`` is serial SGD. A slow worker delays nobody; its gradients are stale.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from dure.runtime.base import EndOfWork

if TYPE_CHECKING:
    from dure.optim import OptimizerSpec
    from dure.sync.clock import Policy
    from dure.worker import Worker


@dataclass(frozen=True, slots=True)
class Downpour:
    """Asynchronous SGD over parameter servers."""

    n_push: int = 1
    n_fetch: int = 1
    local_lr: float = 0.0
    server: Literal["job", "sgd", "adagrad", "adam"] = "job"

    topologies: ClassVar[tuple[str, ...]] = ("ps",)
    lockstep: ClassVar[bool] = False
    delivers: ClassVar[str] = "server"
    stale_gradients: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("n_push", "n_fetch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} counts mini-batches and must be >= 1, got {getattr(self, name)}.")
        if not self.local_lr >= 0:
            raise ValueError(f"local_lr is a learning rate and must be >= 0, got {self.local_lr}. Use 0 for none.")

    def policy(self) -> Policy | None:
        return None

    def server_optimizer(self, optimizer: OptimizerSpec) -> OptimizerSpec:
        return optimizer if self.server == "job" else replace(optimizer, name=self.server)

    @property
    def reduce(self) -> str:
        return "sum"

    async def work(self, worker: Worker) -> None:
        try:
            while True:
                if worker.clock % self.n_fetch == 0:
                    await self.fetch(worker)
                gradient = await worker.gradient()
                if self.local_lr:
                    worker.params.add_(gradient, alpha=-self.local_lr)
                if self.n_push == 1:
                    await worker.push(gradient)
                    continue
                accrued = worker.keep("accrued")
                accrued += gradient
                if worker.clock % self.n_push == 0:
                    await self.push(worker)
        except EndOfWork:
            if worker.clock % self.n_push != 0:
                await self.push(worker)

    async def fetch(self, worker: Worker) -> None:
        if self.local_lr:
            worker.adopt(await worker.pull())
        else:
            await worker.refresh()

    async def push(self, worker: Worker) -> None:
        accrued = worker.keep("accrued")
        await worker.push(accrued)
        accrued.zero_()
