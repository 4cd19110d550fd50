"""DC-ASGD: corrects a stale gradient for the change of the model since it was read.

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

With one worker, or if no other update was applied meanwhile, w = w_bak and the method is SGD. For a worker that is five
times slower, the model moves five times as far, and the first order may be far off: `clip` limits the correction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dure.core.parameter import parameter
from dure.sync.corrected import STALE, with_remedy

if TYPE_CHECKING:
    import torch

    from dure.topology.correction import Update


@dataclass(frozen=True, slots=True)
class DCASGD:
    """A correction of each gradient, to first order, for how far the model has moved since it was read."""

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
        for name, choices in (("mode", ("constant", "adaptive")), ("squares", ("worker", "shared"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be {' or '.join(choices)}, got {getattr(self, name)!r}.")

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

    def curvature(self, update: Update) -> torch.Tensor:
        """Return lambda_t (.) g (.) g, the guess at the diagonal of the Hessian; the caller may write to it."""
        square = update.gradient * update.gradient
        if self.mode == "constant":
            return square.mul_(self.lambda_)
        mean = update.keep("squares", update.worker if self.squares == "worker" else None)
        mean.mul_(self.rho).add_(square, alpha=1 - self.rho)
        return square.mul_(self.lambda0).div_((mean + self.eps).sqrt_())
