"""Pipelined back-propagation: one forward and one backward in each cycle, both at the newest weights of their time.

Petrowski, Dreyfus and Girault, "Performance Analysis of a Pipelined Backpropagation Parallel Algorithm", IEEE
Transactions on Neural Networks 4(6), 1993. W_k(c) are the weights of stage k = 1 .. K at the start of cycle c.

    c = t + k - 1:       z = W_k(c) h_{k-1};  h_k = phi(z)              F(t): keep z and h_{k-1}
    c = t + 2K - 1 - k:  d = g_k phi'(z)                                B(t): z and h_{k-1} of t, weights of now
                         g_{k-1} = W_k(c)^T d
                         W_k(c + 1) = W_k(c) - lr d h_{k-1}^T

2 (K - k) updates of stage k lie between F(t) and the update of t. The backward multiplies by other weights than the
forward, so the update is the gradient of f at no weights. Stage k keeps one version of its weights. A mini-batch takes
f + b in the steady state, f and b at the slowest stage.

| `acts`        | z and h_{k-1} in B(t)                     | activations at stage k      |
|---------------|-------------------------------------------|-----------------------------|
| `fifo`        | those of t                                | 2 (K - k) + 1 mini-batches  |
| `overwritten` | those of the newest forward of the stage  | 1 mini-batch                |

`overwritten` pairs the errors of a mini-batch with the activations of another: it shows the damage, and trains badly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from dure.core.catalogue import parameter
from dure.partition.orders import Action, stale
from dure.partition.pipeline import Pipeline

if TYPE_CHECKING:
    from torch import Tensor

    from dure.partition.pipeline import StageWeights


@dataclass(frozen=True)
class Petrowski(Pipeline):
    """Pipeline without a flush and without copies of weights: a backward reads the newest."""

    paper: ClassVar[str] = "Petrowski et al., A Pipelined Backpropagation Parallel Algorithm, IEEE TNN 4(6), 1993"
    flushes: ClassVar[bool] = False

    acts: Literal["fifo", "overwritten"] = parameter(
        "fifo", "activations that a backward reads: those of its mini-batch, or of the newest forward"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.remat:
            raise ValueError(
                "remat=true would compute the activations of a backward at the newest weights, and this method uses "
                "those of the forward: leave remat out, or write features-replay, which computes them again"
            )

    @property
    def overwrites(self) -> bool:
        return self.acts == "overwritten"

    def order(self, rank: int, batches: range) -> Iterator[Action]:
        return stale(rank, self.stages, batches)

    def staleness(self, rank: int) -> int:
        return 2 * (self.stages - 1 - rank)

    def forward_reads(self, stage: StageWeights, batch: int) -> Tensor:
        return stage.newest

    def backward_reads(self, stage: StageWeights, batch: int) -> Tensor:
        return stage.newest
