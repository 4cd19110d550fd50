"""Exchanges between the workers of one pipeline at an update: tied parameters, and the norm of the whole gradient.

All workers of a pipeline that flushes reach the update of the same mini-batch before any of them goes on, so each may
wait for the others here. Messages have tags above those of borders.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from dure.core.node import Ghost
from dure.job.optimizer import clip_factor

if TYPE_CHECKING:
    from torch import Tensor

    from dure.partition.stage import Stage

TIES, NORM = 0, 1
"""The numbers of the exchanges."""


async def exchanged(stage: Stage, values: Mapping[int, Tensor], number: int) -> dict[int, Tensor]:
    """Send `values` to other workers of the pipeline, by rank; return as many elements from each of them.

    Exchanges of one kind have one `number`.
    """
    tag, started = stage.messages.free_tag + number, stage.node.now()
    receiving = {
        rank: stage.node.recv(stage.messages.peers[rank], _like(value), tag=tag) for rank, value in values.items()
    }
    sending = [stage.node.send(stage.messages.peers[rank], value, tag=tag) for rank, value in values.items()]
    received = {rank: await operation for rank, operation in receiving.items()}
    for operation in sending:
        await operation
    stage.meter.add("wait", started, stage.node.now(), "update")
    return received


async def sum_ties(stage: Stage, gradient: Tensor) -> None:
    """Replace the gradient of each tied parameter by the sum over its copies at all workers, in place.

    The sum is in the order of ranks, so it has the same bits at all copies.
    """
    ties = stage.layout.ties[stage.rank]
    others = sorted({rank for tie in ties for rank in tie.ranks} - {stage.rank})
    shared = {rank: [tie for tie in ties if rank in tie.ranks] for rank in others}
    sizes = {rank: [tie.stop - tie.start for tie in common] for rank, common in shared.items()}
    if isinstance(gradient, Ghost):
        await exchanged(stage, {rank: gradient.new_empty(sum(sizes[rank])) for rank in others}, TIES)
        return
    own = {rank: torch.cat([gradient[tie.start : tie.stop] for tie in shared[rank]]) for rank in others}
    received = await exchanged(stage, own, TIES) if others else {}
    parts = {rank: iter(torch.split(values, sizes[rank])) for rank, values in received.items()}
    for tie in ties:
        copies = [gradient[tie.start : tie.stop] if rank == stage.rank else next(parts[rank]) for rank in tie.ranks]
        total = copies[0].clone()
        for copy in copies[1:]:
            total += copy
        gradient[tie.start : tie.stop] = total


async def limit_norm(stage: Stage, gradient: Tensor, clip: float) -> None:
    """Limit the norm of the gradient of the whole model, of which `gradient` is a part, to `clip`, in place.

    The workers add up their squared norms in the order of ranks. A tied parameter counts at the first of its workers.
    """
    others = [rank for rank in stage.layout.ranks if rank != stage.rank]
    if isinstance(gradient, Ghost):
        await exchanged(stage, {rank: Ghost(1, torch.float64.itemsize) for rank in others}, NORM)
        return
    again = [tie for tie in stage.layout.ties[stage.rank] if tie.ranks[0] != stage.rank]
    starts, stops = [0, *(tie.stop for tie in again)], [*(tie.start for tie in again), gradient.numel()]
    parts = [gradient[start:stop] for start, stop in zip(starts, stops, strict=True)]
    own = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]).square().sum().reshape(1)
    received = await exchanged(stage, dict.fromkeys(others, own), NORM)
    squares = [own if rank == stage.rank else received[rank] for rank in stage.layout.ranks]
    gradient *= clip_factor(math.sqrt(sum(map(float, squares))), clip)


def _like(value: Tensor) -> Tensor:
    return value.new_empty(value.numel())
