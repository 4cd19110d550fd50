"""Elastic averaging SGD: each worker trains its own model; a spring pulls the model and a center together.

Zhang, Choromanska, LeCun, "Deep Learning with Elastic Averaging SGD", NeurIPS 2015, algorithms 1 and 2.

    for t = 0, 1, 2, ...                              at every worker, each at its own pace
        if t mod period = 0
            d  <- elasticity (x - z)                  x as it is before this step's gradient
            z  <- z + d
        (v  <- momentum v;   x <- x + v               EAMSGD)
        g  <- gradient of f at x
        x  <- x - lr g                                (v <- v - lr g)
        if t mod period = 0      x <- x - d           the same d on both sides

| in the paper                 | here                                                                    |
|------------------------------|-------------------------------------------------------------------------|
| tau, p                       | `period`, the number of workers                                         |
| alpha = eta rho              | `elasticity`; beta / p if left out, with the paper's beta = 0.9          |
| delta                        | `momentum` of EAMSGD, in Nesterov's form                                |
| center, asynchronous         | over servers: the shards add up the forces that workers push            |
| center, synchronous          | over collectives: kept at every worker, all at time t on the right side |
| x - eta g                    | a step of the job's optimizer; give it no momentum of its own            |

The result is the center. Without gradients z plus the sum of all x never changes.

A slow worker exchanges less often with the center; over servers no other worker waits for it. If a worker fails, the
center stays as it is. After a pause the spring pulls the worker back; a newcomer starts at the center, at rest. An
update that is sent twice counts once. Over collectives all workers wait, and a failure ends the run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from dure.core.catalogue import parameter
from dure.job.optimizer import OptimizerSpec
from dure.sync.base import ServerRule, Traits

if TYPE_CHECKING:
    import torch

    from dure.sync.worker import Worker

BETA = 0.9
"""The default of elasticity times workers: the share of its distance to their mean that the center moves."""

CENTER = "center"
"""The name under which a worker keeps the center, over collectives."""


@dataclass(frozen=True, slots=True)
class _Elastic:
    """The part that both methods share: parameters, servers that add up forces, and the exchange with the center."""

    paper: ClassVar[str] = "Zhang, Choromanska and LeCun, Deep Learning with Elastic Averaging SGD, NeurIPS 2015"

    period: int = parameter(4, "steps between two exchanges with the center", range=">= 1", unit="steps", symbol="τ")
    elasticity: float | None = parameter(
        None,
        "share of its distance to the center that a worker gives up in an exchange; none: 0.9 / workers",
        range=">= 0, <= 1",
        unit="fraction",
        symbol="α",
    )

    traits: ClassVar[Traits] = Traits(
        needs=("servers", "group"), delivers=CENTER, staged=True, keeps={"group": (CENTER,)}
    )

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ValueError(
                f"period counts mini-batches and must be >= 1, got {self.period}. Use 1 to meet at every step."
            )
        if self.elasticity is not None and not 0 <= self.elasticity <= 1:
            raise ValueError(
                f"elasticity must be from 0 to 1, got {self.elasticity}. "
                "Leave it out for 0.9 divided by the number of workers."
            )

    def server_rule(self, optimizer: OptimizerSpec) -> ServerRule:
        return ServerRule(OptimizerSpec("add"), reduce="sum")

    async def exchange(self, worker: Worker) -> torch.Tensor | None:
        """Move the center by the force `elasticity` (x - z), and return the force; None between two exchanges."""
        state = worker.state
        if not worker.over_servers and CENTER not in state.kept:
            worker.keep(CENTER).copy_(worker.params)
        if worker.clock % self.period:
            return None
        alpha = BETA / worker.world_size if self.elasticity is None else self.elasticity
        if worker.over_servers:
            center = state.storage.look_at(await worker.server.fetch())
            force = (worker.params - center) * alpha
            await worker.server.push(force)
            return force
        center = worker.keep(CENTER)
        force = (worker.params - center) * alpha
        started = state.node.now()
        center += await worker.group.mean(force, share=1.0)  # the sum, equal at every worker
        state.give()
        state.meter.add("communicate", started, state.node.now(), "all_reduce")
        return force


@dataclass(frozen=True, slots=True)
class EASGD(_Elastic):
    """Elastic averaging: every `period` steps, the model of a worker and a center pull each other closer."""

    async def work(self, worker: Worker) -> None:
        while True:
            await worker.begin_step()
            force = await self.exchange(worker)
            try:
                worker.step(await worker.gradient())
            finally:
                _give_way(worker, force)


@dataclass(frozen=True, slots=True)
class EAMSGD(_Elastic):
    """Elastic averaging in which workers, but not the center, move with Nesterov momentum."""

    momentum: float = parameter(0.9, "Nesterov momentum of the workers' own steps", range=">= 0, < 1", symbol="δ")

    traits: ClassVar[Traits] = replace(_Elastic.traits, keeps={"group": (CENTER, "velocity"), "servers": ("velocity",)})

    def __post_init__(self) -> None:
        _Elastic.__post_init__(self)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, got {self.momentum}. Use 0 for EASGD.")

    async def work(self, worker: Worker) -> None:
        while True:
            await worker.begin_step()
            force = await self.exchange(worker)
            velocity = worker.keep("velocity")
            velocity *= self.momentum
            worker.params += velocity
            before = worker.params.clone()
            try:
                worker.step(await worker.gradient())
            finally:
                velocity += worker.params - before
                _give_way(worker, force)


def _give_way(worker: Worker, force: torch.Tensor | None) -> None:
    """Move the model toward the center by the force that moved the center.

    The center has moved before the gradient, so the model moves also where the work ends or is suspended at it.
    """
    if force is not None:
        worker.params -= force
