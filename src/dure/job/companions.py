"""Nodes of a run beside its workers and servers, such as the actors and the replay of reinforcement learning.

A job with companions has no training data of its own: its workers get gradients from a source that the companions
make, and its models are graded by an evaluator of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

    from dure.core.deployment import NodeSpec
    from dure.core.meter import Meter
    from dure.core.node import Node
    from dure.core.state import State
    from dure.job.gradient import GradientSource
    from dure.job.metrics import Metrics

Build = Callable[[int], "nn.Module"]
"""Builds a model with the initial values of a seed."""

Figures = dict[str, float]
"""Counts and measurements of one node, by name."""


class RunShape(NamedTuple):
    """The values of a run that its companions need: the model, its operations, the workers, the seed.

    `batch_size` is that of one worker. `start` is the step of the checkpoint from which the nodes start, 0 at the
    beginning: random streams begin anew there. In a `virtual` run time is modelled.
    """

    build: Build
    flops_per_sample: float
    workers: int
    batch_size: int
    seed: int
    start: int = 0
    virtual: bool = False


class Companion(Protocol):
    """The work of one node beside its services, which are registered when it is built. `saves`: it has a state."""

    saves: bool

    async def work(self) -> None:
        """Work until the run ends; the run ends the task."""
        ...

    def count_on(self, figures: Figures) -> None:
        """Count on from the figures of an incarnation that has failed."""
        ...

    def go_on_without(self, name: str) -> None:
        """Note that another companion has failed and does not come back."""
        ...

    def figures(self) -> Figures:
        """The node's counts so far."""
        ...

    def state(self) -> State: ...

    def restore(self, state: State) -> None: ...


class Grader(Protocol):
    """Grades flat parameters."""

    def grade(self, values: torch.Tensor, buffers: torch.Tensor | None = None) -> Metrics: ...


class Companions(Protocol):
    """The companions of a job. `machines` counts those that stand on machines of their own."""

    @property
    def machines(self) -> int: ...

    def check(self, workers: int, batch_size: int) -> None:
        """Raise `UsageError` for a number of workers, or a batch size, that does not suit."""
        ...

    def nodes(self, workers: int) -> Sequence[NodeSpec]: ...

    def companion(self, shape: RunShape, node: Node) -> Companion:
        """Build the part of `node`, and register its services."""
        ...

    def source(self, shape: RunShape, node: Node, rank: int, device: str, meter: Meter) -> GradientSource:
        """Build the source of a worker's gradients on `device`, and register its services at `node`.

        The source adds its times to `meter`.
        """
        ...

    def grader(self, build: Build, episodes: int | None, *, seed: int) -> Grader: ...

    def row(self, figures: Mapping[str, Figures], seconds: float) -> dict[str, Any]:
        """The companions' part of a row of the history, from the figures of each node, by its name."""
        ...

    def summary(self, figures: Mapping[str, Figures], rows: Sequence[Mapping[str, Any]], seconds: float) -> Any:
        """The value of `experience` in the summary."""
        ...
