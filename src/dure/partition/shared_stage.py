"""The computations of a stage whose layers several workers share: pieces of a pass, with collectives between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dure.core.node import Ghost, StepPortion, StepTime, nothing
from dure.partition.counts import StageCounts
from dure.partition.messages import WAYS, free_tag
from dure.partition.tensor.collectives import WayCollectives
from dure.partition.tensor.computation import PausingThread
from dure.partition.tensor.ways import CollectiveCall

if TYPE_CHECKING:
    from torch import Tensor

    from dure.core.meter import Meter
    from dure.core.node import Node
    from dure.partition.action import Action
    from dure.partition.block_times import PassShare
    from dure.partition.layout import Held, StageLayout
    from dure.partition.stage_module import StageModule
    from dure.partition.tensor.recording import PassCost, Piece


class PieceShare(NamedTuple):
    """A piece of a pass: its shares of the time of the model's forward and backward, and the collective behind it."""

    forward: float
    backward: float
    call: CollectiveCall | None


END = PieceShare(0.0, 0.0, None)


def piece_shares(cost: PassCost, forward: float, backward: float) -> list[PieceShare]:
    """The pieces of a forward, of a backward, or of both, that take these shares of the time of the model's.

    >>> from dure.partition.tensor.recording import PassCost, Piece
    >>> piece_shares(PassCost([Piece(10, None)], [Piece(30, None)], 0), 0.5, 0.25)
    [PieceShare(forward=0.5, backward=0.25, call=None)]
    """
    ahead = [PieceShare(share * forward, 0.0, call) for share, call in _shares(cost.forward)] if forward else []
    back = [PieceShare(0.0, share * backward, call) for share, call in _shares(cost.backward)] if backward else []
    if ahead and back:
        last, first = ahead.pop(), back.pop(0)
        back.insert(0, PieceShare(last.forward, first.backward, first.call))
    return ahead + back


def _shares(pieces: Sequence[Piece]) -> list[tuple[float, CollectiveCall | None]]:
    """The share of each piece in the operations of all; even ones where none are counted."""
    total = sum(piece.flops for piece in pieces)
    return [(piece.flops / total if total else 1 / len(pieces), piece.call) for piece in pieces]


class SharedStage:
    """Computes the passes of the stages of worker `part` of a copy of the model, on `node`; `holders` are its workers.

    `costs` gives the cost of the passes of a chunk for so many samples, by the kind of backward, which virtual time
    needs, and `kept` the bytes that a backward of it keeps. `module` is None in a timing-only run.
    """

    def __init__(
        self,
        layout: StageLayout,
        module: StageModule | None,
        node: Node,
        meter: Meter,
        *,
        part: int,
        holders: Sequence[str],
        costs: Callable[[int, int, str], PassCost] | None,
        kept: Callable[[int, int], int],
    ) -> None:
        self._layout = layout
        self._node = node
        self._meter = meter
        self._part = part
        self._costs = costs
        self._module = module
        self._buffers: Tensor | None = None
        self._thread = None if module is None else PausingThread(draws=module.draws)
        rank, way = divmod(part, layout.ways)
        peers = holders[rank * layout.ways : (rank + 1) * layout.ways]
        self._collectives = WayCollectives(node, meter, rank=way, peers=peers, tag=free_tag(layout) + WAYS)
        self.kept = kept
        self.counts = StageCounts()

    def pieces(
        self, action: Action, rows: int, forward: float, backward: float, shares: tuple[PassShare, PassShare]
    ) -> list[PieceShare]:
        """The pieces of an action that takes these shares of the time of the model's at all ways together.

        `shares` are those of the whole stage's forward and backward. Each way makes all calls.
        """
        if self._costs is None:
            return []
        cost = self._costs(action.chunk, rows, action.kind if action.kind in ("I", "W") else "B")
        fraction = self._layout.fraction(self._part, action.chunk, cost, rows)
        ahead, back = (each.split(fraction) for each in shares)
        return piece_shares(cost, forward * ahead, backward * back)

    async def sum_over_ways(self, gradient: Tensor, parameters: Sequence[Held]) -> None:
        """Replace the gradients of some parameters by their sums over the workers that share the layers, in place."""
        if not parameters:
            return
        numel = sum(each.stop - each.start for each in parameters)
        timed = isinstance(gradient, Ghost)
        own = (
            gradient.new_empty(numel) if timed else torch.cat([gradient[each.start : each.stop] for each in parameters])
        )
        call = CollectiveCall("all_reduce", [own], [torch.Size([numel])])
        total = await self._counted(call)
        if not timed:
            sizes = [each.stop - each.start for each in parameters]
            for each, part in zip(parameters, torch.split(total, sizes), strict=True):
                gradient[each.start : each.stop] = part

    async def compute(
        self,
        function: Callable[[], None],
        time: StepTime,
        pieces: Sequence[PieceShare],
        detail: str,
        place: Callable[[], None],
    ) -> None:
        """Compute `function` in pieces, which take their shares of the `time` of a mini-batch in virtual time.

        `place` sets the module to the state of this computation: in virtual time it serves several workers in turn.
        """
        answer: Any = function
        for number, share in enumerate(chain(pieces, repeat(END))):

            def piece(answer: Any = answer, begins: bool = number == 0) -> CollectiveCall | None:
                place()
                return self._continued(answer, begins)

            started = self._node.now()
            work = nothing if self._thread is None else piece
            call = await self._node.compute(StepPortion(work, time, share.forward, share.backward))
            self._meter.add("compute", started, self._node.now(), detail)
            call = share.call if self._thread is None else call
            if call is None:
                return
            answer = await self._counted(call)

    async def _counted(self, call: CollectiveCall) -> Any:
        self.counts.count_collective(call.kind, self._collectives.payload_nbytes(call))
        return await self._collectives.carried(call)

    def end(self) -> None:
        """Give up a computation that waits for a collective, and end its thread."""
        if self._thread is not None:
            self._thread.end()

    def _continued(self, answer: Any, begins: bool) -> CollectiveCall | None:
        module, thread = self._module, self._thread
        assert module is not None
        assert module.ways is not None
        assert thread is not None
        module.ways.carry_out = thread.carry_out
        if self._buffers is not None and not begins:
            module.use_buffers(self._buffers)
        call = thread.start(answer) if begins else thread.resume(answer)
        self._buffers = None if call is None else module.left_buffers()
        return call
