"""Interleaved 1F1B: each worker holds several parts of the model, so that the pipeline fills and drains faster.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021, section
2.2.2. Worker k = 1 .. K holds the stages k, K + k, 2K + k, ...: v chunks.

    (v - 1) R + 2 (K - k) forwards, then F and B in turn, then the backwards that are left
    R micro-batches go through one chunk, then through the next; backwards go from the last chunk to the first
    W <- Opt(W, sum of |u| / T grad(u))

A round has R = U / max(1, floor(U / K)) micro-batches. The bubble is that of 1F1B divided by v, a share
(K - 1) / (v U + K - 1) of the time. The first worker keeps the activations of (v - 1) R + 2 (K - 1) + 1 micro-batches,
each of one chunk. Messages are v times as many.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dure.core.catalogue import parameter
from dure.partition.orders import Action, interleaved, round_size
from dure.partition.pipeline import MicroBatched


@dataclass(frozen=True)
class Interleaved(MicroBatched):
    """Flush pipeline: 1F1B over several chunks at each worker, then one update."""

    paper: ClassVar[str] = "Narayanan et al., Efficient Training on GPU Clusters Using Megatron-LM, SC 2021"

    chunks: int = parameter(2, "stages at each worker", range=">= 1", symbol="v")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunks < 1:
            raise ValueError(f"chunks={self.chunks} leaves a worker no stage: write a whole number from 1, as chunks=2")
        round_size(self.stages, self.micro)

    def order(self, rank: int, batches: range) -> Iterator[Action]:
        return interleaved(rank, self.stages, self.chunks, self.micro, batches)
