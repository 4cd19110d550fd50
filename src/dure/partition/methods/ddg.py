"""DDG: each module goes backward at once, with the error gradient that it received last; there is no backward lock.

Huo et al., "Decoupled Parallel Backpropagation with Convergence Guarantee", ICML 2018, algorithm 1.

    for t = 1, 2, ...:                                    at every module k = 1 .. K
        receive h_{k-1}(t);  h_k(t) <- F(h_{k-1}(t); W_k);  send h_k(t);  keep its graph
        s = t - K + k;  if s >= 1:
            g <- gradient of F at sample s, from g_k(s), which module k + 1 sent in iteration t - 1;
                 at the last module from its own loss
            W_k(t + 1) <- W_k(t) - lr g;  send g_{k-1}(s)
            W_k(t + 1) = W_k(t) - lr grad_k f(x_s; w(s)),  w(s): the weights of all modules in iteration s

| `weights`  | the backward of sample s multiplies by                                                           |
|------------|--------------------------------------------------------------------------------------------------|
| `snapshot` | the weights that its forward read, as in the paper: an exact gradient of older weights           |
| `current`  | the newest weights, with the activations of its forward, as in the code that the authors released |

Update s of module k is by mini-batch s, at the rate of step s; iteration t has the update t - K + k of module k. At a
drain the samples that are left go backward, so each module makes one update for each mini-batch. Iteration t is F(t),
B(t - K + k): the order of PipeDream. So DDG with snapshots equals PipeDream, and differs from it in `current` alone.

K - k updates lie between F(s) and the update of s. Module k keeps K - k + 1 graphs, and as many versions of its weights
in `snapshot`. Messages are queued, so a mini-batch takes f + b in the steady state, f and b at the slowest module. A
barrier after each iteration would make it K f + b. Batch-norm statistics move in the first forward alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from dure.core.catalogue import parameter
from dure.partition.orders import Action, pipedream
from dure.partition.pipeline import Pipeline

if TYPE_CHECKING:
    from torch import Tensor

    from dure.partition.pipeline import StageWeights


@dataclass(frozen=True)
class DDG(Pipeline):
    """Pipeline without a flush, in which a module goes backward with the error gradient of the last iteration."""

    paper: ClassVar[str] = "Huo et al., Decoupled Parallel Backpropagation with Convergence Guarantee, ICML 2018"
    flushes: ClassVar[bool] = False

    weights: Literal["snapshot", "current"] = parameter(
        "snapshot", "weights that a backward reads: those of its forward, or the newest with the forward's activations"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.remat and self.weights == "current":
            raise ValueError(
                "remat=true computes the activations again, and weights=current needs those of the forward: write "
                "weights=snapshot,remat=true, or features-replay, which computes them again through the newest weights"
            )

    def order(self, rank: int, batches: range) -> Iterator[Action]:
        return pipedream(rank, self.stages, batches)

    def staleness(self, rank: int) -> int:
        return self.stages - 1 - rank

    def forward_reads(self, stage: StageWeights, batch: int) -> Tensor:
        return stage.stash(batch) if self.weights == "snapshot" else stage.newest

    def backward_reads(self, stage: StageWeights, batch: int) -> Tensor:
        return stage.stash(batch) if self.weights == "snapshot" else stage.newest
