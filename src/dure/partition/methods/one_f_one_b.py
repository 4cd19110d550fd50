"""1F1B with a flush: forwards and backwards alternate, so that few activations are kept.

Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021 (PipeDream-Flush); Fan et al., "DAPPLE",
PPoPP 2021.

    min(U, K - k) forwards, then F and B in turn, then the backwards that are left      at stage k = 1 .. K
    W <- Opt(W, sum of |u| / T grad(u))

The bubble is that of GPipe. Stage k keeps the activations of min(U, K - k + 1) micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dure.partition.orders import Action, one_f_one_b
from dure.partition.pipeline import MicroBatched


@dataclass(frozen=True)
class OneFOneB(MicroBatched):
    """Flush pipeline: one forward and one backward in turn, then one update."""

    paper: ClassVar[str] = "Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021"

    def order(self, rank: int, batches: range) -> Iterator[Action]:
        return one_f_one_b(rank, self.stages, self.micro, batches)
