"""The version of the weights that each action of a pipeline reads, from the rules of its method."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from dure.job.gradient_source import Requester
    from dure.partition.action import Action
    from dure.partition.pipeline import Pipeline
    from dure.partition.ticks import Timed


class Read(NamedTuple):
    """The weights after `version` updates of a worker, or a prediction of those after `ahead` more.

    `own` counts, from 1, the versions of a model with several, which are updated apart; 0 where there is a single one.

    >>> str(Read(3)), str(Read(3, 2)), str(Read(1, own=7))
    ('w3', 'w3+2', 'v7 w1')
    """

    version: int
    ahead: int = 0
    own: int = 0

    def __str__(self) -> str:
        weights = f"w{self.version}+{self.ahead}" if self.ahead else f"w{self.version}"
        return f"v{self.own} {weights}" if self.own else weights


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
    versions = VersionLog(pipeline, rank)
    versions.begin(min((each.action.batch for each in row), default=0))
    reads: list[Read | None] = []
    first: dict[int, int] = {}
    staleness: dict[int, int] = {}
    most = 1
    for each in row:
        batch = each.action.batch
        if each.action.kind == "U":
            reads.append(None)
            staleness[batch] = versions.updates(batch) - first.pop(batch)
            versions.updated(batch)
        else:
            read = versions.read(each.action)
            first.setdefault(batch, read.version)
            reads.append(read)
            most = max(most, versions.kept)
    return WeightsRead(reads, staleness, most)


class VersionLog:
    """The versions of the weights of worker `rank`, as the rules of its pipeline read them.

    To the rules it is a stage whose weights are a `Read` as a tensor: the updates before them, those predicted, and
    which version of the model it is.
    """

    requester: Requester

    def __init__(self, pipeline: Pipeline, rank: int) -> None:
        self.pipeline = pipeline
        self.rank = rank
        self.version = 0
        self._first = 0
        self._stashed: dict[int, Tensor] = {}
        self._updated: Counter[int] = Counter()

    # ---- the actions of the worker

    def begin(self, first: int) -> None:
        """Begin with the mini-batch `first`, after an update by each one before it; nothing is in flight."""
        self._first = self.version = first
        self._updated = Counter(batch % self.pipeline.versions for batch in range(first))
        self._stashed.clear()

    def read(self, action: Action) -> Read:
        """The weights that a forward or a backward reads now."""
        rule = self.pipeline.forward_reads if action.kind == "F" else self.pipeline.backward_reads
        return Read(*map(int, rule(self, action.batch).tolist()))

    def updated(self, batch: int) -> None:
        """Count the update by a mini-batch, and drop its weights."""
        self._stashed.pop(batch, None)
        self._updated[batch % self.pipeline.versions] += 1
        self.version += 1

    def updates(self, batch: int) -> int:
        """The updates so far of the version that a mini-batch reads."""
        return self._updated[batch % self.pipeline.versions]

    @property
    def kept(self) -> int:
        """The number of weights kept now, the newest included. With a lag, so are those for mini-batches to come."""
        if self.pipeline.versions > 1:
            return self.pipeline.versions
        kept = {int(each[0]) for each in self._stashed.values()} | {self.version}
        return len(range(min(kept), self.version + 1)) if self.pipeline.lag else len(kept)

    # ---- the weights of a stage

    @property
    def newest(self) -> Tensor:
        return torch.tensor([self.version, 0])

    def fixed(self, batch: int) -> Tensor:
        return self.stash(batch)

    def stash(self, batch: int) -> Tensor:
        lag = self.pipeline.lag
        version = max(self._first, batch - lag) if lag else self.version
        return self._stashed.setdefault(batch, torch.tensor([version, 0]))

    def ahead(self, steps: Callable[[float], float]) -> Tensor:
        """The newest weights and the updates that `steps` predicts if each is as large as the last."""
        return torch.tensor([self.version, round(steps(1.0))])

    def version_for(self, batch: int) -> Tensor:
        return torch.tensor([self.updates(batch), 0, batch % self.pipeline.versions + 1])

    def average(self) -> None:
        """Do nothing: a mean leaves each version with the updates that it had."""
