"""Collectives between processes: those of the engine (`torch.distributed`), as operations of a node."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dure.core.collective_cost import COLLECTIVES, Path
from dure.core.node import Operation
from dure.core.ranges import equal_ranges, gather, size
from dure.errors import PeerLost
from dure.job.gradient import Gradient, GradientWork
from dure.job.overlap import Overlap

if TYPE_CHECKING:
    from dure.runtime.process.node import ProcessNode

TIMEOUT = timedelta(days=10)
"""Time limit of a collective that waits for a slow rank. A frozen or failed rank ends the wait earlier."""

LOOK = timedelta(seconds=1)
"""Time between two checks for frozen ranks while a rank waits."""

SHORTEST_PAUSE, LONGEST_PAUSE = 2e-5, 1e-3
"""Seconds between two questions to a device whether an operation has ended: at first, and after a long wait."""


class EngineOperation(Operation[Any]):
    """An operation of the engine in progress. `await` blocks in the engine, while the wire's helper thread runs.

    Afterwards other tasks and the wire run once: a role that only awaits the engine would otherwise never let them run.
    With `in_loop` the loop runs meanwhile, as other ranks may wait for a message of this one. It is set where tensors
    are on a device: messages on their way to pinned memory leave through the loop, and the stream that is current at
    the `await` waits for the results. It is set in a group of some ranks: the others ask for messages at any time.
    """

    __slots__ = ("_finish", "_in_loop", "_node", "_works")

    def __init__(
        self, node: ProcessNode, label: str, works: Sequence[Any], finish: Callable[[], Any], *, in_loop: bool
    ) -> None:
        super().__init__(node.loop, label)
        self._node = node
        self._works = works
        self._finish = finish
        self._in_loop = in_loop

    def __await__(self) -> Generator[Operation[Any], None, Any]:
        if not self.done:
            try:
                if self._in_loop:
                    yield from self._wait_in_loop()
                else:
                    self._block()
            except torch.AcceleratorError as error:  # the device reports a failed operation of this process
                self.fail(error)
            except RuntimeError as error:
                self.fail(_lost(self._node.name, self.label, error))
            except PeerLost as error:
                self.fail(error)
            else:
                self.resolve(self._finish())
            self._works = ()  # finished works would keep the engine's connections open
            yield from self._node.loop.yield_once().__await__()
        return self.result()

    def _block(self) -> None:
        if not self._works:  # a group of one rank: no helper thread is woken for nothing
            return
        self._node.loop.waiting = True
        try:
            with self._node.wire.in_background():
                for work in self._works:
                    self._wait(work)
        finally:
            self._node.loop.waiting = False

    def _wait(self, work: Any) -> None:
        """Wait for an operation of the engine, and check once in `LOOK` whether a rank is frozen."""
        while True:
            ended = work.is_completed()
            try:
                work.wait(LOOK)
                return
            except RuntimeError:
                if ended:  # the error of the operation itself, not the end of `LOOK`
                    raise
            self._node.loop.check()

    def _wait_in_loop(self) -> Generator[Operation[Any], None, None]:
        """Ask again and again whether the operations have ended, then let the current stream wait for the results.

        A wait that ends by its time limit would not do: NCCL aborts the communicator then.
        """
        for work in self._works:
            pause = SHORTEST_PAUSE
            while not work.is_completed():
                yield from self._node.sleep(pause).__await__()
                pause = min(2 * pause, LONGEST_PAUSE)
            work.wait(LOOK)  # it has ended, so that this orders the stream alone


def _lost(name: str, label: str, error: RuntimeError) -> PeerLost:
    said = re.sub(r"^\[\S*\] ", "", str(error))  # without the place in the engine's own source
    reason = re.split(r"\.?(?:\s*\n|\. |$)", said, maxsplit=1)[0]
    return PeerLost(
        f"{name} waited for {label}, and a rank is gone ({reason}). "
        "Collectives need every rank: "
        "use a method over a parameter server (ps), or resume from the last checkpoint."
    )


class ProcessGroup:
    """A group of processes, as seen by one member; `engine` is that of some ranks, or None for all.

    Tensors on a device travel by the device's backend of `engine`, tensors on the CPU by Gloo. Control (barriers,
    agreement, statistics) is on the CPU, so that no step copies it to the device and back.
    """

    def __init__(self, node: ProcessNode, ranks: Sequence[int], engine: dist.ProcessGroup | None) -> None:
        self.ranks = tuple(ranks)
        self._node = node
        self._engine = engine
        self._overlap: Overlap | None = None
        self.bytes_sent = 0
        self.bytes_received = 0
        self.messages = 0

    def all_reduce(self, tensor: torch.Tensor) -> Operation[torch.Tensor]:
        self._count("all_reduce", tensor)
        works = [self._reduce(tensor)] if len(self.ranks) > 1 else []
        return self._start("the others' all_reduce", works, lambda: tensor, tensor)

    def all_gather(self, tensor: torch.Tensor) -> Operation[list[torch.Tensor]]:
        self._count("all_gather", tensor)
        parts = [torch.empty_like(tensor) for _ in self.ranks]
        work = dist.all_gather(parts, tensor, group=self._engine, async_op=True)
        return self._start("the others' all_gather", [work], lambda: parts, tensor)

    def reduce_scatter(self, tensor: torch.Tensor) -> Operation[torch.Tensor]:
        """Reduce by an all_reduce: the engine's CPU backend has no reduce_scatter for slices of unequal sizes."""
        self._count("all_reduce", tensor)
        total = tensor.clone()
        start, stop = equal_ranges(tensor.numel(), len(self.ranks))[self.ranks.index(self._node.rank)]
        return self._start(
            "the others' reduce_scatter", [self._reduce(total)], lambda: total[start:stop].clone(), total
        )

    def broadcast(self, tensor: torch.Tensor, root: int) -> Operation[torch.Tensor]:
        self._count("broadcast", tensor)
        work = dist.broadcast(tensor, src=root, group=self._engine, async_op=True)
        return self._start("the root's broadcast", [work], lambda: tensor, tensor)

    def barrier(self) -> Operation[None]:
        met = torch.zeros(1, device="cpu")
        return self._start("the others at a barrier", [self._reduce(met)], lambda: None, met)

    def mean_gradient(self, work: GradientWork, share: float) -> Operation[Gradient]:
        """Compute the mean gradient; its slices are all-reduced during backward. Valid until the next call."""
        gradient_engine = self._node.gradient_engine
        assert gradient_engine is not None
        if self._overlap is None:
            self._overlap = Overlap(gradient_engine.replica, without={*gradient_engine.tables, *gradient_engine.whole})
        started = self._node.now()
        self._overlap.replica.zero_grad()
        self._overlap.arm(self._reduce)
        gradient = gradient_engine.backward(work, share)
        works = self._overlap.finish()
        computed = self._node.now()
        self._node.meter.add("compute", started, computed)
        reduced = self._overlap.slices[::-1]
        self._count("all_reduce", gradient.values[: size(reduced)])

        def finish() -> Gradient:
            self._node.meter.add("communicate", computed, self._node.now(), "all_reduce")
            return gradient if gradient.for_servers is None else gradient.with_values(gather(gradient.values, reduced))

        return self._start("the group's mean gradient", works, finish, gradient.values)

    def _reduce(self, tensor: torch.Tensor) -> Any:
        return dist.all_reduce(tensor, group=self._engine, async_op=True)

    def _start(
        self, label: str, works: Sequence[Any], finish: Callable[[], Any], tensor: torch.Tensor
    ) -> EngineOperation:
        in_loop = self._engine is not None or tensor.device.type != "cpu"
        return EngineOperation(self._node, label, works, finish, in_loop=in_loop)

    def _count(self, kind: str, tensor: torch.Tensor) -> None:
        """Count the bytes of the engine's ring algorithm; the engine reports none."""
        cost = COLLECTIVES[kind](tensor.numel(), len(self.ranks), Path(0.0, 0.0, 1.0), tensor.element_size())
        place = self.ranks.index(self._node.rank)
        self.bytes_sent += cost.sent[place]
        self.bytes_received += cost.received[place]
        self.messages += cost.messages[place]
