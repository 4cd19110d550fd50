"""What corrects stale gradients at a shard, and what it is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable


@dataclass(slots=True)
class Update:
    """An update at a shard, the moment before it counts.

    `staleness` are the versions between `read`, what the worker computed it on, and `values`, what it is applied to;
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
class Correction(Protocol):
    """A remedy that corrects each gradient, element by element; `compares` if it looks at `Update.read`."""

    compares: ClassVar[bool]

    def correct(self, update: Update) -> None: ...
