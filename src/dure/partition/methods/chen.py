"""Pipelined back-propagation with smaller mini-batches, so that gradients are late by fewer samples.

Chen, Eversole, Li, Yu and Seide, "Pipelined Back-Propagation for Context-Dependent Deep Neural Networks", Interspeech
2012: the order and the weights of `petrowski`, for mini-batches of T in place of T_0 samples.

    T = min(T_0, c T_0 / (2K - 1)), at least 1                  2 (K - k) updates late are 2 (K - k) T samples late

The first stage is then late by less than c T_0 samples: c = 1 makes that one mini-batch of the job, whatever K is. The
paper states no formula. T_0 is the batch size of the run, or each of its `batch_sizes`. A run that leaves its steps out
makes T_0 / T times the job's, so that it works through as many samples; `steps` that are given count mini-batches of T.
The rate of the optimizer stays. Smaller products of matrices are slower per sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dure.core.catalogue import parameter
from dure.partition.methods.petrowski import Petrowski


@dataclass(frozen=True)
class Chen(Petrowski):
    """Petrowski's pipeline, with mini-batches that are smaller the more stages there are."""

    paper: ClassVar[str] = "Chen et al., Pipelined Back-Propagation for Context-Dependent DNNs, Interspeech 2012"

    delay: float = parameter(1.0, "delay of the first stage, in mini-batches of the run", range="> 0", symbol="c")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.delay < float("inf"):
            raise ValueError(f"delay must be a number > 0, got {self.delay}: write delay=1")

    def batch_size(self, asked: int) -> int:
        return max(1, min(asked, int(self.delay * asked / (2 * self.stages - 1))))
