"""Momentum compensation: reduces the optimizer's momentum by the momentum that asynchrony adds.

Mitliagkas, Zhang, Hadjis and Re, "Asynchrony Begets Momentum, with an Application to Deep Learning", Allerton 2016.

With K workers whose steps take independent exponential times, staleness is geometric and, in expectation,

    w_{t+1} - w_t  =  mu_S (w_t - w_{t-1})  -  (1 - mu_S) lr grad f(w_t)          mu_S = 1 - 1/K

so the optimizer's own momentum becomes

    mu_L  =  mu_target - (1 - 1/K)                                                below zero for many workers

| in the paper             | here                                                                         |
|--------------------------|------------------------------------------------------------------------------|
| mu_target                | `target`; the job's own momentum unless given                                |
| mu_L                     | the momentum of the servers' SGD, one buffer for all workers                 |
| K, "compute groups"      | the run's workers; divided by k where k of them make one update              |
| then a grid over mu_L    | `target` is the knob                                                         |

One worker keeps its momentum. The formula assumes workers of equal speed: one that is slower for good contributes
fewer updates, so K counts it for too much and mu_L is a little low. K does not change when a worker fails.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from dure.core.parameter import parameter
from dure.errors import StrategyError
from dure.sync.corrected import STALE, with_remedy

if TYPE_CHECKING:
    from dure.job.optimizer import OptimizerSpec


@dataclass(frozen=True, slots=True)
class MomentumCompensation:
    """The momentum of the servers, reduced by the momentum that asynchrony adds."""

    paper: ClassVar[str] = "Mitliagkas, Zhang, Hadjis and Re, Asynchrony Begets Momentum, Allerton 2016"
    joins: ClassVar[tuple[str, ...]] = STALE

    target: float | None = parameter(
        None,
        "total momentum, of servers and asynchrony together; none: the momentum of the job",
        range=">= 0, < 1",
        symbol="μ_target",
    )

    def __post_init__(self) -> None:
        if self.target is not None and not 0 <= self.target < 1:
            raise ValueError(f"target is a momentum and must be at least 0 and below 1, got {self.target}. Try 0.9.")

    def __radd__(self, method: Any) -> Any:
        return with_remedy(method, self)

    def retuned(self, optimizer: OptimizerSpec, groups: float) -> OptimizerSpec:
        if optimizer.name not in ("sgd", "momentum"):
            raise StrategyError(
                f"momentum-compensation changes the momentum of SGD, and the servers run {optimizer.name}: give the "
                "job sgd or momentum, or leave the remedy out."
            )
        target = optimizer.momentum if self.target is None else self.target
        momentum = target - (1 - 1 / groups)
        return replace(optimizer, name="sgd", momentum=momentum, nesterov=optimizer.nesterov and momentum != 0)
