"""GPipe: a mini-batch in micro-batches, all forwards before all backwards, one update.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019, section 2.

    for u = 1 .. U:  F(u)                at every stage, when the micro-batch has come from the stage before
    for u = U .. 1:  B(u)                when its gradient has come from the next stage
    W <- Opt(W, sum of |u| / T grad(u))

All forwards and backwards of a mini-batch read the same weights, so GPipe equals SGD on the whole mini-batch, up to
rounding. A share (K - 1) / (U + K - 1) of the time is idle. Each stage keeps the activations of U micro-batches, or
with `remat` those of one, and the inputs of all.

A forward is computed again while its gradients travel. That of the last micro-batch need not be: its backward comes
next (`keep_last`; Kim et al., "torchgpipe", arXiv 2004.09910, has it as the default).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dure.core.catalogue import parameter
from dure.partition.orders import Action, gpipe
from dure.partition.pipeline import MicroBatched


@dataclass(frozen=True)
class GPipe(MicroBatched):
    """Flush pipeline: all micro-batches forward, then all backward, then one update."""

    paper: ClassVar[str] = "Huang et al., GPipe, NeurIPS 2019, section 2"

    keep_last: bool = parameter(False, "with remat, keep the activations of the last micro-batch, which are read next")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep_last and not self.remat:
            raise ValueError(
                "keep_last=true is for remat=true, without which all are kept: write both, or leave it out"
            )

    def recomputes(self, micro: int) -> bool:
        return self.remat and not (self.keep_last and micro == self.micro - 1)

    def order(self, rank: int, batches: range) -> Iterator[Action]:
        return gpipe(rank, self.stages, self.micro, batches)
