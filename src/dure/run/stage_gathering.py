"""The models that pipelines have after the same step, which their workers reach at different times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from dure.run.gathering import Graded

if TYPE_CHECKING:
    from dure.run.stages import Stages


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
