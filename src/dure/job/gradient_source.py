"""Protocols between a worker and the source of its gradients: a job's data, or a user's own training loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from dure.core.node import Node, Operation
    from dure.core.state import State
    from dure.job.gradient import Gradient, GradientWork
    from dure.job.optimizer import OptimizerSpec


class MeanGradients(Protocol):
    """The part of a worker's group that a source uses."""

    @property
    def encodes(self) -> bool:
        """Whether a codec encodes what travels over the group."""
        ...

    def mean_gradient(self, work: Any, share: float) -> Operation[Gradient]:
        """Start the gradient of `work`, times `share`, summed over the group."""
        ...

    def mean(self, values: torch.Tensor, share: float | None = None) -> Operation[torch.Tensor]:
        """Start on the mean of `values` over the group; each member has a `share` of the samples."""
        ...

    async def all_go_on(self, late: bool) -> bool:
        """Whether all members go on: none of them is `late`."""
        ...


class Requester(Protocol):
    """The part of a worker that a source uses: the worker requests a gradient.

    A restart restores `kept` and `kept_plain` (values that JSON has).
    """

    rank: int
    clock: int
    node: Node
    params: torch.Tensor
    buffers: torch.Tensor | None
    kept: dict[str, torch.Tensor]
    kept_plain: dict[str, Any]
    optimizer: LocalOptimizer
    lr: float | Sequence[float] | None

    @property
    def group(self) -> MeanGradients: ...

    @property
    def drained_at(self) -> int: ...

    @property
    def versions(self) -> list[int] | None:
        """The version of each shard of the parameters; None without servers."""
        ...

    def settle(self, values: torch.Tensor) -> None:
        """Copy the parameters to `values`, the memory in which a user's loop reads them."""
        ...


class GradientSource(Protocol):
    """Source of a worker's gradients: a job's data, or a user's own training loop.

    `can_stop`: whether a gradient can be cancelled after its start. `whole`: a gradient is that of the whole model, not
    that of a stage, and its time is the computation's.
    """

    batch_size: int
    can_stop: bool
    whole: bool

    def gradient(self, requester: Requester) -> Operation[Gradient]:
        """Start the next gradient at the worker's parameters."""
        ...

    def mean_gradient(self, requester: Requester) -> Operation[Gradient]:
        """As `gradient`, averaged over the worker's group, weighted by batch size."""
        ...

    def model(self, requester: Requester) -> torch.Tensor:
        """The model of the worker: its parameters, unless the source keeps several versions of them."""
        ...

    async def settled(self) -> None:
        """Wait until others have received all that this source has sent."""
        ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class DataSource(GradientSource, Protocol):
    """A source that owns its data, so that it can compute the gradient of any samples, not only of the next ones.

    `samples` is the number of samples; `epoch` counts passes over this worker's samples.
    """

    @property
    def samples(self) -> int: ...

    @property
    def epoch(self) -> float: ...

    def next(self, requester: Requester) -> GradientWork:
        """Draw the next mini-batch; return the work of computing its gradient."""
        ...

    def gradient_again(self, requester: Requester, values: torch.Tensor) -> Operation[Gradient]:
        """Start another gradient of the last mini-batch, at `values`."""
        ...

    def gradient_at(
        self, requester: Requester, values: torch.Tensor, indices: torch.Tensor, *, draw: int
    ) -> Operation[Gradient]:
        """Start the mean gradient over given samples, at `values`."""
        ...


class LocalOptimizer(Protocol):
    """The optimizer of `Worker.step`: a rule on flat vectors (`FlatOptimizer`), or a user's own optimizer."""

    spec: OptimizerSpec

    def apply(
        self,
        values: torch.Tensor,
        gradient: torch.Tensor,
        out: torch.Tensor,
        *,
        lr: float | Sequence[float] | None = None,
    ) -> None: ...

    def state(self) -> State: ...

    def restore(self, state: State) -> None: ...
