"""The version of the weights that each action of a pipeline reads, from the rules of its method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from dure.job.gradient_source import Requester
    from dure.partition.pipeline import Pipeline
    from dure.partition.ticks import Timed


class Read(NamedTuple):
    """The weights after `version` updates of a worker, or a prediction of those after `ahead` more.

    >>> str(Read(3)), str(Read(3, 2))
    ('w3', 'w3+2')
    """

    version: int
    ahead: int = 0

    def __str__(self) -> str:
        return f"w{self.version}+{self.ahead}" if self.ahead else f"w{self.version}"


@dataclass(frozen=True)
class WeightsRead:
    """The weights that the actions of one worker read.

    `reads` has those of each action, None for an update. `staleness` has, for each mini-batch, the updates between the
    weights of its first forward and its update. `most_versions` is the largest number of weights that the worker keeps
    at once, the newest included.
    """

    reads: Sequence[Read | None]
    staleness: Mapping[int, int]
    most_versions: int


def weights_read(pipeline: Pipeline, rank: int, row: Sequence[Timed]) -> WeightsRead:
    """The weights that the actions of worker `rank` read, in the order of its `row` of a timetable."""
    stage = _Versions(pipeline, rank, min((each.action.batch for each in row), default=0))
    reads: list[Read | None] = []
    first: dict[int, int] = {}
    staleness: dict[int, int] = {}
    most = 1
    for action, _, _, version in row:
        stage.version = version
        if action.kind == "U":
            reads.append(None)
            staleness[action.batch] = version - first.pop(action.batch)
            stage.drop(action.batch)
            continue
        rule = pipeline.forward_reads if action.kind == "F" else pipeline.backward_reads
        read = Read(*map(int, rule(stage, action.batch).tolist()))
        first.setdefault(action.batch, read.version)
        reads.append(read)
        most = max(most, stage.versions)
    return WeightsRead(reads, staleness, most)


class _Versions:
    """The weights of a stage, of which each is a `Read` as a tensor: (the number of its updates, predicted ones).

    The mini-batch `first` finds nothing in flight.
    """

    requester: Requester

    def __init__(self, pipeline: Pipeline, rank: int, first: int) -> None:
        self.rank = rank
        self.version = 0
        self._lag = pipeline.lag
        self._first = first
        self._stashed: dict[int, Tensor] = {}

    @property
    def newest(self) -> Tensor:
        return torch.tensor([self.version, 0])

    def fixed(self, batch: int) -> Tensor:
        return self.stash(batch)

    def stash(self, batch: int) -> Tensor:
        version = max(0, batch - self._first - self._lag) if self._lag else self.version
        return self._stashed.setdefault(batch, torch.tensor([version, 0]))

    def ahead(self, steps: Callable[[float], float]) -> Tensor:
        """The newest weights and the updates that `steps` predicts if each is as large as the last."""
        return torch.tensor([self.version, round(steps(1.0))])

    @property
    def versions(self) -> int:
        """The number of weights kept now. With a lag, those for mini-batches to come are among them."""
        kept = {int(each[0]) for each in self._stashed.values()} | {self.version}
        return len(range(min(kept), self.version + 1)) if self._lag else len(kept)

    def drop(self, batch: int) -> None:
        self._stashed.pop(batch, None)
