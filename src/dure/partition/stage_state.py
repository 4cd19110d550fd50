"""State of one worker of a pipeline beside its parameters: versions of them, and the figures of its stage.

The worker keeps them with its declared state, so a checkpoint has all of them. Its `params` are those of the version
that was updated last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch

from dure.core.node import Ghost

if TYPE_CHECKING:
    from torch import Tensor

    from dure.job.gradient import Requester
    from dure.job.optimizer import FlatOptimizer


PARAMS = "params"


def _name(vector: str, number: int) -> str:
    return f"{vector} of version {number}"


def version(requester: Requester, number: int) -> Tensor:
    """The parameters of a version. They begin as those that the worker has before its first update."""
    name = _name(PARAMS, number)
    if name not in requester.kept:
        requester.kept[name] = requester.params.clone()
    return requester.kept[name]


def begin_versions(requester: Requester, count: int) -> None:
    """Make `count` equal versions, unless a checkpoint has restored them."""
    for number in range(count):
        version(requester, number)


def use_version(requester: Requester, number: int, steps: int) -> None:
    """Have the worker's next step be that of a version, which has made so many `steps`."""
    if isinstance(requester.params, Ghost):
        return
    requester.params = version(requester, number)
    optimizer = cast("FlatOptimizer", requester.optimizer)
    optimizer.steps = steps
    for vector in optimizer.vectors:
        name = _name(vector, number)
        if name not in requester.kept:
            requester.kept[name] = torch.zeros_like(requester.params)
        optimizer.vectors[vector] = requester.kept[name]


def leave_version(requester: Requester) -> None:
    """Give the worker copies of the version that it has used: a checkpoint saves no memory under two names."""
    if isinstance(requester.params, Ghost):
        return
    requester.params = requester.params.clone()
    optimizer = cast("FlatOptimizer", requester.optimizer)
    optimizer.vectors = {name: values.clone() for name, values in optimizer.vectors.items()}


def average_versions(requester: Requester, count: int) -> None:
    """Set all versions to their mean, and the vectors of their optimizers to the mean of these."""
    if isinstance(requester.params, Ghost):
        return
    optimizer = cast("FlatOptimizer", requester.optimizer)
    for vector in (PARAMS, *optimizer.vectors):
        each = [requester.kept[_name(vector, number)] for number in range(count)]
        mean = _mean(each)
        for values in each:
            values.copy_(mean)


def mean_of_versions(requester: Requester, count: int) -> Tensor:
    """The mean of the versions of a worker; its parameters where it has one version or has begun none."""
    if count == 1 or _name(PARAMS, 0) not in requester.kept or isinstance(requester.params, Ghost):
        return requester.params
    return _mean([version(requester, number) for number in range(count)])


def _mean(each: list[Tensor]) -> Tensor:
    total = each[0].clone()
    for values in each[1:]:
        total.add_(values)
    return total.div_(len(each))


@dataclass(slots=True)
class StageCounts:
    """Figures of one worker of a pipeline, for the record of a run.

    `staleness` counts updates by the number of updates between their forward and them. `most_versions` is the largest
    number of weights kept at once, the newest included; `most_sets` that of micro-batches between forward and backward,
    and `most_activation_nbytes` that of the bytes kept for these backwards. `collectives` counts those between workers
    that share layers, by kind, and `collective_nbytes` the bytes of their payloads.
    """

    staleness: Counter[int] = field(default_factory=Counter)
    most_versions: int = 1
    most_sets: int = 0
    most_activation_nbytes: int = 0
    collectives: Counter[str] = field(default_factory=Counter)
    collective_nbytes: Counter[str] = field(default_factory=Counter)

    def count_collective(self, kind: str, nbytes: int) -> None:
        """Count a collective with a payload of `nbytes`."""
        self.collectives[kind] += 1
        self.collective_nbytes[kind] += nbytes

    def plain(self) -> dict[str, Any]:
        """The figures as values that JSON has."""
        found = {
            "staleness": {str(behind): count for behind, count in sorted(self.staleness.items())},
            "versions": self.most_versions,
            "sets": self.most_sets,
            "activation_bytes": self.most_activation_nbytes,
        }
        if self.collectives:
            found["collectives"] = dict(sorted(self.collectives.items()))
            found["collective_bytes"] = dict(sorted(self.collective_nbytes.items()))
        return found

    def restore(self, plain: Mapping[str, Any]) -> None:
        """Go on from the figures of `plain`."""
        self.staleness = Counter({int(behind): int(count) for behind, count in plain["staleness"].items()})
        self.most_versions, self.most_sets = plain["versions"], plain["sets"]
        self.most_activation_nbytes = plain["activation_bytes"]
        self.collectives = Counter(plain.get("collectives", {}))
        self.collective_nbytes = Counter(plain.get("collective_bytes", {}))
