"""SpecTrain: stages read predictions of the weights that they will have, so that all of them read about one version.

Chen, Yang and Cheng, "Efficient and Robust Parallel DNN Training through Model Parallelism on Multi-GPU Platform",
2018, section 3.3. v is the smoothed gradient of momentum, v(t) = gamma v(t - 1) + (1 - gamma) g(t).

    F(t):  W^ <- W_k - s_F lr v;  h_k = F(h_{k-1}; W^)          at stage k = 1 .. K, in the order of PipeDream
    B(t):  W^ <- W_k - s_B lr v;  g <- backward through W^ with the activations of F(t)
           W_k <- Opt(W_k, g)                                   the weights, not their prediction

s counts the updates of stage k by other mini-batches until the mini-batch goes backward at the first stage, for a
forward as long as a backward: s_B = floor((k - 1) / 2), s_F = s_B + K - k. The two predictions differ, so the gradient
is exact for neither. With PyTorch's momentum (v = momentum v + g) the way is s lr v too, since its rate is
lr (1 - gamma). The rate is that of the present step. Before the first update v is zero, and nothing is predicted.

| `predicts` | W^                                   |                                                           |
|------------|--------------------------------------|-----------------------------------------------------------|
| `velocity` | W - s lr v                           | the paper: gradients go on as they were                   |
| `carry`    | W - (gamma + ... + gamma^s) lr v     | what v moves the weights by itself, without new gradients |

Stage k keeps one version of its weights and one prediction, and the activations of K - k + 1 mini-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from dure.core.catalogue import parameter
from dure.errors import StrategyError
from dure.job.optimizer import has_velocity
from dure.partition.orders import Action, pipedream
from dure.partition.pipeline import Pipeline

if TYPE_CHECKING:
    from torch import Tensor

    from dure.job.optimizer import OptimizerSpec
    from dure.partition.pipeline import StageWeights


@dataclass(frozen=True)
class SpecTrain(Pipeline):
    """Pipeline without a flush, in which forwards and backwards read predicted weights."""

    paper: ClassVar[str] = "Chen, Yang and Cheng, SpecTrain (arXiv 1809.02839), 2018, section 3.3"
    flushes: ClassVar[bool] = False
    reads_velocity: ClassVar[bool] = True

    predicts: Literal["velocity", "carry"] = parameter(
        "velocity", "way of the weights in s updates: s times the last one, or what its momentum alone does"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.remat:
            raise ValueError(
                "remat=true would compute the activations of a backward at its own prediction, and spectrain uses "
                "those of the forward: leave remat out"
            )

    def check_optimizer(self, optimizer: OptimizerSpec) -> None:
        if not has_velocity(optimizer):
            raise StrategyError(
                f"spectrain predicts weights by the velocity of momentum, and {optimizer} has none. Use momentum, as "
                f"in --optimizer momentum:lr={optimizer.lr:g}, or pipedream, which predicts nothing."
            )

    def order(self, rank: int, batches: range) -> Iterator[Action]:
        return pipedream(rank, self.stages, batches)

    def staleness(self, rank: int) -> int:
        return self.stages - 1 - rank

    def forward_reads(self, stage: StageWeights, batch: int) -> Tensor:
        return self._predicted(stage, self.ahead_of_forward(stage.rank))

    def backward_reads(self, stage: StageWeights, batch: int) -> Tensor:
        return self._predicted(stage, self.ahead_of_backward(stage.rank))

    def ahead_of_forward(self, rank: int) -> int:
        """The updates s_F that a forward at worker `rank` of the pipeline looks ahead."""
        return self.ahead_of_backward(rank) + self.stages - 1 - rank

    def ahead_of_backward(self, rank: int) -> int:
        """The updates s_B that a backward at worker `rank` of the pipeline looks ahead."""
        return rank // 2

    def _predicted(self, stage: StageWeights, updates: int) -> Tensor:
        if self.predicts == "velocity":
            return stage.ahead(lambda momentum: updates)
        return stage.ahead(lambda momentum: sum(momentum**j for j in range(1, updates + 1)))
