"""Tensors that one worker of a pipeline receives and sends: mini-batches, outputs of stages, and gradients of outputs.

The first stage reads the inputs and the last stage the targets. Both draw from samplers that are equal, so targets do
not travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dure.core.node import Ghost, Operation
from dure.core.vectors import equal_ranges
from dure.job.data.dataset import mapped, moved

if TYPE_CHECKING:
    from dure.core.meter import Meter
    from dure.core.node import Node
    from dure.job.data.dataset import Batch
    from dure.job.data.split import BatchSampler
    from dure.job.job import Job
    from dure.partition.layout import StageLayout
    from dure.partition.orders import Action


class StageBatches:
    """Mini-batches of `batch_size` samples of pipeline `replica`, each divided into `micro_batches`.

    `flops` are the operations of the whole model for one mini-batch. With `sampler=None` (timing only) a mini-batch has
    a size but no data.
    """

    def __init__(
        self,
        job: Job,
        sampler: BatchSampler | None,
        *,
        replica: int,
        batch_size: int,
        micro_batches: int,
        seed: int,
        flops: float,
        device: str = "cpu",
    ) -> None:
        self.job = job
        self.sampler = sampler
        self.replica = replica
        self.batch_size = batch_size
        self.seed = seed
        self.flops = flops
        self._micro = equal_ranges(batch_size, micro_batches)
        self._device = torch.device(device)
        self._drawn: dict[int, torch.Tensor | tuple[Batch, Batch]] = {}
        self._next = 0

    def begin(self, batch: int) -> None:
        """Set the number of the mini-batch that the sampler draws next."""
        self._next = batch
        self._drawn.clear()

    def inputs(self, batch: int, micro: int) -> Batch:
        """The inputs of a micro-batch."""
        return self._slice(self._batch(batch)[0], micro)

    def targets(self, batch: int, micro: int) -> Batch:
        """The targets of a micro-batch."""
        return self._slice(self._batch(batch)[1], micro)

    def drop(self, batch: int) -> None:
        """Drop a mini-batch that is done. At a stage that has read none of it the sampler passes it over."""
        if self.sampler is not None:
            self._draw_to(batch)
            del self._drawn[batch]

    def state(self) -> dict[str, Any]:
        """The state of the sampler."""
        return {} if self.sampler is None else dict(self.sampler.state())

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        if self.sampler is not None:
            self.sampler.restore(dict(state))

    def _batch(self, batch: int) -> tuple[Batch, Batch]:
        self._draw_to(batch)
        found = self._drawn[batch]
        if isinstance(found, torch.Tensor):
            found = self.job.train.batch(found, (self.seed, 1 + self.replica, batch))
            if self._device.type != "cpu":
                found = moved(found[0], self._device), moved(found[1], self._device)
            self._drawn[batch] = found
        return found

    def _draw_to(self, batch: int) -> None:
        """Draw the samples of all mini-batches up to `batch`."""
        assert self.sampler is not None
        while self._next <= batch:
            self._drawn[self._next] = self.sampler.next()
            self._next += 1

    def _slice(self, whole: Batch, micro: int) -> Batch:
        start, stop = self._micro[micro]
        return mapped(lambda each: each[start:stop], whole)


class PortionBatches(StageBatches):
    """The samples of one portion at a time, of any number, that a coordinator has chosen.

    The number of the mini-batch is that of the draws of its random layers, so that any copy of the model computes the
    same gradient.
    """

    def __init__(self, job: Job, sampler: BatchSampler | None, **options: Any) -> None:
        super().__init__(job, sampler, **options | {"replica": -1})
        self._flops_of_one = self.flops / self.batch_size

    def give(self, batch: int, indices: torch.Tensor) -> None:
        """Set the samples of a mini-batch."""
        self.batch_size = len(indices)
        self.flops = self._flops_of_one * self.batch_size
        self._micro = equal_ranges(self.batch_size, len(self._micro))
        self._drawn = {batch: indices}

    def _draw_to(self, batch: int) -> None:
        """Do nothing: `give` sets the samples."""


TAGS = 1000
"""The first tag of messages between stages, above those of groups."""

TIES, NORM, WAYS, COPIES = range(4)
"""Numbers from `free_tag` on: of the exchanges at an update, and of collectives between workers that share layers."""


class StageMessages:
    """Sends and receives the tensors of borders for worker `rank` of a pipeline, whose workers are `peers` by rank.

    A message leaves when its receiver has asked for it. Two stages at one worker hand their tensors over without one.
    Without a `device` (timing only) messages have a size and no values.
    """

    def __init__(
        self,
        layout: StageLayout,
        node: Node,
        meter: Meter,
        *,
        rank: int,
        peers: Sequence[str],
        batch_size: int,
        device: torch.device | None,
    ) -> None:
        self.layout = layout
        self.node = node
        self.peers = peers
        self._meter = meter
        self._rank = rank
        self._batch_size = batch_size
        self._device = device
        self._expected: dict[tuple[str, int, int, int], list[Operation[Tensor]]] = {}
        self._handed: dict[tuple[str, int, int, int], Sequence[Tensor]] = {}
        self._sent: list[Operation[None]] = []

    def expect(self, action: Action) -> None:
        """Ask for the messages that an action needs."""
        stage = self.layout.pipeline.stage_of(self._rank, action.chunk)
        if action.kind == "F" and stage > 0:
            self._ask("F", stage - 1, stage - 1, action)
        elif action.kind in ("B", "I") and stage < self.layout.depth - 1:
            self._ask("B", stage, stage + 1, action)

    async def outputs_before(self, action: Action) -> Sequence[Tensor]:
        """The outputs of the stage before; none at the first stage."""
        return await self._received("F", self.layout.pipeline.stage_of(self._rank, action.chunk) - 1, action)

    async def gradients(self, action: Action) -> Sequence[Tensor]:
        """The gradients of a chunk's outputs, once the next stage has sent them; none at the last stage."""
        return await self._received("B", self.layout.pipeline.stage_of(self._rank, action.chunk), action)

    def send_outputs(self, action: Action, values: Sequence[Tensor]) -> None:
        """Send the outputs of a chunk to the next stage, if there is one."""
        stage = self.layout.pipeline.stage_of(self._rank, action.chunk)
        if stage < self.layout.depth - 1:
            self._send("F", stage, stage + 1, action, values)

    def send_gradients(self, action: Action, values: Sequence[Tensor]) -> None:
        """Send the gradients of a chunk's inputs to the stage before, if there is one."""
        stage = self.layout.pipeline.stage_of(self._rank, action.chunk)
        if stage > 0:
            self._send("B", stage - 1, stage - 1, action, values)

    async def settled(self) -> None:
        """Wait until the neighbors have received all messages."""
        for sent in self._sent:
            await sent
        self._sent.clear()

    def _crossing(self, kind: str, border: int, action: Action) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        """The dtype and shape of each tensor that crosses a border: outputs forward, and their gradients backward."""
        rows = self.layout.rows(self._batch_size, action.micro)
        specs = self.layout.border(border, rows).tensors
        return [(each.dtype, each.shape) for each in specs if kind == "F" or each.gradient]

    def _ask(self, kind: str, border: int, source: int, action: Action) -> None:
        peer, _ = self.layout.place_of(source)
        if peer == self._rank:
            return
        rooms = [self._room(dtype, shape) for dtype, shape in self._crossing(kind, border, action)]
        key, tag = (kind, border, action.batch, action.micro), _tag(kind, border)
        self._expected[key] = [self.node.recv(self.peers[peer], room, tag=tag) for room in rooms]

    def _room(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Any:
        if self._device is None:
            return Ghost(torch.Size(shape).numel(), dtype.itemsize)
        return torch.empty(shape, dtype=dtype, device=self._device)

    async def _received(self, kind: str, border: int, action: Action) -> Sequence[Tensor]:
        """The tensors of a border; none at the ends of the model."""
        if not 0 <= border < self.layout.depth - 1:
            return ()
        key = kind, border, action.batch, action.micro
        if key in self._handed:
            return self._handed.pop(key)
        started = self.node.now()
        found = [await operation for operation in self._expected.pop(key)]
        self._meter.add("wait", started, self.node.now(), str(action))
        return found

    def _send(self, kind: str, border: int, target: int, action: Action, values: Sequence[Tensor]) -> None:
        """Send the tensors of a border to the stage `target`."""
        peer, _ = self.layout.place_of(target)
        if self._device is None:
            values = [self._room(dtype, shape) for dtype, shape in self._crossing(kind, border, action)]
        if peer == self._rank:
            self._handed[kind, border, action.batch, action.micro] = values
            return
        self._sent = [sent for sent in self._sent if not sent.done]
        self._sent += [self.node.send(self.peers[peer], each, tag=_tag(kind, border)) for each in values]


def free_tag(layout: StageLayout) -> int:
    """The first tag above those of borders."""
    return TAGS + 2 * layout.depth


def _tag(kind: str, border: int) -> int:
    return TAGS + 2 * border + (kind == "B")
