"""Exchanges between the workers of one copy of a model at an update: tied parameters, and the norm of the gradient.

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
from dure.partition.messages import COPIES, NORM, TIES, free_tag

if TYPE_CHECKING:
    from torch import Tensor

    from dure.partition.stage import Stage


async def exchanged(stage: Stage, values: Mapping[int, Tensor], number: int) -> dict[int, Tensor]:
    """Send `values` to other workers of this copy of the model, by number; return as many elements from each of them.

    Exchanges of one kind have one `number`.
    """
    tag, started = free_tag(stage.layout) + number, stage.node.now()
    receiving = {part: stage.node.recv(stage.holders[part], _like(value), tag=tag) for part, value in values.items()}
    sending = [stage.node.send(stage.holders[part], value, tag=tag) for part, value in values.items()]
    received = {part: await operation for part, operation in receiving.items()}
    for operation in sending:
        await operation
    stage.meter.add("wait", started, stage.node.now(), "update")
    return received


async def sum_ties(stage: Stage, gradient: Tensor) -> None:
    """Replace the gradient of each tied parameter by the sum over its copies at all workers, in place.

    The sum is in the order of ranks, so it has the same bits at all copies. Parameters that only the workers have that
    share these layers are summed by an all-reduce.
    """
    held, ways = stage.layout.held[stage.part], stage.layout.ways
    near = tuple(range(stage.rank * ways, (stage.rank + 1) * ways))
    if stage.shared is not None:
        await stage.shared.sum_over_ways(gradient, [each for each in held if each.tied == near])
    ties = [each for each in held if each.tied and (stage.shared is None or each.tied != near)]
    others = sorted({part for tie in ties for part in tie.tied} - {stage.part})
    shared = {part: [tie for tie in ties if part in tie.tied] for part in others}
    sizes = {part: [tie.stop - tie.start for tie in common] for part, common in shared.items()}
    if isinstance(gradient, Ghost):
        await exchanged(stage, {part: gradient.new_empty(sum(sizes[part])) for part in others}, TIES)
        return
    own = {part: torch.cat([gradient[tie.start : tie.stop] for tie in shared[part]]) for part in others}
    received = await exchanged(stage, own, TIES) if others else {}
    parts = {part: iter(torch.split(values, sizes[part])) for part, values in received.items()}
    for tie in ties:
        copies = [gradient[tie.start : tie.stop] if part == stage.part else next(parts[part]) for part in tie.tied]
        total = copies[0].clone()
        for copy in copies[1:]:
            total += copy
        gradient[tie.start : tie.stop] = total


async def share_copies(stage: Stage, gradient: Tensor) -> None:
    """Replace the gradient of parameters that are whole at all ways by that of the first way, in place.

    A codec may encode it in blocks with other parameters, which are not the same at all ways.
    """
    layout = stage.layout
    copies = [held for held in layout.held[stage.part] if held.shard is None and held.name not in layout.partial]
    if layout.ways == 1 or not copies:
        return
    tag, started = free_tag(layout) + COPIES, stage.node.now()
    first = stage.part - stage.part % layout.ways
    values = torch.cat([gradient[held.start : held.stop] for held in copies])
    if stage.part == first:
        others = range(first + 1, first + layout.ways)
        for operation in [stage.node.send(stage.holders[part], values, tag=tag) for part in others]:
            await operation
    else:
        values = await stage.node.recv(stage.holders[first], _like(values), tag=tag)
        for held, part in zip(copies, torch.split(values, [each.stop - each.start for each in copies]), strict=True):
            gradient[held.start : held.stop] = part
    stage.meter.add("wait", started, stage.node.now(), "update")


async def limit_norm(stage: Stage, gradient: Tensor, clip: float) -> None:
    """Limit the norm of the gradient of the whole model, of which `gradient` is a part, to `clip`, in place.

    The workers add up their squared norms in the order of parts. A parameter that several hold counts at the first.
    """
    others = [part for part in stage.layout.parts if part != stage.part]
    if isinstance(gradient, Ghost):
        await exchanged(stage, {rank: Ghost(1, torch.float64.itemsize) for rank in others}, NORM)
        return
    again = [held for held in stage.layout.held[stage.part] if not held.first]
    starts, stops = [0, *(held.stop for held in again)], [*(held.start for held in again), gradient.numel()]
    parts = [gradient[start:stop] for start, stop in zip(starts, stops, strict=True)]
    own = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]).square().sum().reshape(1)
    received = await exchanged(stage, dict.fromkeys(others, own), NORM)
    squares = [own if part == stage.part else received[part] for part in stage.layout.parts]
    gradient *= clip_factor(math.sqrt(sum(map(float, squares))), clip)


def _like(value: Tensor) -> Tensor:
    return value.new_empty(value.numel())
