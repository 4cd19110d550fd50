"""Corrections of stale gradients at a shard, and the update that a correction gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class Update:
    """An update at a shard, the moment before it counts.

    `staleness` counts the versions from `read`, on which the worker computed it, to `values`, to which it is applied;
    `read` is None if the shard does not know. `gradient` is to be corrected in place. `keep(name, worker)` is declared
    state: a vector like `gradient`, zeros at first, saved in checkpoints; with a worker, freed when that one leaves.
    """

    worker: int
    staleness: int
    gradient: torch.Tensor
    values: torch.Tensor
    read: torch.Tensor | None
    keep: Callable[[str, int | None], torch.Tensor]


@runtime_checkable
class Keeping(Protocol):
    """A correction that declares the vectors which `Update.keep` gives it at a shard, for so many `workers`."""

    def keeps(self, workers: int) -> int: ...


def kept_by(correction: Correction, workers: int) -> int:
    """The vectors that a correction keeps at a shard; one for each worker if it does not declare them."""
    return correction.keeps(workers) if isinstance(correction, Keeping) else workers


@runtime_checkable
class Correction(Protocol):
    """A remedy that corrects each gradient, element by element; `compares` if it looks at `Update.read`."""

    compares: ClassVar[bool]

    def correct(self, update: Update) -> None: ...
