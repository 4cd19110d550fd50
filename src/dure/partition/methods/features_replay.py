"""Features Replay: a module keeps old inputs in place of old graphs, and replays them through its newest weights.

Huo, Gu and Huang, "Training Neural Networks Using Features Replay", NeurIPS 2018, algorithm 1.

    for t = 1, 2, ...:                                    at every module k = 1 .. K
        receive h_{k-1}(t);  send F(h_{k-1}(t); W_k), without a graph;  keep h_{k-1}(t)
        s = t - K + k;  if s >= 1:
            h <- F(h_{k-1}(s); W_k)                       the replay: the old input, the newest weights
            d <- delta_k(s), which module k + 1 sent in iteration t - 1; at the last module the gradient of f at h
            W_k <- W_k - lr (dh / dW_k)^T d
            send delta_{k-1}(s) = (dh / dh_{k-1})^T d     at the weights before the update

So Features Replay is the order of DDG with re-materialisation, and both of its passes read the newest weights. Update s
of module k is by mini-batch s, at the rate of step s; at a drain the samples that are left are replayed.

The inputs of module k are K - k updates old. It keeps K - k + 1 inputs, one graph and one version of its weights. The
replay costs one more forward: a mini-batch takes 2 f + b in the steady state. Random layers draw in the replay as in
the forward; the code that the authors released draws anew. Batch-norm statistics move in the first forward alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dure.core.catalogue import parameter
from dure.partition.orders import Action, pipedream
from dure.partition.pipeline import Pipeline

if TYPE_CHECKING:
    from torch import Tensor

    from dure.partition.pipeline import StageWeights


@dataclass(frozen=True)
class FeaturesReplay(Pipeline):
    """Pipeline without a flush, in which a module replays old inputs through its newest weights."""

    paper: ClassVar[str] = "Huo et al., Training Neural Networks Using Features Replay, NeurIPS 2018"
    flushes: ClassVar[bool] = False

    remat: bool = parameter(True, "always true: the replay is the re-materialisation")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.remat:
            raise ValueError(
                "remat=false keeps the activations, and features-replay computes them again: "
                "leave remat out, or write ddg:weights=current, which keeps them"
            )

    def order(self, rank: int, batches: range) -> Iterator[Action]:
        return pipedream(rank, self.stages, batches)

    def staleness(self, rank: int) -> int:
        return self.stages - 1 - rank

    def forward_reads(self, stage: StageWeights, batch: int) -> Tensor:
        return stage.newest

    def backward_reads(self, stage: StageWeights, batch: int) -> Tensor:
        return stage.newest
