"""GPipe: a mini-batch in micro-batches, all forwards before all backwards, one update.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019, section 2.

    for u = 1 .. U:  F(u)                at every stage, when the micro-batch has come from the stage before
    for u = U .. 1:  B(u)                when its gradient has come from the next stage
    W <- Opt(W, sum of |u| / T grad(u))

All forwards and backwards of a mini-batch read the same weights, so GPipe equals SGD on the whole mini-batch, up to
rounding. A share (K - 1) / (U + K - 1) of the time is idle. Each stage keeps the activations of U micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dure.partition.orders import Action, gpipe
from dure.partition.pipeline import MicroBatched


@dataclass(frozen=True)
class GPipe(MicroBatched):
    """Flush pipeline: all micro-batches forward, then all backward, then one update."""

    paper: ClassVar[str] = "Huang et al., GPipe, NeurIPS 2019, section 2"

    def order(self, rank: int, batches: range) -> Iterator[Action]:
        return gpipe(rank, self.stages, self.micro, batches)
