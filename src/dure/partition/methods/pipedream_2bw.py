"""PipeDream-2BW: 1F1B over micro-batches without a flush, with two versions of the weights at every stage.

Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, section 3.1. U >= K micro-batches u of
each mini-batch t:

    F(t, u):  read W(max(0, t - 1)), the version of all micro-batches of t
    B(t, u):  sum gradients at the same version
    after B(t, U):  W(t + 1) <- W(t) - lr sum of |u| / T grad f_u(W(t - 1))             at every stage

The forwards of the next mini-batch begin before the update, so the pipeline never drains. It is SGD with gradients that
are one update late, whatever K is. Stage k keeps the activations of K - k + 1 micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dure.core.catalogue import parameter
from dure.partition.orders import Action, one_f_one_b_on
from dure.partition.pipeline import MicroBatched

if TYPE_CHECKING:
    from torch import Tensor

    from dure.partition.pipeline import StageWeights


@dataclass(frozen=True)
class PipeDream2BW(MicroBatched):
    """Pipeline without a flush that sums gradients of micro-batches, all of them one update late."""

    paper: ClassVar[str] = "Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021, section 3.1"
    flushes: ClassVar[bool] = False

    micro: int = parameter(8, "micro-batches of a mini-batch", range=">= stages", symbol="U")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.micro < self.stages:
            raise ValueError(
                f"micro={self.micro} for stages={self.stages} needs more than two versions of the weights: write "
                f"micro={self.stages} or more, or pipedream"
            )

    @property
    def lag(self) -> int:
        return 1

    def order(self, rank: int, batches: range) -> Iterator[Action]:
        return one_f_one_b_on(rank, self.stages, self.micro, batches)

    def staleness(self, rank: int) -> int:
        return 1

    def forward_reads(self, stage: StageWeights, batch: int) -> Tensor:
        return stage.stash(batch)

    def backward_reads(self, stage: StageWeights, batch: int) -> Tensor:
        return stage.stash(batch)
