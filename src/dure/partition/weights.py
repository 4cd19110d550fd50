"""The weights of a stage, as the rules of a pipeline see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from dure.job.gradient_source import Requester


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
