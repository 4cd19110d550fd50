"""Real time: each node is a process. Its roles and services run on one thread; `runtime.wire` carries its messages.

The loop polls the wire while all tasks wait. A computation runs at once, on the loop's thread. Meanwhile the wire's
helper thread continues transfers; the loop handles their results when the computation has ended.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from dure.core.meter import Meter
from dure.core.node import (
    Address,
    Apply,
    Call,
    Operation,
    Reply,
    Service,
    Task,
    TensorSpec,
    Work,
)
from dure.core.node_view import ServiceView
from dure.core.protocol import COUNT, Method, check
from dure.errors import DureError, Refused, RemoteError
from dure.job.gradient import GradientWork
from dure.runtime.process.connector import Connector
from dure.runtime.process.dispatcher import Dispatcher
from dure.runtime.process.lane import lane_of
from dure.runtime.process.loop import ProcessLoop
from dure.runtime.wire import Credentials, Identity, Loss, Request, Respond, Wire, WireLimits

if TYPE_CHECKING:
    import torch

    from dure.core.node import Group
    from dure.job.gradients import GradientEngine

T = TypeVar("T")

CALL_SECONDS = 300.0
"""Default time limit of a call: long enough for a wait at a barrier."""

SHORT_NBYTES = 1 << 20
"""Memory work on fewer bytes ends before a helper thread would be awake, so none is used."""


class ProcessNode:
    """The `Node` of real time: this process, for its roles and services.

    `directory` maps the names of the other nodes to their addresses. `on_lost` is called for every connection that
    ended. All nodes of a run have the same `credentials`. Tensors of calls may lie on `device`, and those of incoming
    calls do.
    """

    def __init__(
        self,
        identity: Identity,
        credentials: Credentials,
        *,
        seed: int = 0,
        trace: bool = False,
        limits: WireLimits | None = None,
        gradient_engine: GradientEngine | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.loop = ProcessLoop()
        self.identity = identity
        self.name = identity.name
        self.rank = identity.rank
        self.rng = np.random.default_rng([seed, identity.rank, 7])
        self.meter = Meter(identity.name, [] if trace else None)
        self.gradient_engine = gradient_engine
        self.services: dict[str, Service] = {}
        self.directory: dict[str, tuple[str, int]] = {}
        self.on_lost: Callable[[Loss], None] | None = None
        self.refuses: Callable[[Identity], str | None] = lambda caller: None
        self.collectives: Callable[[Sequence[int]], Group] | None = None
        self.wire = Wire(identity, Hosting(self), limits=limits, credentials=credentials)
        self.loop.wire = self.wire
        self.lane = lane_of(device, self.loop.poll)
        self.dispatcher = Dispatcher(self.name, self.loop, self.services)
        self._connector = Connector(self.name, self.loop, self.directory)
        self._outbox = Outbox(self)
        self.serve("outbox", self._outbox)
        self._began = time.monotonic()

    @property
    def incarnation(self) -> int:
        return self.identity.incarnation

    async def given_to_wire(self) -> None:
        """Once the wire has all messages so far, and counts them."""
        while self.lane is not None and self.lane.busy:
            await self.sleep(0.0)

    def begin(self, seconds: float = 0.0) -> None:
        """Set the clock of the run to `seconds`."""
        self._began = time.monotonic() - seconds

    # ---- the primitives

    def compute(self, work: Work) -> Operation[Any]:
        operation: Operation[Any] = Operation(self.loop, "its computation")
        short = isinstance(work, Apply) and work.nbytes < SHORT_NBYTES
        if self.wire.busy and not short:
            with self.wire.in_background():
                value = self._value_of(work)
        else:
            value = self._value_of(work)
        operation.resolve(value)
        return operation

    def _value_of(self, work: Work) -> Any:
        if isinstance(work, GradientWork):
            assert self.gradient_engine is not None
            return self.gradient_engine.one(work)
        return work.run()

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
        operation: Operation[Reply] = Operation(self.loop, f"{method} of {service.service} at {service.node}")
        if service.node == self.name:
            self.dispatcher.call_own(operation, service.service, Call(self.name, method, fields, tensors), into)
            return operation

        def done(answer: Reply | RemoteError) -> None:
            if isinstance(answer, RemoteError):
                operation.fail(answer)
            else:
                operation.resolve(answer)

        def send(
            tensors: Sequence[torch.Tensor], into: Sequence[torch.Tensor] | None, done: Callable[[Any], None]
        ) -> None:
            request = Request(service.service, method, tensors, into, fields, timeout or CALL_SECONDS, at_most)

            def start(error: RemoteError | None) -> None:
                if error is not None:
                    operation.fail(error)
                elif not operation.done:
                    operation.on_cancel = self.wire.call(service.node, request, done).cancel

            self._connector.when_connected(service.node, start)

        if self.lane is None:
            send(tensors, into, done)
        else:
            self.lane.carry(operation, service.node, tensors, into, send, done)
        return operation

    def send(self, peer: str, tensor: torch.Tensor, *, tag: int = 0) -> Operation[None]:
        return self._outbox.put(peer, tensor, tag)

    def recv(self, peer: str, into: torch.Tensor, *, tag: int = 0) -> Operation[torch.Tensor]:
        return self.spawn(self._recv(peer, into, tag), f"a message from {peer}")

    async def _recv(self, peer: str, into: torch.Tensor, tag: int) -> torch.Tensor:
        await self.call(Address(peer, "outbox"), "fetch", into=(into.view(-1),), tag=tag)
        return into

    def group(self, ranks: Sequence[int]) -> Group:
        if self.collectives is None:
            raise DureError(f"{self.name} has no process group: collectives were not set up for this run.")
        return self.collectives(ranks)

    def first(self, *operations: Operation[Any], timeout: float | None = None) -> Operation[Operation[Any] | None]:
        winner: Operation[Any] = Operation(self.loop, " or ".join(each.label for each in operations))
        winner.resolve_with_first(operations)
        if timeout is not None:
            self.loop.after(timeout, lambda: winner.resolve(None))
        return winner

    def spawn(self, coroutine: Coroutine[Operation[Any], None, T], name: str = "") -> Task[T]:
        return self.loop.spawn(coroutine, name or self.name)

    def sleep(self, seconds: float, *, background: bool = False) -> Operation[None]:
        operation: Operation[None] = Operation(self.loop, f"{seconds:g} s to pass")
        self.loop.after(seconds, operation.resolve)
        return operation

    def now(self) -> float:
        return time.monotonic() - self._began

    def promise(self, label: str) -> Operation[Any]:
        return Operation(self.loop, label)

    def serve(self, name: str, service: Service) -> Address:
        self.services[name] = service
        return Address(self.name, name)

    def room_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.wire.room_like(tensor)

    def borrows(self, peer: str, nbytes: int) -> bool:
        return self.lane is None and self.wire.borrows(peer, nbytes)

    def beside(self, *values: torch.Tensor) -> AbstractContextManager[None]:
        return nullcontext() if self.lane is None else self.lane.beside(*values)


class Hosting:
    """The wire's callbacks of a node: admission of callers, requests, and lost connections."""

    def __init__(self, node: ProcessNode) -> None:
        self._node = node

    def admit(self, caller: Identity) -> str | None:
        return self._node.refuses(caller)

    def expects(self, service: str, method: str) -> Sequence[TensorSpec]:
        services = self._node.services
        if service not in services:
            raise Refused(
                f"{self._node.name} hosts {', '.join(services) or 'no service'}, and was asked for {service!r}."
            )
        return services[service].expects(method)

    def request(self, service: str, call: Call, respond: Respond) -> None:
        hosted = self._node.services[service]
        protocol: Mapping[str, Method] = getattr(hosted, "protocol", {})
        try:
            if call.method in protocol:
                check(service, protocol[call.method], hosted.seen(call) if isinstance(hosted, ServiceView) else call)
        except Refused as error:
            respond(error)
            return
        except Exception as error:  # noqa: BLE001  (a defect of the check: logged, and answered)
            respond(self._node.dispatcher.failed(service, call, error))
            return
        lane, dispatcher = self._node.lane, self._node.dispatcher
        if lane is None:
            dispatcher.handle(service, call, respond, isolated=True)
        else:
            call = replace(call, tensors=lane.received(call.tensors))
            dispatcher.handle(service, call, lane.answering(call, respond), isolated=True)

    def lost(self, loss: Loss) -> None:
        node = self._node
        back = any(here.name == loss.peer and here.incarnation > loss.incarnation for here in node.wire.callers)
        if loss.incoming and not loss.finished and not back:  # a late loss of an earlier incarnation does not count
            for service in list(node.services.values()):
                lost = getattr(service, "lost", None)
                if lost is not None:
                    lost(loss.peer)
        if node.on_lost is not None:
            node.on_lost(loss)


class Outbox:
    """Service of point-to-point messages: a sender keeps each until the receiver, which knows its size, fetches it."""

    protocol: ClassVar[Mapping[str, Method]] = {"fetch": Method(fields={"tag": COUNT})}

    def __init__(self, node: ProcessNode) -> None:
        self._node = node
        self._deposits: dict[tuple[str, int], deque[tuple[Operation[None], torch.Tensor]]] = {}
        self._fetching: dict[tuple[str, int], deque[Operation[Reply]]] = {}

    def put(self, peer: str, tensor: torch.Tensor, tag: int) -> Operation[None]:
        operation: Operation[None] = Operation(self._node.loop, f"its message to {peer} to be fetched")
        self._deposits.setdefault((peer, tag), deque()).append((operation, tensor))
        self._match((peer, tag))
        return operation

    def expects(self, method: str) -> Sequence[TensorSpec]:
        return ()

    async def handle(self, call: Call) -> Reply:
        if call.method != "fetch":
            raise Refused(f'an outbox has no method "{call.method}"; it has fetch.')
        key = (call.caller, int(call.fields["tag"]))
        fetched: Operation[Reply] = Operation(self._node.loop, f"a message for {call.caller}")
        self._fetching.setdefault(key, deque()).append(fetched)
        self._match(key)
        return await fetched

    def _match(self, key: tuple[str, int]) -> None:
        deposits, fetching = self._deposits.get(key), self._fetching.get(key)
        while deposits and fetching:
            operation, tensor = deposits.popleft()
            fetching.popleft().resolve(Reply(tensors=(tensor.reshape(-1),), release=operation.resolve))
