"""The mean of the models that workers, or pipelines, have after the same step, which they reach at different times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from dure.run.stages import Stages


Merge = Callable[[Sequence[torch.Tensor]], torch.Tensor]


class Graded(NamedTuple):
    """A model to be graded: `values` after `step`, with its `buffers` if any; `updates` gradients are in it."""

    step: int
    values: torch.Tensor
    buffers: torch.Tensor | None
    updates: int


class _Sum:
    """The models of one step that have arrived: their weighted sum, and their buffers by rank."""

    def __init__(self, like: torch.Tensor) -> None:
        self.total = torch.zeros_like(like)
        self.weight = 0.0
        self.updates = 0
        self.buffers: dict[int, torch.Tensor] = {}


class Gathering:
    """Adds up models as workers reach a step, and gives their mean once all have.

    A step that workers have reached costs one vector of the model's size until the slowest has reached it too.
    `merge` makes one of all buffers, given in rank order.
    """

    def __init__(self, merge: Merge) -> None:
        self._merge = merge
        self._sums: dict[int, _Sum] = {}

    def add(
        self,
        step: int,
        rank: int,
        values: torch.Tensor,
        *,
        updates: int,
        weight: float = 1.0,
        buffers: torch.Tensor | None = None,
    ) -> None:
        """Add a copy of worker `rank`'s model after `step`, which holds `updates` of its gradients."""
        found = self._sums.get(step)
        if found is None:
            found = self._sums[step] = _Sum(values)
        found.total.add_(values, alpha=weight)
        found.weight += weight
        found.updates += updates
        if buffers is not None:
            found.buffers[rank] = buffers.clone()

    def complete(self, slowest: int) -> list[Graded]:
        """The means of all steps up to `slowest`, the step that every worker has reached; in order, each once."""
        return [self._mean(step) for step in sorted(self._sums) if step <= slowest]

    def _mean(self, step: int) -> Graded:
        found = self._sums.pop(step)
        buffers = [found.buffers[rank] for rank in sorted(found.buffers)]
        values = found.total.div_(found.weight)
        return Graded(step, values, self._merge(buffers) if buffers else None, found.updates)

    def __bool__(self) -> bool:
        """Whether any model waits for others."""
        return bool(self._sums)


class _Part(NamedTuple):
    """The model of one worker after a step."""

    values: torch.Tensor
    updates: int
    weight: float
    buffers: torch.Tensor | None


class StageGathering:
    """Collects the parts of models as workers reach a step, and gives the mean of the whole models once all have."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._parts: dict[int, dict[int, _Part]] = {}

    def add(
        self,
        step: int,
        rank: int,
        values: torch.Tensor,
        *,
        updates: int,
        weight: float = 1.0,
        buffers: torch.Tensor | None = None,
    ) -> None:
        """Add a copy of the model of worker `rank` of the run after `step`, which holds `updates` of its gradients."""
        kept = None if buffers is None else buffers.clone()
        self._parts.setdefault(step, {})[rank] = _Part(values.clone(), updates, weight, kept)

    def complete(self, slowest: int) -> list[Graded]:
        """The models of all steps up to `slowest`, the step that every worker has reached; in order, each once."""
        return [self._joined(step) for step in sorted(self._parts) if step <= slowest]

    def _joined(self, step: int) -> Graded:
        parts, stages = self._parts.pop(step), self._stages
        models = []
        for rank in range(stages.count):
            own = [parts[number] for number in sorted(parts) if stages.place(number)[1] == rank]
            models.append(_mean(own))
        buffers = {number: part.buffers for number, part in parts.items() if part.buffers is not None}
        updates = sum(part.updates for number, part in parts.items() if stages.reports(number))
        return Graded(step, stages.joined(models), stages.buffers(buffers), updates)

    def __bool__(self) -> bool:
        """Whether any model waits for others."""
        return bool(self._parts)


def _mean(parts: Sequence[_Part]) -> torch.Tensor:
    total = torch.zeros_like(parts[0].values)
    for part in parts:
        total.add_(part.values, alpha=part.weight)
    return total.div_(sum(part.weight for part in parts))
