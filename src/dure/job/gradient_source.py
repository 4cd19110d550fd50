"""The source of a worker's gradients: a job's data, or the loop of a user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from dure.core.node import Node, Operation
    from dure.job.gradient import Gradient, GradientWork
    from dure.job.optimizer import OptimizerSpec


class MeanGradients(Protocol):
    """What a source sees of the group of a worker."""

    def mean_gradient(self, work: GradientWork, share: float) -> Operation[Gradient]:
        """Start the gradient of `work`, times `share`, summed over the group."""
        ...


class Requester(Protocol):
    """What a source sees of the worker that asks for a gradient."""

    rank: int
    clock: int
    node: Node
    params: torch.Tensor
    buffers: torch.Tensor | None

    @property
    def group(self) -> MeanGradients: ...

    def settle(self, values: torch.Tensor) -> None:
        """Copy the parameters to `values`, where a loop of the user's computes with them."""
        ...


class GradientSource(Protocol):
    """Where a worker's gradients come from: a job's data, or a loop that the user owns.

    `can_stop`: a gradient that has been started may be cancelled.
    """

    batch_size: int
    can_stop: bool

    def gradient(self, requester: Requester) -> Operation[Gradient]:
        """Start the next gradient at the worker's parameters."""
        ...

    def mean_gradient(self, requester: Requester) -> Operation[Gradient]:
        """As `gradient`, averaged over the worker's group, weighted by batch size."""
        ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class DataSource(GradientSource, Protocol):
    """A source that owns its data, and so can give other gradients than the next.

    `samples` are there altogether; `epoch` counts passes over this worker's.
    """

    @property
    def samples(self) -> int: ...

    @property
    def epoch(self) -> float: ...

    def next(self, requester: Requester) -> GradientWork:
        """Draw the next mini-batch: the work of computing its gradient."""
        ...

    def gradient_again(self, requester: Requester, values: torch.Tensor) -> Operation[Gradient]:
        """Start the gradient of the mini-batch that was last begun, at `values`."""
        ...

    def gradient_at(
        self, requester: Requester, values: torch.Tensor, indices: torch.Tensor, *, draw: int
    ) -> Operation[Gradient]:
        """Start the mean gradient over given samples, at `values`."""
        ...


class LocalOptimizer(Protocol):
    """What `Worker.step` steps with: a rule on flat vectors (`optim.FlatOptimizer`), or a user's own optimizer."""

    spec: OptimizerSpec

    def apply(
        self,
        values: torch.Tensor,
        gradient: torch.Tensor,
        out: torch.Tensor,
        *,
        lr: float | Sequence[float] | None = None,
    ) -> None: ...

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]: ...

    def restore(self, tensors: Mapping[str, torch.Tensor], plain: Mapping[str, Any]) -> None: ...
