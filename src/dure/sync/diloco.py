"""DiLoCo: BMUF with AdamW at the workers, and Nesterov momentum in the step of the mean model.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023, and "Streaming DiLoCo",
2025 (overlap, fragments).

    for round t = 1, 2, 3, ...                        at every worker k
        w_k    <- w
        period times:  w_k  <- AdamW(w_k, gradient of f at w_k)        the inner steps
        Delta  <- mean of w - w_k                     over all workers
        w      <- SGD(w, Delta, lr, momentum, Nesterov)                the outer step

| in the paper      | here                                                                             |
|-------------------|----------------------------------------------------------------------------------|
| H                 | `period`                                                                         |
| outer optimizer   | BMUF with zeta = `lr`: Wg is where `torch.optim.SGD(lr, momentum, nesterov=True)` is |
| inner optimizer   | the optimizer of the run if it names one, else AdamW; its state stays at the worker |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from dure.core.parameter import parameter
from dure.job.optimizer import OptimizerSpec
from dure.sync.base import ServerRule, Traits
from dure.sync.bmuf import BMUF

if TYPE_CHECKING:
    from dure.sync.worker import Worker


@dataclass(frozen=True, slots=True)
class DiLoCo:
    """BMUF with AdamW at the workers and Nesterov momentum of the mean model."""

    paper: ClassVar[str] = "Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023"

    period: int = parameter(30, "steps of each worker between two averages", range=">= 1", unit="steps", symbol="H")
    lr: float = parameter(0.7, "learning rate of the outer step, from mean model to mean model", range=">= 0")
    momentum: float = parameter(0.9, "Nesterov momentum of the outer step", range=">= 0, < 1")
    overlap: int = parameter(
        0,
        "steps that workers make while an average is under way; 0: they wait",
        range=">= 0, <= period",
        unit="steps",
    )
    fragments: int = parameter(
        1, "parts of the model, each averaged at a time of its own in the block", range=">= 1, <= period", unit="parts"
    )

    traits: ClassVar[Traits] = BMUF.traits

    def __post_init__(self) -> None:
        if not self.lr >= 0:
            raise ValueError(f"lr is the outer learning rate and must be >= 0, got {self.lr}. The paper's is 0.7.")
        _ = self.outer

    def adapted(self) -> Traits:
        """The traits under these parameters."""
        return replace(self.outer.adapted(), local_optimizer=OptimizerSpec("adamw", lr=0.001, weight_decay=0.1))

    @property
    def outer(self) -> BMUF:
        """BMUF with these parameters."""
        return BMUF(self.period, self.momentum, self.lr, True, self.overlap, self.fragments)

    def server_rule(self, optimizer: OptimizerSpec) -> ServerRule:
        return self.outer.server_rule(optimizer)

    async def work(self, worker: Worker) -> None:
        await self.outer.work(worker)
