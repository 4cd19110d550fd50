"""The base of pipelines: a model split by layers into stages, one worker for each.

`MicroBatched` divides each mini-batch into micro-batches and makes one update of them. `Weights` are those of a stage,
as the rules of a pipeline see them.

A pipeline method is an order of actions and two rules: the weights that a forward reads, and the weights that its
backward reads. `order` gives the actions of one worker as data; a scheduler checks them before a run starts
(`schedule.py`), and each worker plays its own (`stage.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from dure.core.catalogue import parameter
from dure.partition.orders import Action, looped

if TYPE_CHECKING:
    from torch import Tensor

    from dure.job.gradient import Requester
    from dure.job.optimizer import OptimizerSpec


class StageWeights(Protocol):
    """The weights of one stage: the newest, and those that are kept for mini-batches in flight.

    `requester` is the worker of the stage, `rank` that of the stage in its pipeline. `version` counts updates.
    """

    requester: Requester
    rank: int
    version: int

    @property
    def newest(self) -> Tensor:
        """The newest weights. They change with each update, and a backward that reads them reads them as they are."""
        ...

    def fixed(self, batch: int) -> Tensor:
        """The newest weights at the first forward of a mini-batch, for all its actions."""
        ...

    def stash(self, batch: int) -> Tensor:
        """The newest weights at the first forward of a mini-batch, in memory that no update before its own changes."""
        ...

    def ahead(self, steps: Callable[[float], float]) -> Tensor:
        """The newest weights and the way that their velocity takes in `steps`, a function of the momentum.

        All calls use one memory, so a backward that reads it reads the last prediction.
        """
        ...

    def version_for(self, batch: int) -> Tensor:
        """The weights of the version that a mini-batch reads and updates."""
        ...

    def average(self) -> None:
        """Set all versions to their mean. No mini-batch may be in flight."""
        ...


@dataclass(frozen=True)
class Pipeline:
    """A model split into stages of consecutive blocks, at `cuts` (`cut.py`).

    `flushes`: all forwards and backwards of a mini-batch end before its update, so that the method is SGD.
    `reads_velocity`: its rules read the velocity of each worker's own optimizer.
    """

    stages: int = parameter(2, "workers that hold one copy of the model, each a part", range=">= 1", symbol="K")
    cuts: str = parameter(
        "parameters",
        "first block of each later stage, as in 4/8/12; or a rule: parameters or even (as few parameters or blocks as "
        "possible in the largest stage), profile (the slowest stage as fast as possible); or the file of a profile",
    )
    remat: bool = parameter(False, "keep the inputs of a stage only, and compute its forward again before its backward")

    flushes: ClassVar[bool] = True
    reads_velocity: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise ValueError(f"stages={self.stages} splits nothing: write a whole number from 1, such as stages=2")

    def check_optimizer(self, optimizer: OptimizerSpec) -> None:
        """Raise `StrategyError` if the method does not work with the `optimizer` of the workers."""

    def check_layout(self, layout: Any) -> None:
        """Raise `UsageError` if the method does not work with the borders, or the targets, of a `StageLayout`."""

    def batch_size(self, asked: int) -> int:
        """The samples of a mini-batch in a run that asks for mini-batches of so many."""
        return asked

    @property
    def micro_batches(self) -> int:
        """Micro-batches of each mini-batch."""
        return 1

    @property
    def chunks(self) -> int:
        """Chunks of the model at each worker."""
        return 1

    @property
    def versions(self) -> int:
        """Versions of the parameters of each worker; mini-batch t reads and updates version t mod `versions`."""
        return 1

    @property
    def overwrites(self) -> bool:
        """Whether a forward overwrites the activations of the mini-batches before it that have not gone backward."""
        return False

    def recomputes(self, micro: int) -> bool:
        """Whether the backward of a micro-batch computes its forward again."""
        return self.remat

    def stage_of(self, rank: int, chunk: int) -> int:
        """The stage of the model that is chunk number `chunk` of worker `rank` of the pipeline."""
        return looped(rank, chunk, self.stages)

    @property
    def lag(self) -> int:
        """For pipelines that stash: the updates by which the weights of each mini-batch are older than the newest."""
        return 0

    def order(self, rank: int, batches: range) -> Iterator[Action]:
        """The actions of worker `rank` of the pipeline for these mini-batches, to the last update."""
        raise NotImplementedError(f"{type(self).__name__} has no order: define order(self, rank, batches)")

    def staleness(self, rank: int) -> int:
        """Updates of worker `rank` between a forward and the update by its gradient, in the steady state."""
        return 0

    def forward_reads(self, stage: StageWeights, batch: int) -> Tensor:
        """The flat weights that the forward of mini-batch `batch` reads."""
        return stage.fixed(batch)

    def backward_reads(self, stage: StageWeights, batch: int) -> Tensor:
        """The flat weights that the backward of mini-batch `batch` reads."""
        return stage.fixed(batch)


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
