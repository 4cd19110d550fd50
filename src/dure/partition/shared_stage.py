"""The computations of a stage whose layers several workers share: pieces of a pass, with collectives between them.

The collectives are written from messages:

| collective       | messages of a worker to each other          | elements sent, of n in the whole   |
|------------------|---------------------------------------------|------------------------------------|
| `all_gather`     | its tensor                                  | (W - 1) n / W                      |
| `reduce_scatter` | the other's slice                           | (W - 1) n / W                      |
| `all_reduce`     | the two above; for W = 2 its whole tensor   | 2 (W - 1) n / W                    |
| `exchange`       | the other's tensor                          |                                    |

Sums are in the order of ranks. Each slice is summed by one worker, so that all get the same bits. Where the node says
so (`Node.engine_inside`, accelerators in virtual time), they go by the engine of a group, but for `exchange` and for
slices of unequal sizes.

Forwards and backwards of split layers need other workers in the middle of them, and autograd cannot be suspended. So
the code runs in a thread. At a collective the thread hands the call to the loop and waits; `resume` lets it go on.
One of the two threads runs at a time, so the order of all operations is that of the loop.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dure.core.deployment import rank_of_worker
from dure.core.node import Ghost, StepPortion, StepTime, nothing
from dure.core.vectors import equal_ranges
from dure.partition.messages import WAYS, free_tag
from dure.partition.stage_state import StageCounts
from dure.partition.tensor.ways import CollectiveCall

if TYPE_CHECKING:
    from dure.core.meter import Meter
    from dure.core.node import Group, Node
    from dure.partition.layout import Held, StageLayout
    from dure.partition.orders import Action
    from dure.partition.stage_module import StageModule
    from dure.partition.tensor.ways import Activations, PassCost, Piece


class WayCollectives:
    """Carries out collectives for `rank` of the workers `peers`, on `node`, in messages with `tag`."""

    def __init__(self, node: Node, meter: Meter, *, rank: int, peers: Sequence[str], tag: int) -> None:
        self._node = node
        self._meter = meter
        self._rank = rank
        self._peers = peers
        self._tag = tag
        ranks = [number for peer in peers if (number := rank_of_worker(peer)) is not None]
        self._group = node.group(ranks) if node.engine_inside and len(peers) > 1 else None

    async def carried(self, call: CollectiveCall) -> Any:
        """The result of a collective."""
        started = self._node.now()
        result = await self._result(call)
        self._meter.add("communicate", started, self._node.now(), call.kind)
        return result

    def payload_nbytes(self, call: CollectiveCall) -> int:
        """The bytes of the whole tensor of a collective; of an exchange, those that this worker sends."""
        if call.kind == "exchange":
            return sum(each.nbytes for rank, each in enumerate(call.sends) if rank != self._rank)
        if call.kind == "all_gather":
            return call.sends[0].element_size() * sum(shape.numel() for shape in call.receives)
        return sum(each.nbytes for each in call.sends)

    async def _result(self, call: CollectiveCall) -> Any:
        sends, receives = call.sends, call.receives
        if self._group is not None and call.kind != "exchange" and len({each.numel() for each in sends}) == 1:
            return await self._by_engine(self._group, call)
        if call.kind == "all_reduce":
            return (await self._all_reduce(sends[0])).view(receives[0])
        if call.kind == "all_gather":
            return await self._exchange([sends[0]] * len(self._peers), receives)
        found = await self._exchange(sends, receives if call.kind == "exchange" else [receives[0]] * len(self._peers))
        return found if call.kind == "exchange" else total(found)

    async def _by_engine(self, group: Group, call: CollectiveCall) -> Any:
        sends, shape = call.sends, call.receives[0]
        if call.kind == "all_reduce":
            return (await group.all_reduce(sends[0].view(-1).clone())).view(shape)
        if call.kind == "all_gather":
            return await group.all_gather(sends[0])
        return (await group.reduce_scatter(joined([each.view(-1) for each in sends]))).view(shape)

    async def _all_reduce(self, tensor: Tensor) -> Tensor:
        workers, numel = len(self._peers), tensor.numel()
        flat = tensor.view(-1)
        if workers == 2:
            return total(await self._exchange([flat] * 2, [torch.Size([numel])] * 2))
        slices = [flat[start:stop] for start, stop in equal_ranges(numel, workers)]
        sizes = [torch.Size([each.numel()]) for each in slices]
        own = total(await self._exchange(slices, [sizes[self._rank]] * workers))
        return joined(await self._exchange([own] * workers, sizes))

    async def _exchange(self, sends: Sequence[Tensor], shapes: Sequence[torch.Size]) -> list[Tensor]:
        """Send a tensor to each worker, and receive one of these shapes from each. An empty one needs no message."""
        others = [rank for rank in range(len(self._peers)) if rank != self._rank]
        receiving = {
            rank: self._node.recv(self._peers[rank], _room(sends[rank], shapes[rank]), tag=self._tag)
            for rank in others
            if shapes[rank].numel()
        }
        sending = [
            self._node.send(self._peers[rank], sends[rank], tag=self._tag) for rank in others if sends[rank].numel()
        ]
        found = [
            await receiving[rank]
            if rank in receiving
            else sends[rank].view(shapes[rank])
            if rank == self._rank
            else _room(sends[rank], shapes[rank])
            for rank in range(len(self._peers))
        ]
        for operation in sending:
            await operation
        return found


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The parts of a flat tensor, one after another."""
    if isinstance(parts[0], Ghost):
        return parts[0].new_empty(sum(each.numel() for each in parts))
    return torch.cat(list(parts))


def _room(like: Tensor, shape: torch.Size) -> Tensor:
    """Memory for a tensor of `shape`; a ghost knows the number of elements only."""
    return like.new_empty(shape.numel()) if isinstance(like, Ghost) else like.new_empty(shape)


def total(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of tensors, in their order; a new tensor."""
    result = tensors[0].clone()
    for each in tensors[1:]:
        result += each
    return result


class Ended(BaseException):
    """The run has ended: raised in a computation that waits for a collective."""


class PausingThread:
    """A thread that computes one function at a time. `carry_out` pauses it; it is called in the thread.

    The thread runs from the first function to `end`, or until this object is freed.
    `draws`: the functions use PyTorch's random generator, whose state is kept for each function while it pauses.
    """

    def __init__(self, *, draws: bool = False) -> None:
        self._draws = draws
        self._state: torch.Tensor | None = None
        self._paused = False
        self._channel = _Channel()
        self._finalizer: weakref.finalize[..., PausingThread] | None = None

    def _begin(self) -> None:
        self._channel = _Channel()
        thread = Thread(target=_serve, args=(self._channel,), name="split computation", daemon=True)
        thread.start()
        self._finalizer = weakref.finalize(self, _end, self._channel, thread)

    def start(self, function: Callable[[], None]) -> CollectiveCall | None:
        """Run a function to its first collective, or to its end (None). Raises its error.

        A function that was left at a collective is given up.
        """
        self._state = None
        if self._paused:
            self.end()
        if self._finalizer is None:
            self._begin()
        return self._go(function)

    def end(self) -> None:
        """End the thread; a function that was left at a collective is given up. `start` begins another."""
        if self._finalizer is not None:
            self._finalizer()
        self._finalizer, self._paused = None, False

    def resume(self, answer: Any) -> CollectiveCall | None:
        """Continue behind a collective, whose result is `answer`."""
        return self._go(answer)

    def carry_out(self, call: CollectiveCall) -> Any:
        """Pause the thread until the loop has the result of a collective."""
        return self._channel.pause(call)

    def _go(self, value: Any) -> CollectiveCall | None:
        self._paused = False
        call = self._drawing(value) if self._draws else self._channel.handed(value)
        self._paused = call is not None
        return call

    def _drawing(self, value: Any) -> CollectiveCall | None:
        before = torch.get_rng_state()
        if self._state is not None:
            torch.set_rng_state(self._state)
        try:
            return self._channel.handed(value)
        finally:
            self._state = torch.get_rng_state()
            torch.set_rng_state(before)


class _Channel:
    """The two ends between the loop and the thread; each waits while the other runs."""

    def __init__(self) -> None:
        self.to_thread: SimpleQueue[Any] = SimpleQueue()
        self.to_loop: SimpleQueue[tuple[CollectiveCall | None, BaseException | None]] = SimpleQueue()

    def handed(self, value: Any) -> CollectiveCall | None:
        self.to_thread.put(value)
        call, error = self.to_loop.get()
        if error is not None:
            raise error
        return call

    def pause(self, call: CollectiveCall) -> Any:
        self.to_loop.put((call, None))
        answer = self.to_thread.get()
        if isinstance(answer, Ended):
            raise answer
        return answer


def _serve(channel: _Channel) -> None:
    """Compute functions until the run ends."""
    torch.autograd.set_multithreading_enabled(False)  # a backward on a device calls operators in this thread too
    while True:
        function = channel.to_thread.get()
        if isinstance(function, Ended):
            return
        error: BaseException | None = None
        try:
            function()
        except Ended:
            return
        except BaseException as raised:  # noqa: BLE001  (the loop raises it)
            error = raised
        # No reference while the thread waits: a function refers to its stage, and so to the object that ends the thread
        # when it is freed.
        del function
        channel.to_loop.put((None, error))
        del error


def _end(channel: _Channel, thread: Thread) -> None:
    """Unwind the thread: the interpreter may not end while it is inside of autograd."""
    channel.to_thread.put(Ended())
    thread.join(5.0)


class PieceShare(NamedTuple):
    """A piece of a pass: its shares of the time of the model's forward and backward, and the collective behind it."""

    forward: float
    backward: float
    call: CollectiveCall | None


END = PieceShare(0.0, 0.0, None)


def piece_shares(cost: PassCost, forward: float, backward: float) -> list[PieceShare]:
    """The pieces of a forward, of a backward, or of both, that take these shares of the time of the model's.

    >>> from dure.partition.tensor.ways import Activations, PassCost, Piece
    >>> piece_shares(PassCost([Piece(10, None)], [Piece(30, None)], Activations(0, [])), 0.5, 0.25)
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
    needs, and `kept` what autograd keeps for a backward of it. `module` is None in a timing-only run.
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
        kept: Callable[[int, int], Activations],
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

    def pieces(self, action: Action, rows: int, batch: int, forward: float, backward: float) -> list[PieceShare]:
        """The pieces of an action of `rows` samples of a mini-batch of `batch`.

        Without a split it would take the shares `forward` and `backward` of the time of the model's.
        """
        if self._costs is None:
            return []
        cost = self._costs(action.chunk, rows, action.kind if action.kind in ("I", "W") else "B")
        ahead, back = self._layout.factors(self._part, action.chunk, cost, rows, batch)
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
