"""Pipelines that divide each mini-batch into micro-batches and make one update of them."""

from __future__ import annotations

from dataclasses import dataclass

from dure.core.parameter import parameter
from dure.partition.pipeline import Pipeline


@dataclass(frozen=True)
class MicroBatched(Pipeline):
    """A pipeline with several micro-batches in each mini-batch, whose sizes differ by at most one sample."""

    micro: int = parameter(4, "micro-batches of a mini-batch", range=">= 1", symbol="U")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.micro < 1:
            raise ValueError(f"micro={self.micro} makes no micro-batch: write a whole number from 1, such as micro=4")

    @property
    def micro_batches(self) -> int:
        return self.micro
