"""The attributes of a worker that its sessions with a topology use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from dure.core.node import nothing

if TYPE_CHECKING:
    import torch

    from dure.core.meter import Meter
    from dure.core.node import Node
    from dure.job.gradient import Gradient, LocalOptimizer

Stats = Mapping[str, float]
"""Figures that a worker sends to the other members of its group, or of its update's group."""


class Pulled(NamedTuple):
    """Parameters and the version of each shard's part of them. Borrowed parameters are valid until `release`."""

    values: torch.Tensor
    versions: list[int]
    release: Callable[[], None] = nothing


class WorkerReplica(Protocol):
    """A worker's model, clock and meter."""

    node: Node
    rank: int
    clock: int
    params: torch.Tensor
    buffers: torch.Tensor | None
    optimizer: LocalOptimizer
    meter: Meter
    lr: float | Sequence[float] | None
    stats: list[Stats]
    asking: bool

    @property
    def merge_buffers(self) -> Callable[[Sequence[torch.Tensor]], torch.Tensor]:
        """Merges the buffers of all replicas into one."""
        ...

    @property
    def batch_size(self) -> int: ...

    @property
    def share(self) -> float:
        """This worker's part of all workers' batch."""
        ...

    @property
    def versions(self) -> list[int] | None:
        """The version of each shard that was adopted last; None before the first."""
        ...

    @property
    def stops_waiting(self) -> bool:
        """Whether a checkpoint may cut off a wait for admission."""
        ...

    def wait_for_admission(self) -> None:
        """Begin to wait, which is a step boundary too. Raises `Suspend` where a checkpoint is due."""
        ...

    def check_loss(self, gradient: Gradient) -> None:
        """Raise `DivergedError` for a loss that is NaN or infinity."""
        ...

    def room(self) -> torch.Tensor:
        """Memory for parameters that are received while the present ones are in use."""
        ...

    def adopt(self, pulled: Pulled) -> None:
        """Go on from what was pulled."""
        ...

    def work_at(self, values: torch.Tensor, version: int, free: torch.Tensor | None) -> None:
        """Go on from parameters in shared memory, or a copy of them; `free` is memory for the next copy."""
        ...

    def give(self) -> int:
        """Number of gradients in the update that is sent now: those since the last update."""
        ...

    def is_skipped(self, update: torch.Tensor) -> bool:
        """Whether an update holds nothing but steps that are skipped."""
        ...

    def stamp(self, update: torch.Tensor, base: Sequence[int] | None = None) -> dict[str, Any]:
        """The fields that travel with `update`."""
        ...
