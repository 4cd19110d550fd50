"""Collectives between processes: those of the engine (`torch.distributed`), as operations of a node.

| class | use |
|---|---|
| `ProcessGroup` | the group of a method, as seen by one of its processes |
| `AloneGroup` | the same in a world of one process |
| `Engine` | the engine's process group of an attached training loop |
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dure.core.collective_cost import COLLECTIVES, Path
from dure.core.node import Operation
from dure.core.vectors import Range, gather, size
from dure.errors import PeerLost, UsageError
from dure.job.gradient import Gradient, GradientWork
from dure.job.overlap import Overlap
from dure.runtime.launch.engine_store import one_family, without_watchdog
from dure.runtime.process.scatter import Scatter, Scatters, gathering

if TYPE_CHECKING:
    from dure.core.shards import Shards
    from dure.runtime.launch.rendezvous import Rendezvous
    from dure.runtime.process.node import ProcessNode

TIMEOUT = timedelta(days=10)
"""Time limit of a collective that waits for a slow rank. A frozen or failed rank ends the wait earlier."""

LOOK = timedelta(seconds=1)
"""Time between two checks for frozen ranks while a rank waits."""

TURN = timedelta(milliseconds=20)
"""Longest time in which a process that waits for the engine handles no message, where one may end the wait."""

SHORTEST_PAUSE, LONGEST_PAUSE = 2e-5, 1e-3
"""Seconds between two questions to a device whether an operation has ended: at first, and after a long wait."""

DESTROY_SECONDS = 2.0
"""Time limit for the destruction of a process group after a failure."""


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
        self._own: torch.Tensor | None = None
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
        self._count("reduce_scatter", tensor)
        scatter = self._scatter(tensor)
        own = tensor.new_empty(scatter.own)
        return self._start("the others' reduce_scatter", scatter.works, lambda: scatter.sum_into(own), tensor)

    def gather(self, whole: torch.Tensor, held: Sequence[Sequence[Range]]) -> Operation[torch.Tensor]:
        self._count("all_gather", whole[: size(list(held[self._place]))])
        works = gathering(self._engine, self._place, whole, held)
        return self._start("the others' gather", works, lambda: whole, whole)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Operation[torch.Tensor]:
        self._count("broadcast", tensor)
        work = dist.broadcast(tensor, group=self._engine, group_src=self.ranks.index(root), async_op=True)
        return self._start("the root's broadcast", [work], lambda: tensor, tensor)

    def barrier(self) -> Operation[None]:
        met = torch.zeros(1, device="cpu")
        return self._start("the others at a barrier", [self._reduce(met)], lambda: None, met)

    def mean_gradient(self, work: GradientWork, share: float) -> Operation[Gradient]:
        return self._mean(work, share, None)

    def mean_part(self, work: GradientWork, share: float, shards: Shards) -> Operation[Gradient]:
        return self._mean(work, share, shards)

    def _mean(self, work: GradientWork, share: float, shards: Shards | None) -> Operation[Gradient]:
        """Compute the mean gradient; its slices are reduced during backward. Valid until the next call."""
        gradient_engine = self._node.gradient_engine
        assert gradient_engine is not None
        if self._overlap is None:
            if shards is not None and shards.frees_gradients:
                gradient_engine.replica.drop_gradients()
            self._overlap = Overlap(gradient_engine.replica, without={*gradient_engine.tables, *gradient_engine.whole})
        started, kind = self._node.now(), "all_reduce" if shards is None else "reduce_scatter"
        scatters = None if shards is None else self.scatters(shards, self._overlap.replica.params)
        self._overlap.replica.zero_grad()
        self._overlap.arm(self._reduce if scatters is None else scatters.begin)
        gradient = gradient_engine.backward(work, share)
        works = self._overlap.finish()
        computed = self._node.now()
        self._node.meter.add("compute", started, computed)
        reduced = self._overlap.slices[::-1]
        self._count(kind, gradient.values[: size(reduced)])

        def finish() -> Gradient:
            self._node.meter.add("communicate", computed, self._node.now(), kind)
            if scatters is not None:
                return gradient.part(scatters.parts(), keeps_local=gradient_engine.replica.keeps_gradients)
            return gradient if gradient.for_servers is None else gradient.with_values(gather(gradient.values, reduced))

        works = works if scatters is None else scatters.works
        return self._start("the group's mean gradient", works, finish, gradient.values)

    def scatters(self, shards: Shards, like: torch.Tensor) -> Scatters:
        """Reduce-scatters of a gradient's slices, the units of `shards`, for this member's part of their sum.

        The part has the dtype and the device of `like`, and is valid until the next call.
        """
        numel = shards.numels[self._place]
        if self._own is None or self._own.numel() != numel:
            self._own = like.new_empty(numel)
        return Scatters(self._scatter, self._wait_in_backward, self._own)

    def parts(self, scatters: Scatters, whole: torch.Tensor) -> Operation[torch.Tensor]:
        """This member's part of the sum, once all slices of a gradient as long as `whole` have begun."""
        self._count("reduce_scatter", whole)
        return self._start("the others' parts of a gradient", scatters.works, scatters.parts, whole)

    def _wait_in_backward(self, work: Any) -> None:
        """Wait for an operation of the engine outside of the loop. Raises `PeerLost`."""
        if self._own is not None and self._own.device.type != "cpu":
            work.wait(TIMEOUT)  # which orders the stream alone
            return
        try:
            while not _has_ended(work, LOOK):
                self._node.loop.check()
        except RuntimeError as error:
            raise lost_rank(self._node.name, "the others' part of a gradient", error) from error

    def _reduce(self, tensor: torch.Tensor) -> Any:
        return dist.all_reduce(tensor, group=self._engine, async_op=True)

    def _scatter(self, tensor: torch.Tensor) -> Scatter:
        return Scatter(self._engine, self._place, len(self.ranks), tensor)

    @property
    def _place(self) -> int:
        return self.ranks.index(self._node.rank)

    def _start(
        self, label: str, works: Sequence[Any], finish: Callable[[], Any], tensor: torch.Tensor
    ) -> Operation[Any]:
        in_loop = self._engine is not None or tensor.device.type != "cpu"
        return EngineOperation(self._node, label, works, finish, in_loop=in_loop)

    def _count(self, kind: str, tensor: torch.Tensor) -> None:
        """Count the bytes of the engine's ring algorithm; the engine reports none."""
        cost = COLLECTIVES[kind](tensor.numel(), len(self.ranks), Path(0.0, 0.0, 1.0), tensor.element_size())
        place = self._place
        self.bytes_sent += cost.sent[place]
        self.bytes_received += cost.received[place]
        self.messages += cost.messages[place]


class EngineOperation(Operation[Any]):
    """An operation of the engine in progress. `await` blocks in the engine, while the wire's helper thread runs.

    Afterwards other tasks and the wire run once: a role that only awaits the engine would otherwise never let them run.
    With `in_loop` the loop runs meanwhile, as other ranks may wait for a message of this one. It is set where tensors
    are on a device: messages on their way to pinned memory leave through the loop, and the stream that is current at
    the `await` waits for the results. It is set in a group of some ranks: the others ask for messages at any time.

    Where a message may end the wait, the loop runs now and then, and `check` raises `PeerLost`.
    """

    __slots__ = ("_check", "_finish", "_in_loop", "_node", "_works")

    def __init__(
        self,
        node: ProcessNode,
        label: str,
        works: Sequence[Any],
        finish: Callable[[], Any],
        *,
        in_loop: bool,
        check: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(node.loop, label)
        self._node = node
        self._works = works
        self._finish = finish
        self._in_loop = in_loop
        self._check = check

    def __await__(self) -> Generator[Operation[Any], None, Any]:
        if not self.done:
            try:
                if self._in_loop:
                    yield from self._wait_in_loop()
                elif self._check is not None:
                    yield from self._wait_in_turns(self._check)
                else:
                    self._block()
            except torch.AcceleratorError as error:  # the device reports a failed operation of this process
                self.fail(error)
            except RuntimeError as error:
                self.fail(lost_rank(self._node.name, self.label, error))
            except PeerLost as error:
                self.fail(error.with_traceback(None))  # whose frames would keep works, and so connections
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
        while not _has_ended(work, LOOK):
            self._node.loop.check()

    def _wait_in_turns(self, check: Callable[[], None]) -> Generator[Operation[Any], None, None]:
        """Block as `_block` does, and let the loop run once in `TURN`.

        To ask an operation from the loop, as `_wait_in_loop` does, would slow down short steps.
        """
        for work in self._works:
            check()
            while not self._has_ended_soon(work):
                yield from self._node.loop.yield_once().__await__()
                check()

    def _has_ended_soon(self, work: Any) -> bool:
        self._node.loop.waiting = True
        try:
            with self._node.wire.in_background():
                return _has_ended(work, TURN)
        finally:
            self._node.loop.waiting = False

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


def _has_ended(work: Any, limit: timedelta) -> bool:
    """Wait at most for `limit`; whether the operation has ended. Raises its error."""
    ended = work.is_completed()
    try:
        work.wait(limit)
    except RuntimeError:
        if ended:  # the error of the operation itself, not the end of `limit`
            raise
        return False
    return True


def lost_rank(name: str, label: str, error: RuntimeError) -> PeerLost:
    """The error of process `name`, which waited for `label` until the engine raised `error`."""
    message = re.sub(r"^\[\S*\] ", "", str(error))  # without the place in the engine's own source
    reason = re.split(r"\.?(?:\s*\n|\. |$)", message, maxsplit=1)[0]
    return PeerLost(
        f"{name} waited for {label}, and a rank is gone ({reason}). A collective needs every rank. "
        "Use a method over a parameter server (ps), or resume from the last checkpoint."
    )


class AloneGroup:
    """The `Group` of a process that trains alone; it sends nothing."""

    bytes_sent = bytes_received = messages = 0

    def __init__(self, node: ProcessNode) -> None:
        self.ranks: Sequence[int] = (node.rank,)
        self._node = node

    def all_reduce(self, tensor: torch.Tensor) -> Operation[torch.Tensor]:
        return self._done(tensor)

    def all_gather(self, tensor: torch.Tensor) -> Operation[list[torch.Tensor]]:
        return self._done([tensor.clone()])

    def reduce_scatter(self, tensor: torch.Tensor) -> Operation[torch.Tensor]:
        return self._done(tensor.clone())

    def gather(self, whole: torch.Tensor, held: Sequence[Sequence[Range]]) -> Operation[torch.Tensor]:
        return self._done(whole)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Operation[torch.Tensor]:
        return self._done(tensor)

    def barrier(self) -> Operation[None]:
        return self._done(None)

    def mean_part(self, work: Any, share: float, shards: Shards) -> Operation[Any]:
        return self.mean_gradient(work, share)

    def mean_gradient(self, work: Any, share: float) -> Operation[Any]:
        """Compute the gradient by `GradientEngine.backward`."""
        assert self._node.gradient_engine is not None
        self._node.gradient_engine.replica.zero_grad()
        return self._done(self._node.gradient_engine.backward(work, share))

    def _done(self, value: Any) -> Operation[Any]:
        operation: Operation[Any] = Operation(self._node.loop, "nobody")
        operation.resolve(value)
        return operation


class Engine:
    """The process groups of the ranks in `rendezvous`, separate from the user's own process group if there is one.

    Tensors on `device` travel by the device's backend, those of control by Gloo, whichever the user's group has.
    `group` is the `Group` of all ranks. `line` is that of this rank's line, where `lines` divide the ranks, and else
    `group`. `alone` is true in a world of one rank.
    """

    def __init__(
        self, node: ProcessNode, rendezvous: Rendezvous, device: torch.device, lines: Sequence[Sequence[int]] = ()
    ) -> None:
        self.alone = rendezvous.place.world_size == 1
        self.group: ProcessGroup | AloneGroup = AloneGroup(node)
        self.line: ProcessGroup | AloneGroup = self.group
        self._engine: dist.ProcessGroup | None = None
        self._engine_of_line: dist.ProcessGroup | None = None
        self._is_mine = False
        self._device = device
        self._connections: dict[int, str] = {}
        if self.alone:
            return
        world = range(rendezvous.place.world_size)
        given = dist.get_backend_config() if dist.is_initialized() else None
        backends = backends_of(device, rendezvous.exchange("device", place_of(device)), given)
        before = sockets()  # the difference is the engine's: those that `close` may break
        with one_family(), without_watchdog(device):
            if given is not None:
                self._engine = dist.new_group(timeout=TIMEOUT, backend=backends)
            else:
                store = dist.PrefixStore("engine", rendezvous.store)  # type: ignore[attr-defined]
                dist.init_process_group(backends, store=store, rank=node.rank, world_size=len(world), timeout=TIMEOUT)
                self._is_mine = True
            self.group = ProcessGroup(node, world, self._engine)
            self.line = self._line(node, lines, backends) if len(lines) > 1 else self.group
        self._connections = dict(sockets().items() - before.items())

    def _line(self, node: ProcessNode, lines: Sequence[Sequence[int]], backends: str) -> ProcessGroup:
        """Make the group of each line, as all ranks must; returns this rank's."""
        made = [dist.new_group(list(line), timeout=TIMEOUT, backend=backends) for line in lines]
        mine = next(number for number, line in enumerate(lines) if node.rank in line)
        self._engine_of_line = made[mine]
        return ProcessGroup(node, lines[mine], made[mine])

    def close(self, *, failed: bool = False) -> None:
        """Destroy the process group; an operation of another rank that needs this rank fails.

        After a failure (`failed`), an operation of the engine may wait for a frozen rank. The engine would wait for
        that operation, here or at the end of the process. Its connections are broken first, which ends the operation.
        Gloo misses that if the operation has just begun, so that the destruction has a time limit. Its errors are no
        news, and would hide the failure. A second call does nothing.
        """
        is_mine, engine, line = self._is_mine, self._engine, self._engine_of_line
        self._is_mine, self._engine, self._engine_of_line = False, None, None
        if not is_mine and engine is None:
            return
        engines = (
            [engine] if line is None or is_mine else [line, engine]
        )  # the default group is destroyed with all others
        if not failed:
            for each in engines:
                dist.destroy_process_group(each)
            return
        for each in engines:
            self._abort(each)
        break_connections(self._connections)
        self._connections = {}
        destroying = Thread(target=_destroy_quietly, args=(engines,), name="end of the engine", daemon=True)
        destroying.start()
        destroying.join(DESTROY_SECONDS)

    def _abort(self, engine: dist.ProcessGroup | None) -> None:
        """End the operations of the device's backend, if it can: NCCL has other ways than sockets between devices."""
        group = engine or dist.group.WORLD
        if self._device.type != "cpu" and group is not None:
            with suppress(RuntimeError):  # only NCCL can
                group._get_backend(self._device).abort()


def _destroy_quietly(engines: Sequence[dist.ProcessGroup | None]) -> None:
    for engine in engines:
        with suppress(RuntimeError):
            dist.destroy_process_group(engine)


def break_connections(connections: Mapping[int, str]) -> None:
    """End those of the `sockets` of a process that are still the same; this wakes the operations that wait in them."""
    for descriptor, _ in connections.items() & sockets().items():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # sockets that listen stay
                connection.shutdown(socket.SHUT_RDWR)


def sockets() -> dict[int, str]:
    """The sockets of this process, by descriptor; empty where the system has no /proc."""
    found = {}
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the descriptor of the folder itself, closed by now
                found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return {descriptor: link for descriptor, link in found.items() if link.startswith("socket:")}


def backends_of(device: torch.device, places: Sequence[str], given: str | None = None) -> str:
    """The argument `backend` of `init_process_group` for a rank on `device`; `places` are the `place_of` of all ranks.

    `given` is the backend, or the backends by device type, of a process group that exists. Its choice for the device is
    kept.

    >>> backends_of(torch.device("cpu"), ["cpu", "cpu"])
    'gloo'
    >>> backends_of(torch.device("cuda:0"), ["one/cuda:0", "two/cuda:0"])
    'cpu:gloo,cuda:nccl'
    >>> backends_of(torch.device("cuda:0"), ["one/cuda:0", "one/cuda:0"])
    'cpu:gloo,cuda:gloo'
    """
    types = sorted({place.rpartition("/")[2].partition(":")[0] for place in places})
    if len(types) > 1:
        raise UsageError(
            f"the ranks are on devices of different types, {' and '.join(types)}: collectives of the engine need one. "
            "Move all models to the same type of device."
        )
    if device.type == "cpu":
        return "gloo"
    chosen = _by_type(given).get(device.type) if given else None
    return f"cpu:gloo,{device.type}:{chosen or _default(device, places)}"


def place_of(device: torch.device) -> str:
    """The name of the physical device: two processes on one device have the same, also if each numbers its devices.

    A backend that tells no identifier of a device is taken to number them alike in all processes of a machine.
    """
    if device.type == "cpu":
        return "cpu"
    module = torch.get_device_module(device)
    index = device.index if device.index is not None else torch.accelerator.current_device_index()
    properties = module.get_device_properties(device) if hasattr(module, "get_device_properties") else None
    return f"{socket.gethostname()}/{device.type}:{getattr(properties, 'uuid', index)}"


def _by_type(given: str) -> dict[str, str]:
    """The backends of `get_backend_config`, as in `cpu:gloo,cuda:nccl`."""
    return dict(part.split(":", 1) for part in given.split(",") if ":" in part)


def _default(device: torch.device, places: Sequence[str]) -> str:
    try:
        backend = dist.get_default_backend_for_device(device)
    except ValueError as error:
        raise UsageError(
            f"PyTorch names no backend of collectives for {device.type}. Choose one before: "
            f'torch.distributed.init_process_group("cpu:gloo,{device.type}:<backend>").'
        ) from error
    # NCCL refuses two ranks on one device.
    return "gloo" if backend == "nccl" and len(set(places)) < len(places) else backend
