"""PipeDream: 1F1B without a flush; each mini-batch goes backward through the weights that it went forward through.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, section 3.3.

    F(t):  read the newest W_k; stash it under t              at stage k = 1 .. K, in the order F, B, F, B, ...
    B(t):  g <- gradient at the weights of t; drop them
           W_k <- Opt(W_k, g)                                 the newest weights, not those of t

K - k updates of stage k lie between F(t) and the update of t:
W_k(t + 1) = W_k(t) - lr grad_k f(W_1(t - K + 1), W_2(t - K + 2), ..., W_K(t)). Stage k keeps K - k + 1 versions.

| `sync`     | the forward and the backward of t read                       | staleness | versions at stage k |
|------------|--------------------------------------------------------------|-----------|---------------------|
| `none`     | the newest weights at the forward, older at earlier stages   | K - k     | K - k + 1           |
| `vertical` | the weights after max(0, t - K + 1) updates, at every stage  | K - 1     | K                   |

With `sync=vertical` the pipeline is SGD with delayed gradients, W(t + 1) = W(t) - lr grad f(W(t - K + 1)). Updates
count from the last drain.

| `ahead` | forwards of stage k before its first backward | staleness of stage k | in flight at stage k |
|---------|-----------------------------------------------|----------------------|----------------------|
| `few`   | K - k, so that the pipeline is just full      | K - k                | K - k + 1            |
| `many`  | 2 (K - k), the order of `petrowski`           | 2 (K - k)            | 2 (K - k) + 1        |

Both orders take the same time if times are constant. Where times vary, mini-batches in queues keep stages busy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from dure.core.catalogue import parameter
from dure.partition.orders import Action, pipedream, stale
from dure.partition.pipeline import Pipeline

if TYPE_CHECKING:
    from torch import Tensor

    from dure.partition.pipeline import StageWeights


@dataclass(frozen=True)
class PipeDream(Pipeline):
    """Pipeline without a flush, which keeps the weights of each mini-batch in flight for its backward."""

    paper: ClassVar[str] = "Narayanan et al., PipeDream, SOSP 2019, section 3.3"
    flushes: ClassVar[bool] = False

    sync: Literal["none", "vertical"] = parameter(
        "none", "weights that stages read: each its newest, or all the same version (vertical sync)"
    )
    ahead: Literal["few", "many"] = parameter("few", "forwards ahead at stage k: K - k, or 2 (K - k) as in petrowski")

    def order(self, rank: int, batches: range) -> Iterator[Action]:
        return (stale if self.ahead == "many" else pipedream)(rank, self.stages, batches)

    @property
    def lag(self) -> int:
        return self._in_flight(0) if self.sync == "vertical" else 0

    def staleness(self, rank: int) -> int:
        return self.lag or self._in_flight(rank)

    def _in_flight(self, rank: int) -> int:
        """Updates of a worker between a forward and the update by its gradient."""
        return (self.stages - 1 - rank) * (2 if self.ahead == "many" else 1)

    def forward_reads(self, stage: StageWeights, batch: int) -> Tensor:
        return stage.stash(batch)

    def backward_reads(self, stage: StageWeights, batch: int) -> Tensor:
        return stage.stash(batch)
