"""PipeDream: 1F1B without a flush; each mini-batch goes backward through the weights that it went forward through.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, section 3.3.

    F(t):  read the newest W_k; keep a copy under t           at stage k = 1 .. K, in the order F, B, F, B, ...
    B(t):  g <- gradient at the copy of t; drop the copy
           W_k <- Opt(W_k, g)                                 the newest weights, not the copy

K - k updates of stage k lie between F(t) and the update of t:
W_k(t + 1) = W_k(t) - lr grad_k f(W_1(t - K + 1), W_2(t - K + 2), ..., W_K(t)). Stage k keeps K - k + 1 versions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dure.partition.action import Action
from dure.partition.orders import pipedream
from dure.partition.pipeline import Pipeline

if TYPE_CHECKING:
    from torch import Tensor

    from dure.partition.weights import StageWeights


@dataclass(frozen=True)
class PipeDream(Pipeline):
    """Pipeline without a flush, which keeps the weights of each mini-batch in flight for its backward."""

    paper: ClassVar[str] = "Narayanan et al., PipeDream, SOSP 2019, section 3.3"
    flushes: ClassVar[bool] = False

    def order(self, rank: int, batches: range) -> Iterator[Action]:
        return pipedream(rank, self.stages, batches)

    def staleness(self, rank: int) -> int:
        return self.stages - 1 - rank

    def forward_reads(self, stage: StageWeights, batch: int) -> Tensor:
        return stage.keep(batch, stage.newest)

    def backward_reads(self, stage: StageWeights, batch: int) -> Tensor:
        return stage.kept(batch)
