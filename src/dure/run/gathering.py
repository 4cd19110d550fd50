"""The mean of the models that workers, or pipelines, have after the same step, which they reach at different times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from dure.run.setup import Setup


class Graded(NamedTuple):
    """A model to be graded: `values` after `step`, with its `buffers` if any; `updates` gradients are in it."""

    step: int
    values: torch.Tensor
    buffers: torch.Tensor | None
    updates: int


class _Sum:
    """The weighted sum of the models of one step that have arrived; in a pipeline, of one stage's."""

    def __init__(self, like: torch.Tensor) -> None:
        self.total = torch.zeros_like(like)
        self.weight = 0.0


class _Step:
    """The models of one step that have arrived: a sum for each part, or shard of a part, and their buffers by rank."""

    def __init__(self) -> None:
        self.sums: dict[tuple[int, int], _Sum] = {}
        self.updates = 0
        self.buffers: dict[int, torch.Tensor] = {}


class Gathering:
    """Adds up models as workers of a run with `setup` reach a step, and gives their mean once all have.

    A step that workers have reached costs one vector of the model's size until the slowest has reached it too.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._steps: dict[int, _Step] = {}

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
        setup = self._setup
        found = self._steps.setdefault(step, _Step())
        part = rank % setup.parts, setup.shard_of(rank)
        if part not in found.sums:
            found.sums[part] = _Sum(values)
        models = found.sums[part]
        models.total.add_(values, alpha=weight)
        models.weight += weight
        if setup.reports(rank):
            found.updates += updates
        if buffers is not None:
            found.buffers[rank] = buffers.clone()

    def complete(self, slowest: int) -> list[Graded]:
        """The means of all steps up to `slowest`, the step that every worker has reached; in order, each once."""
        return [self._mean(step) for step in sorted(self._steps) if step <= slowest]

    def _mean(self, step: int) -> Graded:
        found, stages = self._steps.pop(step), self._setup.stages
        means = {part: found.sums[part].total.div_(found.sums[part].weight) for part in sorted(found.sums)}
        values = means[0, 0]
        if stages is not None:
            shards = [[mean for (part, _), mean in means.items() if part == each] for each in stages.layout.parts]
            values = stages.joined(
                [stages.of(part).joined(own) if stages.sharded else own[0] for part, own in enumerate(shards)]
            )
        return Graded(step, values, merged_buffers(self._setup, found.buffers), found.updates)

    def __bool__(self) -> bool:
        """Whether any model waits for others."""
        return bool(self._steps)


def merged_buffers(setup: Setup, found: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
    """The buffers of workers, by their number in the run, as those of one model; None where training changes none."""
    if not found:
        return None
    if setup.stages is not None:
        return setup.stages.buffers(found)
    return setup.delivery.merge_buffers([found[number] for number in sorted(found)])
