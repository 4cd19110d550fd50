"""Multi-version: 2K - 1 versions of the model, one for each mini-batch in flight, which are averaged from time to time.

Lee, Lee, Yoo and Yook, "Analysis of Parallel Training Algorithms for Deep Neural Networks", CSCI 2018; in the order of
`petrowski`. R = 2K - 1 versions, each with its own weights and its own state of the optimizer, at every stage.

    F(t):  read version t mod R of W_k
    B(t):  g <- gradient at version t mod R                     nothing has changed it since F(t)
           W_k[t mod R] <- Opt(W_k[t mod R], g)
    after `average` rounds of R mini-batches: all versions <- their mean, at each stage

A version sees each R-th mini-batch, without delay: after any number of mini-batches it is what SGD makes of them. So
the pipeline is data parallelism of R workers inside of one, and a mean costs no message. With `average=1` it is SGD on
R mini-batches at once; the versions are needed at the same time then, so the pipeline is drained before each mean:
a share (K - 1) / (3K - 2) of the time is idle. With more rounds it is local SGD with that period, and less is idle.
With `average=0` the run makes no mean. The model of a run is the mean of the versions. The state of the optimizers is
averaged with the weights. Each stage keeps the weights and this state of all versions, and the activations of
2 (K - k) + 1 mini-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dure.core.catalogue import parameter
from dure.partition.orders import Action, stale
from dure.partition.pipeline import Pipeline

if TYPE_CHECKING:
    from torch import Tensor

    from dure.partition.pipeline import StageWeights


@dataclass(frozen=True)
class MultiVersion(Pipeline):
    """Pipeline with one version of the model for each mini-batch in flight; the versions are averaged."""

    paper: ClassVar[str] = "Lee et al., Analysis of Parallel Training Algorithms for Deep Neural Networks, CSCI 2018"
    flushes: ClassVar[bool] = False

    average: int = parameter(
        1, "rounds between two means of the versions; 0: no mean but the delivered one", range=">= 0"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.average < 0:
            raise ValueError(f"average={self.average} is no number of rounds: write a whole number from 0")

    @property
    def versions(self) -> int:
        return 2 * self.stages - 1

    def order(self, rank: int, batches: range) -> Iterator[Action]:
        period = self.average * self.versions or batches.stop
        start = batches.start
        while start < batches.stop:
            stop = min((start // period + 1) * period, batches.stop)
            yield from stale(rank, self.stages, range(start, stop))
            start = stop

    def forward_reads(self, stage: StageWeights, batch: int) -> Tensor:
        if self.stages > 1 and self.average and batch and batch % (self.average * self.versions) == 0:
            stage.average()
        return stage.version_for(batch)

    def backward_reads(self, stage: StageWeights, batch: int) -> Tensor:
        return stage.version_for(batch)
