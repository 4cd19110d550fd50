"""The blocks of a model at a worker that holds a shard of the parameters: ZeRO stage 3.

    F(k)    wait for the parameters of chunk k, gather those of k + 1, forward, free k (the last chunk stays)
    B(k)    wait for the parameters of chunk k, gather those of k - 1, backward, free k, scatter the gradient of k
    U       wait for the scatters: the gradient of the own shard

Parameters that several chunks have (tied) are a unit of their own, whole from the first forward to the last backward.
A unit is freed by setting the size of its memory to 0, so that what autograd has saved finds the parameters there once
they have been gathered again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from dure.core.node import Ghost
from dure.core.shards import UNITS_AT_ONCE
from dure.errors import UsageError
from dure.partition.stage import Stage
from dure.partition.stage_module import Leaves

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dure.core.node import Operation
    from dure.job.gradient import Gradient, ShardedUnits
    from dure.job.gradient_engine import RandomState
    from dure.partition.layout import Held, StageLayout
    from dure.partition.orders import Action
    from dure.partition.stage_module import Passed

TIED = 0
"""The unit of the parameters that several chunks have. That of chunk k is k + 1."""


def units_of(layout: StageLayout, part: int) -> list[list[Held]]:
    """The parameters of each unit of a worker of a copy of the model: those of several chunks, then of each chunk."""
    chunks = [_numbers(layout, stage) for stage in layout.stages_of(part // layout.ways)]
    found: list[list[Held]] = [[] for _ in range(len(chunks) + 1)]
    for held in layout.held[part]:
        own = [chunk for chunk, numbers in enumerate(chunks) if held.number in numbers]
        found[TIED if len(own) > 1 else own[0] + 1].append(held)
    return found


def _numbers(layout: StageLayout, stage: int) -> set[int]:
    """The numbers of the layers of the whole model that a stage has."""
    numbers = {id(parameter): number for number, parameter in enumerate(layout.whole.parameters)}
    blocks = [layout.blocks[number] for number in layout.blocks_in(stage)]
    return {numbers[id(each)] for block in blocks for each in block.parameters() if id(each) in numbers}


@dataclass(slots=True)
class _Unit:
    """The parameters of a unit: the numbers of their layers at this worker, and where each begins in the unit.

    `tensors` are leaves over `memory`, which is as large as the unit while its parameters are there or on their way.
    """

    layers: list[int]
    starts: list[int]
    numel: int
    memory: Tensor | None = None
    tensors: dict[int, Tensor] = field(default_factory=dict)
    is_whole: bool = False
    is_compared: bool = False
    gather: Operation[Tensor] | None = None
    gradient: Tensor | None = None


class ShardedStage(Stage):
    """A `Stage` whose worker holds a shard of the parameters; those of a chunk are gathered before it is computed.

    The loss of a mini-batch is multiplied by `share`, that of the worker in the batch of all.
    """

    def __init__(self, layout: StageLayout, *args: Any, share: float, part: int, **options: Any) -> None:
        super().__init__(layout, *args, part=part, **options)
        self.share = share
        places = {each.number: place for place, each in enumerate(layout.held[part])}
        self._units: list[_Unit] = []
        for unit in units_of(layout, part):
            *starts, numel = accumulate((each.stop - each.start for each in unit), initial=0)
            self._units.append(_Unit([places[each.number] for each in unit], starts, numel))
        self._unit_of = {layer: unit for unit in self._units for layer in unit.layers}
        self._scatters: deque[tuple[int, Operation[Tensor]]] = deque()
        self._own: Tensor | None = None
        self._drawn: dict[int, RandomState] = {}

    @property
    def _shard(self) -> ShardedUnits:
        assert self.requester.shard is not None
        return cast("ShardedUnits", self.requester.shard)

    # ---- actions

    async def forward(self, action: Action) -> None:
        chunk, last = action.chunk, self.pipeline.chunks - 1
        await self._prepare(chunk, min(chunk + 1, last))
        await super().forward(action)
        if chunk < last:
            self._release(chunk + 1)

    async def backward(self, action: Action, **options: Any) -> None:
        chunk = action.chunk
        await self._prepare(chunk, max(chunk - 1, 0))
        await super().backward(action, **options)
        self._release(chunk + 1)
        await self._scatter(chunk + 1)

    async def _prepare(self, chunk: int, ahead: int) -> None:
        """Wait for the parameters of a chunk, and begin to gather those of the chunk `ahead`."""
        for number in (TIED, chunk + 1):
            self._begin_gather(number)
        self._begin_gather(ahead + 1)
        for number in (TIED, chunk + 1):
            gather, self._units[number].gather = self._units[number].gather, None
            if gather is not None:
                started = self.node.now()
                await gather
                self.meter.add("communicate", started, self.node.now(), "all_gather")

    def update(self, batch: int) -> Gradient:
        """The gradient of a mini-batch; its values are those of `part_of_mean`."""
        gradient = super().update(batch)
        gradient.loss /= self.share
        return gradient

    async def part_of_mean(self) -> Tensor:
        """Wait for the mean gradient of the own shard."""
        self._release(TIED)
        await self._scatter(TIED)
        while self._scatters:
            await self._end_scatter()
        self._summed.clear()
        own, self._own = self._own, None
        return self.requester.params if own is None else own

    # ---- parameters

    def _begin_gather(self, number: int) -> None:
        """Begin to gather the parameters of a unit, unless they are there or on their way."""
        unit = self._units[number]
        if not unit.is_whole and unit.layers:
            unit.is_whole = True
            unit.gather = self._shard.gather_unit(number, self._room(unit))

    def _room(self, unit: _Unit) -> Tensor:
        """The memory of the parameters of a unit, as large as they are."""
        params = self.requester.params
        if unit.memory is None or isinstance(params, Ghost):
            unit.memory = params.new_empty(unit.numel)
            if self.module is not None:
                unit.tensors = self._leaves_over(unit, unit.memory)
        else:
            unit.memory.untyped_storage().resize_(unit.memory.nbytes)
        return unit.memory

    def _leaves_over(self, unit: _Unit, memory: Tensor) -> dict[int, Tensor]:
        assert self.module is not None
        found = {}
        for number, start in zip(unit.layers, unit.starts, strict=True):
            layer = self.module.replica.layers[number]
            part = memory[start : start + layer.numel].view(layer.shape)
            found[number] = part.data.requires_grad_()  # `.data` has its own version counter
        return found

    def _release(self, number: int) -> None:
        """Free the memory of the parameters of a unit."""
        unit = self._units[number]
        if unit.is_whole and unit.tensors:
            self._check_unchanged(number, unit)
        unit.is_whole = False
        if unit.memory is not None and not isinstance(unit.memory, Ghost):
            unit.memory.untyped_storage().resize_(0)

    def _check_unchanged(self, number: int, unit: _Unit) -> None:
        """Raise `UsageError` if the model has changed parameters of a unit: the next gather would undo the change.

        Values are compared once: a change through `.data` leaves no other trace.
        """
        assert unit.memory is not None
        assert self.module is not None
        places = zip(unit.tensors.items(), unit.starts, strict=True)
        changed = [layer for (layer, each), start in places if each._version or not _is_over(each, unit.memory[start:])]
        if not changed and not unit.is_compared and not self._shard.is_as_gathered(number, unit.memory):
            changed = unit.layers
        unit.is_compared = True
        if changed:
            names = ", ".join(repr(self.module.replica.layers[layer].name) for layer in changed[:4])
            raise UsageError(
                f"the model changes parameters in its forward or backward (of {names}), and zero:stage=3 gathers them "
                "anew, without the change, for the next pass. Use zero:stage=2, or compute the changed values without "
                "an assignment, as with torch.nn.utils.parametrize."
            )

    def _draw(self, stage: int, action: Action) -> Sequence[int] | RandomState:
        """Draw as a whole model does: from the worker and the step, and on from chunk to chunk."""
        if self.shared is not None:  # ways draw numbers of their own between two layers, and together behind them
            return super()._draw(stage, action)
        if action.chunk == 0:
            return (self.batches.seed, self.batches.replica, action.batch)
        return self._drawn.get(action.chunk - 1, ())  # no state where no layer draws

    def _forward(self, action: Action, stage: int, passed: Passed | None) -> None:
        super()._forward(action, stage, passed)
        if self.module is not None and self.module.drawn is not None:
            self._drawn[action.chunk] = self.module.drawn

    def _leaves_of(self, action: Action, weights: Tensor) -> Leaves:
        unit = self._units[action.chunk + 1]
        return Leaves(weights, self._units[TIED].tensors | unit.tensors)

    def _place_weights(self, passed: Passed, weights: Tensor) -> None:
        """Do nothing: the parameters were gathered into the memory that the forward has read."""

    # ---- gradients

    def _scaled(self, share: float) -> float:
        return share * self.share

    def _add(self, batch: int, gradients: list[tuple[int, Tensor]]) -> None:
        """Add the gradients of layers to those of their units."""
        summed = self._summed.setdefault(batch, set())
        while gradients:  # each is freed once it is copied
            number, gradient = gradients.pop()
            unit = self._unit_of[number]
            start = unit.starts[unit.layers.index(number)]
            part = self._gradient(unit)[start : start + gradient.numel()].view(gradient.shape)
            if number in summed:
                part.add_(gradient)
            else:
                part.copy_(gradient)
                summed.add(number)

    def _gradient(self, unit: _Unit) -> Tensor:
        if unit.gradient is None:
            unit.gradient = self.requester.params.new_empty(unit.numel)
        return unit.gradient

    def _total(self, batch: int) -> Tensor:
        return self.requester.params

    async def _scatter(self, number: int) -> None:
        """Begin to sum the gradient of a unit over the workers, of which this one gets its part."""
        unit = self._units[number]
        if not unit.layers:
            return
        while len(self._scatters) >= UNITS_AT_ONCE:
            await self._end_scatter()
        gradient, unit.gradient = self._gradient(unit), None
        if self.module is not None:
            self._zero_unreached(unit, gradient)
        if self.shared is not None:
            held = [self.layout.held[self.part][layer] for layer in unit.layers]
            placed = zip(held, unit.starts, strict=True)
            moved = [each._replace(start=at, stop=at + each.stop - each.start) for each, at in placed if each.tied]
            await self.shared.sum_over_ways(gradient, moved)
        self._scatters.append((number, self._shard.scatter_unit(number, gradient)))

    def _zero_unreached(self, unit: _Unit, gradient: Tensor) -> None:
        """Set the gradient of layers that no sample has reached to zero: it is in uninitialized memory."""
        assert self.module is not None
        summed = set().union(*self._summed.values())
        for number, start in zip(unit.layers, unit.starts, strict=True):
            if number not in summed:
                gradient[start : start + self.module.replica.layers[number].numel].zero_()

    async def _end_scatter(self) -> None:
        """Wait for the first scatter under way, and keep the part of this worker."""
        number, scatter = self._scatters.popleft()
        started = self.node.now()
        part = await scatter
        self.meter.add("communicate", started, self.node.now(), "reduce_scatter")
        if isinstance(part, Ghost):
            return
        if self._own is None:
            self._own = torch.empty_like(self.requester.params)
        place = self._shard.place_of(number)
        self._own[place : place + part.numel()] = part


def _is_over(tensor: Tensor, memory: Tensor) -> bool:
    """Whether a tensor begins where `memory` does, with the same dtype."""
    return not tensor.numel() or (tensor.data_ptr(), tensor.dtype) == (memory.data_ptr(), memory.dtype)


def ranges_of(unit: Sequence[Held]) -> list[tuple[int, int]]:
    """The ranges of the worker's flat vector that a unit has."""
    return [(each.start, each.stop) for each in unit]
