"""Pipeline methods that are programs on the primitives of a stage, not orders of forwards and backwards."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from dure.job.gradient import Gradient
    from dure.partition.stage import Stage


@runtime_checkable
class Programmed(Protocol):
    """A pipeline method that is no order of forwards and backwards: a program on the primitives of a stage."""

    def run(self, stage: Stage, batches: range) -> AsyncIterator[Gradient]:
        """Work through `batches` at one worker; give the gradient of each update.

        The program sets `stage.begun`. It ends before `batches` do if `stage.requester.drained_at` says so.
        """
        ...
