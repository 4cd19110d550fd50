"""Downpour SGD: each worker pushes and pulls on its own schedule, and waits for no other.

Dean et al., "Large Scale Distributed Deep Networks", NeurIPS 2012, algorithm 7.1.

    one worker alone, until warm_start of the work is done;  then all of them
    for step = 0, 1, 2, ...                           at every worker
        if step mod n_fetch = 0      w       <- pull
        g        <- gradient of f at w
        accrued  <- accrued + g
        w        <- w - local_lr g
        if step mod n_push = 0
            push accrued;            accrued <- 0
    at the end                       push what has accrued since the last push

| in the paper                | here                                                              |
|-----------------------------|-------------------------------------------------------------------|
| Adagrad on the shards       | the job's optimizer, or `server` ("adagrad")                      |
| step mod n_push = 0         | the first push has one gradient, each later one `n_push`          |
| accrued gradient            | the sum, not the mean: the rate per push grows with `n_push`      |
| push, fetch in own threads  | `overlap`: beside the next gradient, one of each at a time        |
| warm start with one replica | `warm_start`, a share of the steps; about 0.05 in the paper       |
| push, then fetch            | `at_once`: in one call, a round trip less in every step           |
| gradients too old count     | `max_delay`: refused, as in Nair et al. (2015), section 5         |
| shards apart                | each applies on arrival; shards may differ in order               |

The staleness of a push is counted from the last fetch before its last gradient. The end of the work is checked before
a fetch, so that each fetch has a gradient that uses it. With `max_delay` each shard refuses a push that is staler than
that, by its own versions; the push is counted as refused, and its worker goes on.

One worker with ``n_push = n_fetch = 1`` is serial SGD. A slow worker delays no other; its gradients are stale. If a
worker fails, the others go on; another worker continues its warm start. A newcomer makes all its steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from dure.core.catalogue import parameter
from dure.core.node import EndOfWork
from dure.sync.base import Messages, Reasons, ServerRule, Traits
from dure.topology.parameter_server.policies import OneFirst

if TYPE_CHECKING:
    from torch import Tensor

    from dure.job.optimizer import OptimizerSpec
    from dure.sync.worker import Worker

RELEASED = 1
"""The version of `OneFirst` from which all workers are admitted."""


@dataclass(frozen=True, slots=True)
class Downpour:
    """Asynchronous SGD: each worker pushes gradients to servers and pulls the model on a schedule of its own."""

    paper: ClassVar[str] = "Dean et al., Large Scale Distributed Deep Networks, NeurIPS 2012"

    n_push: int = parameter(
        1, "steps between two pushes; a push is the sum of their gradients", range=">= 1", unit="steps", symbol="n_push"
    )
    n_fetch: int = parameter(1, "steps between two pulls of the model", range=">= 1", unit="steps", symbol="n_fetch")
    local_lr: float = parameter(0.0, "learning rate of a worker's own steps between two pulls; 0: none", range=">= 0")
    server: Literal["job", "sgd", "adagrad", "adam"] = parameter(
        "job", "optimizer on the servers; job: that of the job"
    )
    warm_start: float = parameter(
        0.0,
        "share of the steps that one worker makes alone before the others start",
        range=">= 0, < 1",
        unit="fraction",
    )
    overlap: bool = parameter(False, "pushes and pulls travel during the next gradient")
    at_once: bool = parameter(False, "one call in every step pushes the gradient and brings back the model")
    max_delay: int | None = parameter(
        None, "largest staleness of a push that a shard applies; it refuses others; none: any", range=">= 0"
    )

    traits: ClassVar[Traits] = Traits(
        needs=("servers",),
        reasons=Reasons(
            topology="its workers push and pull at different times",
            collective="a collective needs all of them at once",
        ),
        messages=Messages(over=("servers",)),
        stale_gradients=True,
        keeps={},
        staged=True,
    )

    def __post_init__(self) -> None:
        for name in ("n_push", "n_fetch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} counts mini-batches and must be >= 1, got {getattr(self, name)}.")
        if not self.local_lr >= 0:
            raise ValueError(f"local_lr is a learning rate and must be >= 0, got {self.local_lr}. Use 0 for none.")
        if self.at_once and (self.n_push, self.n_fetch, self.local_lr, self.overlap) != (1, 1, 0, False):
            raise ValueError(
                "at_once pushes and fetches after every step: leave out n_push, n_fetch, local_lr, overlap."
            )
        if self.max_delay is not None and self.max_delay < 0:
            raise ValueError(f"max_delay counts versions and must be >= 0, got {self.max_delay}. Leave it out for any.")
        if not 0 <= self.warm_start < 1:
            raise ValueError(f"warm_start is a share of the steps, from 0 to below 1, got {self.warm_start}. Use 0.05.")

    def adapted(self) -> Traits:
        """The traits under these parameters."""
        alone = "warm_start begins with one worker, and each stage would choose its own" if self.warm_start else ""
        rates = "a rate of its own at the workers, local_lr" if self.local_lr else ""
        keeps = {"servers": ("accrued",)} if self.n_push > 1 else {}
        return replace(self.traits, reasons=replace(self.traits.reasons, stages=alone, rates=rates), keeps=keeps)

    def server_rule(self, optimizer: OptimizerSpec) -> ServerRule:
        if self.server == "sgd":
            optimizer = replace(optimizer, name="sgd", momentum=0.0, nesterov=False)
        elif self.server != "job":
            optimizer = replace(optimizer, name=self.server)
        first = OneFirst() if self.warm_start else None
        return ServerRule(optimizer, first, reduce="sum", max_delay=self.max_delay)

    async def work(self, worker: Worker) -> None:
        try:
            if self.warm_start:
                await self.warm_up(worker)
            if self.at_once:
                await self.exchange(worker)
            while True:
                await self.step(worker, overlap=self.overlap)
        except EndOfWork:
            await worker.server.pushed()
            # In a user's loop a fetch may have followed the last gradient: the update names the versions before it.
            if worker.clock > 0 and not self.due(worker):
                await worker.server.push(worker.keep("accrued"), base=worker.kept_plain.get("base"))

    async def warm_up(self, worker: Worker) -> None:
        """Make the steps of the warm start while this worker is admitted alone; otherwise wait until they are done."""
        while worker.progress < self.warm_start:
            if await worker.server.admission() == RELEASED:
                return
            await self.step(worker, overlap=False)
        await worker.server.announce()

    async def exchange(self, worker: Worker) -> None:
        """Push each gradient, computed at the parameters that the last push returned."""
        if not worker.kept_plain.get("fetched"):
            await worker.server.pull(lend=True)
            worker.kept_plain["fetched"] = True
        while True:
            gradient = await worker.gradient()
            if worker.state.steps_left:
                await worker.server.push_pull(gradient)
            else:  # no gradient would use what a pull brings
                await self.push(worker, gradient, overlap=False)

    def due(self, worker: Worker) -> bool:
        """Whether a push follows the gradient of the last step, number `worker.clock - 1`."""
        return (worker.clock - 1) % self.n_push == 0

    async def step(self, worker: Worker, *, overlap: bool) -> None:
        if worker.clock % self.n_fetch == 0:
            await worker.begin_step()
            await self.fetch(worker, overlap=overlap)
        gradient = await worker.gradient()
        if self.local_lr:
            worker.params.add_(gradient, alpha=-self.local_lr)
        if self.n_push == 1:
            await self.push(worker, gradient, overlap=overlap)
            return
        accrued = worker.keep("accrued")
        accrued += gradient
        worker.kept_plain["base"] = (
            worker.state.versions
        )  # of the last gradient in the sum, from which staleness counts
        if self.due(worker):
            await self.push(worker, accrued, overlap=overlap)
            accrued.zero_()

    async def fetch(self, worker: Worker, *, overlap: bool) -> None:
        if overlap:
            worker.state.adopt(await worker.server.fetched())
            if worker.state.steps_left > self.n_fetch:  # a later step uses it
                await worker.server.pull_async()
        elif self.local_lr:  # own steps write to the parameters, so these cannot be the server's memory
            await worker.server.pull()
        else:
            await worker.server.pull(lend=True)

    async def push(self, worker: Worker, update: Tensor, *, overlap: bool) -> None:
        if overlap:  # the transfer reads the update while the method goes on to change it
            await worker.server.push_async(update.clone())
        else:
            await worker.server.push(update)
