"""The messages of one worker of a pipeline: outputs to the next stage, gradients of outputs to the stage before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dure.core.node import Ghost, Operation

if TYPE_CHECKING:
    from dure.core.meter import Meter
    from dure.core.node import Node
    from dure.partition.action import Action
    from dure.partition.layout import StageLayout

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
