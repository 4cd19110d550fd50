"""Remedies for stale gradients. Each joins a method whose servers apply gradients of older versions (`corrected`).

| remedy                  | where it acts                                                      |
|-------------------------|--------------------------------------------------------------------|
| `dc-asgd`               | corrects a stale gradient for the change of the model since then   |
| `staleness-lr`          | divides the rate of a gradient by its staleness                    |
| `momentum-compensation` | takes the momentum that asynchrony adds from that of the servers   |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dure.core.catalogue import parameter
from dure.errors import StrategyError
from dure.sync.corrected import STALE, with_remedy

if TYPE_CHECKING:
    import torch

    from dure.job.optimizer import OptimizerSpec
    from dure.topology.correction import Update


@dataclass(frozen=True, slots=True)
class DCASGD:
    """Corrects each gradient, to first order, for the change of the model since the worker pulled it.

    Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML 2017.

        at a shard                                        (.) is element-wise
            worker m pulls:       w_bak(m) <- w
            worker m pushes g:    w <- w - lr ( g + lambda_t (.) g (.) g (.) (w - w_bak(m)) )

            DC-ASGD-c             lambda_t = lambda
            DC-ASGD-a             MS <- rho MS + (1 - rho) g (.) g;     lambda_t = lambda0 / sqrt(MS + eps)

    The gradient at w is g + H (w - w_bak) to first order; lambda g (.) g estimates the diagonal of H at no cost.

    | in the paper           | here                                                                         |
    |------------------------|------------------------------------------------------------------------------|
    | w_bak(m)               | the version that m computed g on, kept by the shard: a reference, not a copy |
    | DC-ASGD-c, DC-ASGD-a   | `mode="constant"`, `mode="adaptive"`                                         |
    | m, 0.95                | `rho`                                                                        |
    | MS                     | one per worker, as in the authors' code, or one (`squares="shared"`)         |
    |                        | `clip`: no element of the correction exceeds that of g (not in the paper)    |

    With one worker, or if no other update was applied meanwhile, w = w_bak and the method is SGD. For a worker that is
    five times slower, the model moves five times as far, and the first order may be far off: `clip` limits the
    correction.
    """

    paper: ClassVar[str] = "Zheng et al., Asynchronous Stochastic Gradient Descent with Delay Compensation, ICML 2017"
    joins: ClassVar[tuple[str, ...]] = STALE

    lambda_: float = parameter(
        0.04, "mode=constant: strength of the correction; 0: none", range=">= 0, < inf", symbol="λ"
    )
    mode: Literal["constant", "adaptive"] = parameter(
        "constant",
        "strength of the correction: constant, or adaptive: divided by the root of the mean squared gradient",
    )
    lambda0: float = parameter(
        2.0, "mode=adaptive: strength of the correction; 0: none", range=">= 0, < inf", symbol="λ_0"
    )
    rho: float = parameter(
        0.95, "mode=adaptive: weight of the past in the mean squared gradient", range=">= 0, < 1", symbol="m"
    )
    eps: float = parameter(
        1e-7,
        "mode=adaptive: added to the mean squared gradient, so that its root is above zero",
        range="> 0, < inf",
        symbol="ε",
    )
    squares: Literal["worker", "shared"] = parameter(
        "worker", "mode=adaptive: a mean squared gradient for each worker, or one shared by all"
    )
    clip: bool = parameter(False, "no element of the correction exceeds that of the gradient")

    compares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, value in (("lambda", self.lambda_), ("lambda0", self.lambda0)):
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be a number >= 0, got {value}. Use 0 for no compensation.")
        if not 0 < self.eps < float("inf"):
            raise ValueError(f"eps keeps a root away from zero and must be above 0, got {self.eps}. Try 1e-7.")
        if not 0 <= self.rho < 1:
            raise ValueError(f"rho weighs past squares and must be at least 0 and below 1, got {self.rho}. Try 0.95.")

    def __radd__(self, method: Any) -> Any:
        return with_remedy(method, self)

    def correct(self, update: Update) -> None:
        curvature = self.curvature(update)
        if update.read is None:
            return
        gradient = update.gradient
        correction = curvature.mul_(update.values - update.read)
        if self.clip:
            limit = gradient.abs()
            correction = correction.clamp_(-limit, limit)
        gradient.add_(correction)

    def keeps(self, workers: int) -> int:
        if self.mode == "constant":
            return 0
        return workers if self.squares == "worker" else 1

    def curvature(self, update: Update) -> torch.Tensor:
        """Return lambda_t (.) g (.) g, the guess at the diagonal of the Hessian; the caller may write to it."""
        square = update.gradient * update.gradient
        if self.mode == "constant":
            return square.mul_(self.lambda_)
        mean = update.keep("squares", update.worker if self.squares == "worker" else None)
        mean.mul_(self.rho).add_(square, alpha=1 - self.rho)
        return square.mul_(self.lambda0).div_((mean + self.eps).sqrt_())


@dataclass(frozen=True, slots=True)
class StalenessLR:
    """Divides the learning rate of each gradient by its staleness.

    Zhang, Gupta, Lian and Liu, "Staleness-Aware Async-SGD for Distributed Deep Learning", IJCAI 2016.

        at a shard, for the gradients g_1 .. g_c of a group, computed d_1 .. d_c versions ago:
            w <- w - (1/c) sum over l of  alpha(d_l) g_l            alpha(d) = lr / d  if d > 0,  else lr

    | in the paper           | here                                                                         |
    |------------------------|------------------------------------------------------------------------------|
    | alpha_0                | the job's rate                                                               |
    | n-softsync             | `k-batch-async:k=c+staleness-lr`, c = workers / n; c = 1 is `downpour`'s way |
    | time stamps            | versions, per shard                                                          |
    | which comes first      | the factor weighs the gradient, before the mean and before momentum or Adagrad |

    A gradient one version old counts in full, as one that is fresh. On a parabola of curvature a, lr a < 1 is then
    stable for every constant delay. A worker that is five times slower pushes gradients about five times as stale,
    which count a fifth: its data count less, which biases the model if workers hold different data.
    """

    paper: ClassVar[str] = (
        "Zhang, Gupta, Lian and Liu, Staleness-Aware Async-SGD for Distributed Deep Learning, IJCAI 2016"
    )
    joins: ClassVar[tuple[str, ...]] = STALE

    compares: ClassVar[bool] = False

    def __radd__(self, method: Any) -> Any:
        return with_remedy(method, self)

    def keeps(self, workers: int) -> int:
        return 0

    def correct(self, update: Update) -> None:
        if update.staleness > 1:
            update.gradient.div_(update.staleness)


@dataclass(frozen=True, slots=True)
class MomentumCompensation:
    """Reduces the momentum of the servers by the momentum that asynchrony adds.

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
