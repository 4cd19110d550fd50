"""The source of gradients of a stage: plays the actions of its worker up to each update, and makes its exchanges.

At an update the workers of one copy of a model exchange the gradients of tied parameters, and the norm of the whole.

All workers of a pipeline that flushes reach the update of the same mini-batch before any of them goes on, so each may
wait for the others here. Messages have tags above those of borders.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from dure.core.node import Ghost, StepPortion, StepTime
from dure.job.optimizer import clip_factor
from dure.partition.messages import COPIES, NORM, TIES, PortionBatches, free_tag
from dure.partition.programmed import Programmed
from dure.partition.sharded_stage import ShardedStage
from dure.partition.stage_state import leave_version, mean_of_versions

if TYPE_CHECKING:
    from torch import Tensor

    from dure.core.node import Operation
    from dure.core.vectors import Range
    from dure.job.gradient import Gradient, HeldShard, Requester
    from dure.partition.orders import Action
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


async def limit_norm(stage: Stage, gradient: Tensor, clip: float, shard: HeldShard | None = None) -> None:
    """Limit the norm of the gradient of the whole model, of which `gradient` is a part, to `clip`, in place.

    The workers add up their squared norms in the order of parts. A parameter that several hold counts at the first.
    With a `shard`, `gradient` is that of its ranges, and the workers of one part add up theirs before.
    """
    others = [part for part in stage.layout.parts if part != stage.part]
    again = [(held.start, held.stop) for held in stage.layout.held[stage.part] if not held.first]
    squares = 0.0 if isinstance(gradient, Ghost) else _squares_without(gradient, again, shard)
    if shard is not None:
        squares = await shard.sum_near(squares)
    if isinstance(gradient, Ghost):
        await exchanged(stage, {rank: Ghost(1, torch.float64.itemsize) for rank in others}, NORM)
        return
    own = torch.tensor([squares], dtype=torch.float64, device=gradient.device)
    received = await exchanged(stage, dict.fromkeys(others, own), NORM)
    each = [own if part == stage.part else received[part] for part in stage.layout.parts]
    gradient *= clip_factor(math.sqrt(sum(map(float, each))), clip)


def _squares_without(gradient: Tensor, again: Sequence[Range], shard: HeldShard | None) -> float:
    """The sum of squares of a gradient without the ranges `again` of the whole flat vector."""
    ranges = [(0, gradient.numel())] if shard is None else shard.own
    total, at = torch.zeros((), dtype=torch.float64, device=gradient.device), 0
    for start, stop in ranges:
        for low, high in _outside(again, start, stop):
            part = gradient[at + low - start : at + high - start]
            total += torch.linalg.vector_norm(part, dtype=torch.float64).square()
        at += stop - start
    return float(total)


def _outside(ranges: Sequence[Range], start: int, stop: int) -> Iterator[Range]:
    """The rest of `start` to `stop` outside of `ranges`, which are in order."""
    for low, high in ranges:
        if start < min(low, stop):
            yield start, min(low, stop)
        start = max(start, high)
    if start < stop:
        yield start, stop


def _like(value: Tensor) -> Tensor:
    return value.new_empty(value.numel())


AHEAD = 2
"""Actions for whose messages a worker asks ahead. The message of an action then travels during the one before."""


class StageSource:
    """Gradients of the parameters of one `stage`, for a worker that is the same stage of all replicas' pipelines.

    `clip` is the largest norm of the gradient over all stages; None: any.
    """

    can_stop = False

    def __init__(self, stage: Stage, *, share: float, samples: int, clip: float | None = None) -> None:
        self.stage = stage
        self.clip = clip
        self.share = share
        self.samples = samples
        self.batch_size = stage.batches.batch_size
        self.whole = isinstance(stage, ShardedStage) and len(stage.layout.parts) == 1
        self._updates: AsyncIterator[Gradient] | None = None

    @property
    def epoch(self) -> float:
        """Passes so far over the samples of this pipeline."""
        sampler = self.stage.batches.sampler
        return 0.0 if sampler is None else sampler.epoch

    def gradient(self, requester: Requester) -> Operation[Gradient]:
        """Start the actions up to the next update."""
        return requester.node.spawn(self._own(requester), "the next update of its stage")

    def mean_gradient(self, requester: Requester) -> Operation[Gradient]:
        """As `gradient`, averaged over the same stage of all replicas."""
        return requester.node.spawn(self._mean(requester), "the mean gradient of its stage")

    def gradient_at(self, requester: Requester, values: Tensor, indices: Tensor, *, draw: int) -> Operation[Gradient]:
        """Start the mean gradient over given samples. `values` are the requester's parameters, and the stage is alone.

        Random layers draw from `draw`.
        """
        assert values is requester.params
        return requester.node.spawn(self._portion(requester, indices, draw), "the gradient of a portion")

    async def _portion(self, requester: Requester, indices: Tensor, batch: int) -> Gradient:
        stage, only = self.stage, range(batch, batch + 1)
        assert isinstance(stage.batches, PortionBatches)
        assert stage.layout.depth == 1
        stage.requester = requester
        stage.begin(only)
        stage.batches.give(batch, indices)
        for action in stage.pipeline.order(stage.rank, only):
            if action.kind == "F":
                await stage.forward(action)
            elif action.kind == "B":
                await stage.backward(action)
        return stage.update(batch)

    def model(self, requester: Requester) -> Tensor:
        """The mean of the versions of the worker's parameters, or its one version."""
        return mean_of_versions(requester, self.stage.pipeline.versions)

    async def settled(self) -> None:
        """Wait until the neighbors have received all messages. The pipeline is drained, and begins anew."""
        await self.stage.messages.settled()
        if self._updates is not None and self.stage.pipeline.versions > 1:
            leave_version(self.stage.requester)
        self._updates = None

    def end(self) -> None:
        """End the threads of the stage, in a run that is over or has failed."""
        if self.stage.shared is not None:
            self.stage.shared.end()

    @property
    def figures(self) -> dict[str, Any]:
        """Figures of the stage for the record of a run; bytes are those of memory."""
        params, counts = self.stage.requester.params, self.stage.counts.plain()
        return {**counts, "weight_bytes": params.nbytes, "version_bytes": (counts["versions"] - 1) * params.nbytes}

    def state(self) -> dict[str, Any]:
        return {"sampler": self.stage.batches.state(), "counts": self.stage.counts.plain()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.stage.batches.restore(state["sampler"])
        self.stage.counts.restore(state["counts"])

    async def _next(self, requester: Requester) -> Gradient:
        stage = self.stage
        stage.requester = requester
        if self._updates is None:
            pipeline, batches = stage.pipeline, range(requester.clock, requester.drained_at)
            stage.begin(batches)
            self._updates = pipeline.run(stage, batches) if isinstance(pipeline, Programmed) else played(stage, batches)
        return await anext(self._updates)

    async def _own(self, requester: Requester) -> Gradient:
        return await self._completed(await self._next(requester))

    async def _mean(self, requester: Requester) -> Gradient:
        shard = requester.shard
        if shard is None:
            return await self._completed(await self._mean_of_replicas(requester))
        gradient = await self._next(requester)
        if isinstance(self.stage, ShardedStage):
            part = await self.stage.part_of_mean()
        else:
            await sum_ties(self.stage, gradient.values)  # before it is scattered: the copies are parts of other shards
            part = await shard.part_of_mean(gradient.values, self.share)
        if self.whole:
            return await shard.agreed(gradient.with_values(part))
        if self.clip is not None:
            await limit_norm(self.stage, part, self.clip, shard)
        return gradient.with_values(part)

    async def _completed(self, gradient: Gradient) -> Gradient:
        """A gradient that is to be applied, with what it needs from the other stages.

        A mean over replicas comes before, so that the copies of a tied parameter get the same bits.
        """
        await sum_ties(self.stage, gradient.values)
        if self.clip is not None:
            await limit_norm(self.stage, gradient.values, self.clip)
        return gradient

    async def _mean_of_replicas(self, requester: Requester) -> Gradient:
        gradient = await self._next(requester)
        group = requester.group
        if self.share == 1.0 and not group.encodes:
            return gradient  # there is one pipeline
        if group.encodes:
            ready = StepPortion(lambda: gradient, StepTime(0.0, 0.0))
            mean = await group.mean_gradient(ready, self.share)
            await share_copies(self.stage, mean.values)
            return mean
        node, started = requester.node, requester.node.now()
        values = await group.mean(gradient.values, self.share)
        self.stage.meter.add("communicate", started, node.now(), "all_reduce")
        return gradient.with_values(values)


async def played(stage: Stage, batches: range) -> AsyncIterator[Gradient]:
    """Play the order of a worker's actions for `batches`; give the gradient of each update.

    If the drain moves to an earlier mini-batch, the actions of later ones are left out: no other action needs them.
    """
    actions = _until_the_drain(stage, stage.pipeline.order(stage.rank, batches))
    window = list(islice(actions, AHEAD))
    for action in window:
        stage.messages.expect(action)
    while window:
        action = window.pop(0)
        for later in islice(actions, 1):
            stage.messages.expect(later)
            window.append(later)
        if action.kind == "U":
            yield stage.update(action.batch)
            continue
        if action.kind == "F":
            await stage.forward(action)
        else:
            await stage.backward(action, inputs=action.kind != "W", weights=action.kind != "I")
        await stage.node.sleep(0.0)  # messages leave now, not after the next computation


def _until_the_drain(stage: Stage, actions: Iterator[Action]) -> Iterator[Action]:
    """The actions of mini-batches before the drain, which may be set to an earlier one meanwhile."""
    for action in actions:
        if action.batch < stage.requester.drained_at:
            stage.begun = max(stage.begun, action.batch)
            yield action
