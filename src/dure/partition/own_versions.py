"""Versions of a worker's parameters: several models at one worker, each with its own state of the optimizer.

The worker keeps them with its declared state, so a checkpoint has all of them. Its `params` are those of the version
that was updated last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from dure.core.node import Ghost

if TYPE_CHECKING:
    from torch import Tensor

    from dure.job.gradient_source import Requester
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
