"""Virtual time: one process runs every node. Gradients are real, seconds are modelled.

The kernel calls callbacks in the order of their virtual times; the loop of `core.node` resumes coroutines. Durations
of computations come from the cluster's distributions, those of messages from its network model. A gradient is
evaluated when its value is first needed, in one batch with all gradients that have started meanwhile.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from itertools import count
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dure.core.cost import CodecCost
from dure.core.meter import Meter
from dure.core.node import (
    Address,
    Apply,
    Call,
    CodecWork,
    Fields,
    Ghost,
    Operation,
    Reply,
    Service,
    StepPortion,
    Task,
    TimedWork,
    Work,
    nothing,
)
from dure.core.step_shape import StepShape
from dure.errors import PeerLost, RemoteError
from dure.job.gradient import GradientWork
from dure.runtime.virtual.group import VirtualGroup
from dure.runtime.virtual.kernel import Kernel
from dure.runtime.virtual.server_software import CompletedVariable, ServerSoftware

if TYPE_CHECKING:
    import torch

    from dure.job.gradient_engine import GradientEngine
    from dure.runtime.virtual.cluster import Cluster
    from dure.runtime.virtual.compute import Durations
    from dure.runtime.virtual.network import Network, Pair

T = TypeVar("T")

FEW_TASKS = 8
"""Tasks that a node keeps before it drops the finished ones; a large number would cost memory on many nodes."""


class Computation(Operation[Any]):
    """A computation in progress on a node; a pause or a slow-down moves its `finish` (seconds)."""

    __slots__ = ("demand", "evaluated", "finish", "node", "timer", "value", "work")

    def __init__(self, node: VirtualNode, work: Work, begin: float, seconds: float) -> None:
        Operation.__init__(self, node.kernel, "its computation")
        self.node = node
        self.work = work
        self.finish = begin + seconds
        self.evaluated = False
        self.value: Any = None
        # On a shared host the cores decide when the computation ends; else its end is known now, and a timer waits for
        # it.
        self.demand = None if node.process is None else node.process.run(seconds, self.due)
        self.timer = node.kernel.timer(self.finish, self.due) if node.process is None else None

    def move(self, finish: float) -> None:
        """Set another time of the finish."""
        kernel = self.node.runtime.kernel
        assert self.timer is not None
        kernel.void(self.timer)
        self.finish = finish
        self.timer = kernel.timer(finish, self.due)

    def abandon(self) -> None:
        """Drop the computation after a crash of its node or a cancellation."""
        # Out of the batch as well: nobody needs the gradient any more.
        self.node.runtime.pending.pop(self, None)
        if self.timer is not None:
            self.node.runtime.kernel.void(self.timer)
            self.timer = None
        elif self.node.process is not None and self.demand is not None:
            self.node.process.drop(self.demand)

    def due(self) -> None:
        """Resolve the operation; the kernel calls this at the finish."""
        self.timer = None  # breaks a reference cycle, so that the memory is free at once
        self.node.running.pop(self, None)
        work = self.work
        if isinstance(work, GradientWork):
            self.resolve(self.node.runtime.value_of(self))
        else:
            self.resolve(self.value if self.evaluated else work.run())

    def cancel(self) -> None:
        if not self.done:
            self.node.running.pop(self, None)
            self.abandon()
        super().cancel()


def _samples_of(work: Work) -> int:
    """The samples that must be loaded before `work` starts: those of a mini-batch that begins."""
    if isinstance(work, StepPortion):
        return work.step.samples if work.step.seconds is None else 0
    return work.samples if isinstance(work, GradientWork) else 0


class VirtualNode:
    """The `Node` of virtual time: one machine of the cluster, for the roles and services on it.

    `payload_sent` and `payload_received` count bytes of tensors without headers, as a real run does.
    """

    def __init__(self, runtime: VirtualRuntime, name: str, rank: int) -> None:
        self.runtime = runtime
        self.kernel = runtime.kernel
        self.name = name
        self.rank = rank
        self.routes: dict[str, Pair] = {}  # connections to nodes that this one has sent to
        self.network = runtime.network
        self.carry = runtime.carry
        processes = runtime.network.processes  # if the cluster is one host
        self.process = None if processes is None else processes[runtime.network.node(name)]
        self.calls: dict[RemoteCall, int] = {}  # calls in progress from this node, and their numbers
        self.meter = Meter(name, [] if runtime.trace else None)
        self.services: dict[str, Service] = {}
        self.running: dict[Computation, None] = {}
        self.tasks: list[Task[Any]] = []
        self._most_tasks = FEW_TASKS
        self.alive = True
        self.incarnation = 0
        self.paused_until = 0.0
        self.loading = 0.0  # seconds in which the machine loads a sample
        self.loaded = -math.inf  # time at which the last gradient began: its successor's data are loaded from then on
        self.slowness = 1.0
        self.payload_sent = 0
        self.payload_received = 0

    @cached_property
    def rng(self) -> np.random.Generator:
        return np.random.default_rng([self.runtime.seed, self.rank, 7])

    # ---- the primitives

    def compute(self, work: Work) -> Operation[Any]:
        runtime = self.runtime
        begin = self.kernel.now
        if begin < self.paused_until:
            begin = self.paused_until
        if self.loading and (samples := _samples_of(work)):
            begin = self.loaded = max(begin, self.loaded + samples * self.loading)
        operation = Computation(self, work, begin, runtime.seconds_of(self, work))
        if runtime.software is not None and isinstance(work, GradientWork):
            runtime.software.begin(runtime.network.node(self.name), begin, operation.finish - begin)
        # A portion reads weights and activations that may change before its virtual end: its value is that of now.
        if isinstance(work, StepPortion):
            operation.value, operation.evaluated = work.run(), True
        # The value of a gradient is first needed at its virtual end: it is evaluated late, together with others.
        elif runtime.gradient_engine is not None and isinstance(work, GradientWork):
            runtime.pending[operation] = None
        self.running[operation] = None
        return operation

    def call(
        self,
        service: Address,
        method: str,
        *tensors: torch.Tensor,
        into: Sequence[torch.Tensor] | None = (),
        at_most: bool = False,
        timeout: float | None = None,
        **fields: Any,
    ) -> Operation[Reply]:
        return RemoteCall(self, service, method, fields, tensors, into)

    @property
    def engine_inside(self) -> bool:
        return self.runtime.cluster.accelerated

    def borrows(self, peer: str, nbytes: int) -> bool:
        return True

    def reaches(self, peer: str) -> bool:
        return True

    def overlapped(self, *values: torch.Tensor) -> AbstractContextManager[None]:
        return nullcontext()

    def send(self, peer: str, tensor: torch.Tensor, *, tag: int = 0) -> Operation[None]:
        return self.runtime.mail(self.name, peer, tag).send(tensor)

    def recv(self, peer: str, into: torch.Tensor, *, tag: int = 0) -> Operation[torch.Tensor]:
        return self.runtime.mail(peer, self.name, tag).recv(into)

    def group(self, ranks: Sequence[int]) -> VirtualGroup:
        return VirtualGroup(self, ranks)

    def first(self, *operations: Operation[Any], timeout: float | None = None) -> Operation[Operation[Any] | None]:
        kernel = self.runtime.kernel
        winner: Operation[Any] = Operation(kernel, " or ".join(o.label for o in operations))
        winner.resolve_with_first(operations)
        if timeout is not None:
            timer = kernel.timer(kernel.now + timeout, winner.resolve)
            winner.when_done(lambda: None if winner.result() is None else kernel.void(timer))
        return winner

    def spawn(self, coroutine: Coroutine[Operation[Any], None, T], name: str = "") -> Task[T]:
        task = self.runtime.kernel.spawn(coroutine, name or self.name)
        tasks = self.tasks
        tasks.append(task)
        if len(tasks) > self._most_tasks:
            self.tasks = [s for s in tasks if not s.done]
            self._most_tasks = FEW_TASKS + 2 * len(self.tasks)
        return task

    def sleep(self, seconds: float, *, background: bool = False) -> Operation[None]:
        kernel = self.runtime.kernel
        operation: Operation[None] = Operation(kernel, f"{seconds:g} s to pass")
        if self.process is not None and not seconds:
            self.process.run(0.0, operation.resolve, last=True)  # all waiting demands run first
            return operation
        (kernel.external_event if background else kernel.at)(kernel.now + seconds, operation.resolve)
        return operation

    def now(self) -> float:
        return self.kernel.now

    def promise(self, label: str) -> Operation[Any]:
        return Operation(self.kernel, label)

    def serve(self, name: str, service: Service) -> Address:
        self.services[name] = service
        return Address(self.name, name)

    def room_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.new_empty(tensor.shape)

    def post(self, peer: VirtualNode, nbytes: int, header: int, deliver: Callable[[], None]) -> None:
        """Send tensors of `nbytes` bytes to `peer`; `deliver` is called on arrival."""
        self.payload_sent += nbytes
        self.runtime.network.send(self.name, peer.name, nbytes, deliver, header)

    def route(self, peer: VirtualNode) -> Pair:
        """Look up the connection to `peer`, and keep it for the next message."""
        route = self.routes[peer.name] = self.runtime.network.route(self.name, peer.name)
        return route

    # ---- events of the cluster

    def crash(self) -> None:
        """Crash: tasks end at once, messages in progress are lost."""
        self.alive = False
        self.runtime.network.drop(self.name)
        for computation in self.running:
            computation.abandon()
            # Without `resolve`: the tasks that wait for it are killed below, and must not be resumed by a dead node.
            computation.done = True
        self.running.clear()
        for task in self.tasks:
            if not task.done:
                task.kill()

    def revive(self) -> None:
        """Start a new incarnation, without tasks, pause or slow-down of the one before."""
        self.alive = True
        self.incarnation += 1
        self.paused_until = 0.0
        self.slowness = 1.0
        self.tasks.clear()

    def pause(self, seconds: float) -> None:
        """Pause for `seconds`: computations in progress and answers are delayed by that time."""
        now = self.runtime.kernel.now
        # Overlapping pauses: only what the new one adds is added to the computations.
        before = max(now, self.paused_until)
        self.paused_until = max(before, now + seconds)
        if self.process is not None:
            self.process.pause()
            self.kernel.at(self.paused_until, self._go_on)
            return
        for computation in self.running:
            computation.move(computation.finish + self.paused_until - before)

    def _go_on(self) -> None:
        if self.process is not None and not self.is_paused():
            self.process.go_on()

    def slow_down(self, factor: float) -> None:
        """Make every computation take `factor` times as long as by the cluster's model, from now on."""
        begin = max(self.runtime.kernel.now, self.paused_until)
        change = factor / self.slowness
        self.slowness = factor
        for computation in self.running:
            if computation.demand is None:
                computation.move(begin + (computation.finish - begin) * change)
            elif self.process is not None:
                self.process.stretch(computation.demand, change)

    def is_paused(self) -> bool:
        return self.paused_until > self.runtime.kernel.now

    def when_awake(self, callback: Callable[[], None]) -> None:
        """Call `callback` now, or at the end of the pause."""
        kernel = self.runtime.kernel
        if kernel.now < self.paused_until:
            kernel.at(self.paused_until, callback)
        else:
            callback()


class RemoteCall(Operation[Reply]):
    """A call of a service: request, handling, and reply. A call of the caller's own node needs no message.

    It is also the `Message` that the network carries, first as the request and then as the reply: of one object for
    each call under way a large run has few enough to be fast.
    """

    __slots__ = ("_fields", "_into", "_method", "_reply", "_service", "_target", "_tensors", "life", "nbytes", "pair",
                 "source", "wire")  # fmt: skip

    pair: Pair
    wire: int
    life: int

    def __init__(
        self,
        source: VirtualNode,
        service: Address,
        method: str,
        fields: Fields,
        tensors: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor] | None,
    ) -> None:
        self.loop = source.kernel  # inlined `Operation.__init__`, to save a call
        self.done = False
        self.on_cancel = self._error = self._waiters = self._value = None
        self.source = source
        self._service = service.service
        self._method = method
        self._fields: Fields | None = fields  # None once the request has been handled
        self._tensors = tensors
        self._into = into
        self.nbytes = 0
        self._target = target = source.runtime.nodes[service.node]
        if not target.alive:
            source.kernel.at(source.kernel.now + source.runtime.detection, self._lost)
        elif target is source:
            self._handle(fields)
        else:
            source.calls[self] = next(source.runtime.numbers)
            self.pair = source.routes.get(target.name) or source.route(target)
            self._send(source, fields, tensors)

    def _send(self, sender: VirtualNode, fields: Fields, tensors: Sequence[torch.Tensor]) -> None:
        """Send the request or the reply over `pair`."""
        runtime = sender.runtime
        self.wire = runtime.header + runtime.field * len(fields)
        if tensors:
            nbytes = self.nbytes = _weight(tensors)
            sender.payload_sent += nbytes
            self.wire += nbytes
        sender.carry(self)

    @property
    def label(self) -> str:
        return f"{self._method} of {self._service} at {self._target.name}"

    def arrive(self) -> None:
        """Receive the request or the reply."""
        if not self.source.network.received(self):
            return
        if self._fields is None:
            self._deliver()
        else:
            self._requested()

    def _requested(self) -> None:
        target, fields = self._target, self._fields
        if target.paused_until and target.is_paused():
            # A paused process does not read its socket; the message has arrived, and waits there.
            target.when_awake(self._requested)
            return
        assert fields is not None
        target.payload_received += self.nbytes
        self._handle(fields)

    def _handle(self, fields: Fields) -> None:
        target = self._target
        call = Call(self.source.name, self._method, fields, self._tensors)
        self._fields, self._tensors = None, ()
        try:
            answer = target.services[self._service].handle(call)
        except Exception as error:  # noqa: BLE001  (an error of the handler is the answer)
            self._answer_error(error)
            return
        if isinstance(answer, Reply):
            self._answer(answer)
        else:
            later = answer if isinstance(answer, Operation) else target.spawn(answer, self._method)  # type: ignore[arg-type]
            later.when_done(partial(self._handled, later))

    def _handled(self, later: Operation[Reply]) -> None:
        try:
            reply = later.result()
        except Exception as error:  # noqa: BLE001  (as above)
            self._answer_error(error)
        else:
            self._answer(reply)

    def _answer(self, reply: Reply) -> None:
        self._reply = reply
        self.nbytes = 0
        if self.source is self._target:
            self._deliver()
            return
        # The reply takes the connection in the other direction, and so keeps its order among messages that way.
        self.pair = self.pair.back or self.source.network.reverse(self.pair)
        self._send(self._target, reply.fields, reply.tensors)

    def _answer_error(self, error: Exception) -> None:
        if isinstance(error, RemoteError):
            error = error.with_traceback(None)  # as on processes, an answer has no traceback
        source, target = self.source, self._target
        if source is target:
            self.fail(error)
        else:
            target.post(source, 0, source.runtime.header, partial(self._finish_with, error))

    def _finish_with(self, error: Exception) -> None:
        self.source.calls.pop(self, None)
        self.fail(error)

    def _deliver(self) -> None:
        source, reply = self.source, self._reply
        if source.paused_until and source.is_paused():
            source.when_awake(self._deliver)
            return
        if source is not self._target:
            source.calls.pop(self, None)
            source.payload_received += self.nbytes
        if self._into and not self.done:
            for destination, tensor in zip(self._into, reply.tensors, strict=False):
                if not isinstance(tensor, Ghost):
                    whole = destination.numel() == tensor.numel()
                    (destination if whole else destination[: tensor.numel()]).copy_(tensor)
        # The caller copies at once here. A caller that asked to read in the host's memory (`into=None`) releases it
        # itself.
        if reply.release is not nothing and (self._into is not None or self.done):
            reply.release()
        self.resolve(reply)

    def concerns(self, node: VirtualNode) -> bool:
        return self.source is node or self._target is node

    def lose(self, node: VirtualNode) -> None:
        """Fail the call after a crash of its target; after a crash of the caller no task waits for it."""
        if self.source is not node:
            self._lost()

    def _lost(self) -> None:
        self.fail(PeerLost(f"{self._target.name} is gone; {self.source.name} had asked it for {self._method}"))


def _weight(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of all `tensors`."""
    nbytes = 0
    for tensor in tensors:
        nbytes += tensor.nbytes
    return nbytes


class Mailbox:
    """Messages from one node to another under one tag, in order. A message leaves once its receiver has asked for it.

    Processes do the same. A tensor is read when its message arrives; until then the sender must not change it.
    """

    def __init__(self, runtime: VirtualRuntime, source: str, target: str) -> None:
        self.source = runtime.nodes[source]
        self.target = runtime.nodes[target]
        self.deposits: deque[tuple[Operation[None], torch.Tensor]] = deque()
        self.asked: deque[tuple[Operation[torch.Tensor], torch.Tensor]] = deque()

    def send(self, tensor: torch.Tensor) -> Operation[None]:
        operation: Operation[None] = Operation(self.source.kernel, f"its message to {self.target.name} to be fetched")
        self.deposits.append((operation, tensor))
        self._match()
        return operation

    def recv(self, into: torch.Tensor) -> Operation[torch.Tensor]:
        operation: Operation[torch.Tensor] = Operation(self.target.kernel, f"a message from {self.source.name}")
        self.target.post(self.source, 0, self.target.runtime.header, partial(self._ask, operation, into))
        return operation

    def _ask(self, operation: Operation[torch.Tensor], into: torch.Tensor) -> None:
        if self.source.is_paused():
            self.source.when_awake(partial(self._ask, operation, into))
            return
        self.asked.append((operation, into))
        self._match()

    def _match(self) -> None:
        while self.deposits and self.asked:
            (sent, tensor), (received, into) = self.deposits.popleft(), self.asked.popleft()
            arrive = partial(self._arrive, sent, tensor, received, into)
            self.source.post(self.target, tensor.nbytes, self.source.runtime.header, arrive)

    def _arrive(
        self, sent: Operation[None], tensor: torch.Tensor, received: Operation[torch.Tensor], into: torch.Tensor
    ) -> None:
        if self.target.is_paused():
            self.target.when_awake(partial(self._arrive, sent, tensor, received, into))
            return
        self.target.payload_received += tensor.nbytes
        if not isinstance(tensor, Ghost):
            into.copy_(tensor)
        sent.resolve()
        received.resolve(into)


class VirtualRuntime:
    """All nodes of a virtual cluster, with its clock and its network.

    `detection`: seconds between a crash and its notice by others. `codec`: the cost of the run's codec. `slices`: the
    parts of a gradient that leave during backward, in order, as number of elements and share of backward still to do.
    Without slices a gradient leaves at the end of backward. `shape` is that of a step, whose tensors are those that an
    engine of accelerators sums. `slowest` multiplies the seconds of steps (`run.step_shape`). `variables`, `together`
    and `completed` are those of `ServerSoftware`. `delays` are the seconds by which a forward and a backward are longer
    where they are portions, such as those of blocks whose parameters are gathered meanwhile.
    """

    def __init__(
        self,
        cluster: Cluster,
        network: Callable[[Kernel], Network],
        gradient_engine: GradientEngine | None,
        *,
        seed: int,
        start: float = 0.0,
        trace: bool = False,
        codec: CodecCost | None = None,
        slices: Sequence[tuple[int, float]] = (),
        shape: StepShape | None = None,
        slowest: float = 1.0,
        variables: Mapping[str, Sequence[int]] | None = None,
        together: bool = False,
        completed: Mapping[str, Sequence[CompletedVariable]] | None = None,
    ) -> None:
        self.cluster = cluster
        self.shape = shape or StepShape(cluster.backward, 0.0, ())
        self.slowest = slowest
        self.delays = 0.0, 0.0
        self.codec = codec or CodecCost()
        self.slices = slices
        self.seed = seed
        self.trace = trace
        self.kernel = Kernel(start)
        self.network = network(self.kernel)
        self.software: ServerSoftware | None = None
        if variables and cluster.servers.software:
            self.software = ServerSoftware(self.network, variables, together=together, completed=completed)
        carrier = self.network if self.software is None else self.software
        self.carry: Callable[[Any], None] = carrier.carry
        self.gradient_engine = gradient_engine
        self.detection, self.header, self.field = cluster.detection, cluster.header, cluster.field
        self.nodes: dict[str, VirtualNode] = {}
        self.pending: dict[Computation, None] = {}
        self.numbers = count()  # of calls, in the order of their start
        self.groups: dict[Sequence[int], Any] = {}
        self.durations: dict[str, Durations] = {}
        self._mail: dict[tuple[str, str, int], Mailbox] = {}

    def node(self, name: str, rank: int) -> VirtualNode:
        """Add a node to the cluster."""
        self.nodes[name] = VirtualNode(self, name, rank)
        return self.nodes[name]

    def mail(self, source: str, target: str, tag: int) -> Mailbox:
        key = (source, target, tag)
        if key not in self._mail:
            self._mail[key] = Mailbox(self, source, target)
        return self._mail[key]

    def seconds_of(self, node: VirtualNode, work: Work) -> float:
        """Seconds of `work` on `node`, by the cluster's model."""
        if isinstance(work, Apply):
            if work.codec_works:
                return self._coding_seconds(node, work.codec_works)
            seconds = work.nbytes * self.cluster.gamma
            software = self.software
            return seconds if software is None or not software.serves(node.name) else seconds * software.updates
        if isinstance(work, StepPortion):
            step = work.step
            if step.seconds is None:
                step.seconds = self.durations[node.name].draw(step.flops) * self.slowest
            of_backward = self.shape.backward
            share = (1 - of_backward) * work.forward + of_backward * work.backward
            delay = self.delays[0] * work.forward + self.delays[1] * work.backward
            return (step.seconds * share + delay) * node.slowness
        if isinstance(work, TimedWork) and work.seconds is not None:
            return self.durations[node.name].draw_about(work.seconds) * node.slowness
        flops = work.flops if isinstance(work, GradientWork | TimedWork) else 0.0
        return self.durations[node.name].draw(flops) * self.slowest * node.slowness

    def _coding_seconds(self, node: VirtualNode, codec_works: Sequence[CodecWork]) -> float:
        """Seconds of a codec on `node`: the speed of a worker's machine applies to codecs as to steps."""
        own = self.durations.get(node.name)
        return self.codec.seconds(codec_works) * node.slowness / (1.0 if own is None else own.speed)

    def value_of(self, computation: Computation) -> Any:
        """The value of a finished gradient. Other pending gradients are evaluated with it where they batch."""
        if not computation.evaluated:
            self._evaluate(computation)
        self.pending.pop(computation, None)
        return computation.value

    def _evaluate(self, needed: Computation) -> None:
        gradient_engine = self.gradient_engine
        if gradient_engine is None:
            needed.value = GradientWork.ghost(needed.work)  # type: ignore[arg-type]
            return
        # All that have started: evaluating them now gives the same bits as later, and one batch costs less than many.
        together = [c for c in self.pending if not c.evaluated]
        works = [c.work for c in together]
        if not gradient_engine.batches(works):  # type: ignore[arg-type]
            together, works = [needed], [needed.work]
        for computation, value in zip(together, gradient_engine.evaluate(works), strict=True):  # type: ignore[arg-type]
            computation.value = value
            computation.evaluated = True

    def lose(self, node: VirtualNode) -> None:
        """Crash `node`. After `detection` seconds its callers and all services notice that.

        They notice it after the arrival of its last message: a connection ends after the bytes that were on it.
        """
        under_way = [(number, call) for source in self.nodes.values() for call, number in source.calls.items()]
        ended = [call for _, call in sorted(under_way, key=itemgetter(0)) if call.concerns(node)]
        for call in ended:
            del call.source.calls[call]
        node.crash()
        # A connection reports its end after the bytes before it: no peer may learn of the crash before the last
        # message.
        noticed = max(self.kernel.now + self.detection, self.network.last_arrival(node.name))
        self.kernel.at(noticed, lambda: self._report_loss(node, ended))

    def _report_loss(self, node: VirtualNode, ended: Sequence[RemoteCall]) -> None:
        for call in ended:
            call.lose(node)
        if node.alive:
            return  # it has restarted; its peers learn that when it joins
        for members, collective_rounds in self.groups.items():
            if node.rank in members and node.name.startswith("worker"):
                collective_rounds.lose(node.rank)
        for other in self.nodes.values():
            for service in other.services.values():
                lost = getattr(service, "lost", None)
                if other.alive and lost is not None:
                    lost(node.name)
