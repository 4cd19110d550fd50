"""Real time: each node is a process. Its roles and services run on one thread; `runtime.wire` carries its messages.

The loop polls the wire while all tasks wait. A computation runs at once, on the loop's thread. Meanwhile the wire's
helper thread continues transfers; the loop handles their results when the computation has ended. The first call of
another process opens the connection to it.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dure.core.meter import Meter
from dure.core.node import Address, Apply, Call, Loop, Operation, Reply, Service, Task, TensorSpec, Work, nothing
from dure.core.node_view import ServiceView
from dure.core.protocol import COUNT, Method, RemoteService, check, remote
from dure.core.text import log
from dure.core.user_code import frames_of, sentence_of
from dure.errors import DureError, GreetingLost, Refused, RemoteError
from dure.job.gradient import GradientWork
from dure.runtime.process.transfers import transfers_of
from dure.runtime.wire import Credentials, Identity, Loss, OnDone, Request, Respond, Wire, WireLimits

if TYPE_CHECKING:
    import torch

    from dure.core.node import Group
    from dure.job.gradient_engine import GradientEngine

T = TypeVar("T")

IDLE_SECONDS = 1.0
"""Longest sleep of the loop between two checks."""

CONNECT_SECONDS = 20.0
"""Time limit of one greeting."""

GREETING_SECONDS = 120.0
"""Time for which a lost greeting is repeated: as long as a run may take to start."""

AGAIN_SECONDS = 0.1
"""Pause between two greetings."""

CALL_SECONDS = 300.0
"""Default time limit of a call: long enough for a wait at a barrier."""

SHORT_NBYTES = 1 << 20
"""Memory work on fewer bytes ends before a helper thread would be awake, so none is used."""


class ProcessNode:
    """The `Node` of real time: this process, for its roles and services.

    `directory` maps the names of the other nodes to their addresses. `on_lost` is called for every connection that
    ended, `on_error` for an unexpected error of a handler. All nodes of a run have the same `credentials`. Tensors of
    calls may lie on `device`, and those of incoming calls do.
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
        self.rng = np.random.default_rng([seed, identity.rank, 7])  # as in virtual time: a node draws the same numbers
        self.meter = Meter(identity.name, [] if trace else None)
        self.gradient_engine = gradient_engine
        self.services: dict[str, Service] = {}
        self.directory: dict[str, tuple[str, int]] = {}
        self.on_lost: Callable[[Loss], None] | None = None
        self.on_error: Callable[[Exception], None] = lambda error: None
        self.refuses: Callable[[Identity], str | None] = lambda caller: None
        self.collectives: Callable[[Sequence[int]], Group] | None = None
        self._hosting = Hosting(self)
        self.wire = Wire(identity, self._hosting, limits=limits, credentials=credentials)
        self.loop.wire = self.wire
        self.transfers = transfers_of(device, self.loop.poll)
        self._connector = Connector(self.name, self.loop, self.directory)
        self._outbox = Outbox(self)
        self.serve("outbox", self._outbox)
        self._began = time.monotonic()

    @property
    def incarnation(self) -> int:
        return self.identity.incarnation

    async def sent_to_wire(self) -> None:
        """Once the wire has all messages so far, and counts them."""
        while self.transfers is not None and self.transfers.busy:
            await self.sleep(0.0)

    def begin(self, seconds: float = 0.0) -> None:
        """Set the clock of the run to `seconds`."""
        self._began = time.monotonic() - seconds

    # ---- the primitives

    def compute(self, work: Work) -> Operation[Any]:
        operation: Operation[Any] = Operation(self.loop, "its computation")
        short = isinstance(work, Apply) and work.nbytes < SHORT_NBYTES
        # The owner's thread computes; meanwhile the helper thread moves bytes, so that peers do not wait for this step.
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
            self._hosting.call_own(operation, service.service, Call(self.name, method, fields, tensors), into)
            return operation

        def done(answer: Reply | RemoteError) -> None:
            if isinstance(answer, RemoteError):
                operation.fail(answer)
            else:
                operation.resolve(answer)

        request = Request(service.service, method, tensors, into, fields, timeout or CALL_SECONDS, at_most)
        if self.transfers is not None:
            self.transfers.carry(operation, service.node, request, partial(self._send, operation, service.node), done)
        elif self.wire.connected(service.node):  # the most frequent case; `_send` does the same
            operation.on_cancel = self.wire.call(service.node, request, done).cancel
        else:
            self._send(operation, service.node, request, done)
        return operation

    def _send(self, operation: Operation[Reply], peer: str, request: Request, done: OnDone) -> None:
        """Send the request of `operation` once `peer` is connected."""

        def start(error: RemoteError | None) -> None:
            if error is not None:
                operation.fail(error)
            elif not operation.done:
                operation.on_cancel = self.wire.call(peer, request, done).cancel

        self._connector.when_connected(peer, start)

    def send(self, peer: str, tensor: torch.Tensor, *, tag: int = 0) -> Operation[None]:
        return self._outbox.put(peer, tensor, tag)

    def recv(self, peer: str, into: torch.Tensor, *, tag: int = 0) -> Operation[torch.Tensor]:
        return self.spawn(self._recv(peer, into, tag), f"a message from {peer}")

    async def _recv(self, peer: str, into: torch.Tensor, tag: int) -> torch.Tensor:
        await self.call(Address(peer, "outbox"), "fetch", into=(into.view(-1),), tag=tag)
        return into

    @property
    def engine_inside(self) -> bool:
        return False

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
        return self.transfers is None and self.wire.borrows(peer, nbytes)

    def reaches(self, peer: str) -> bool:
        return self.wire.reaches(peer)

    def overlapped(self, *values: torch.Tensor) -> AbstractContextManager[None]:
        return nullcontext() if self.transfers is None else self.transfers.overlapped(*values)


class Hosting:
    """The host's side of a node: the callbacks of its wire, and the answers of its services."""

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
            respond(self._failed(service, call, error))
            return
        transfers = self._node.transfers
        if transfers is None:
            self._handle(service, call, respond, isolated=True)
        else:
            call = replace(call, tensors=transfers.received(call.tensors))
            self._handle(service, call, transfers.answering(call, respond), isolated=True)

    def lost(self, loss: Loss) -> None:
        node = self._node
        # A process that was started again may be connected before the end of its former connection is seen.
        back = any(here.name == loss.peer and here.incarnation > loss.incarnation for here in node.wire.callers)
        if loss.incoming and not loss.finished and not back:  # a late loss of an earlier incarnation does not count
            for service in list(node.services.values()):
                lost = getattr(service, "lost", None)
                if lost is not None:
                    lost(loss.peer)
        if node.on_lost is not None:
            node.on_lost(loss)

    # ---- calls of the services of this process, from other processes and from its own roles

    def call_own(
        self, operation: Operation[Reply], service: str, call: Call, into: Sequence[torch.Tensor] | None
    ) -> None:
        """Resolve `operation` with the answer of an own service, whose tensors are copied to `into`."""

        def answered(answer: Reply | RemoteError) -> None:
            if isinstance(answer, RemoteError):
                operation.fail(answer)
                return
            if into is not None:
                for destination, tensor in zip(into, answer.tensors, strict=True):
                    destination[: tensor.numel()].copy_(tensor)
                answer.release()
            operation.resolve(answer)

        self._handle(service, call, answered)

    def _handle(
        self, service: str, call: Call, respond: Callable[[Reply | RemoteError], None], *, isolated: bool = False
    ) -> None:
        """Answer `call` by a service of this node, at once or later.

        An error in the handler of an `isolated` call fails that call but not this process.
        """
        try:
            answer = self._node.services[service].handle(call)
        except Exception as error:  # noqa: BLE001  (an error of the handler is the answer)
            respond(self._answer(service, call, error, isolated=isolated))
            return
        if isinstance(answer, Reply):
            respond(answer)
            return
        later: Operation[Reply]
        if isinstance(answer, Operation):
            later = answer
        else:
            later = self._node.loop.spawn(answer, f"{call.method} for {call.caller}")  # type: ignore[arg-type]

        def done() -> None:
            try:
                reply = later.result()
            except Exception as error:  # noqa: BLE001  (as above)
                respond(self._answer(service, call, error, isolated=isolated))
            else:
                respond(reply)

        later.when_done(done)

    def _answer(self, service: str, call: Call, error: Exception, *, isolated: bool) -> RemoteError:
        """The answer for an error of a handler. Raises an unexpected error unless the call is `isolated`."""
        if isinstance(error, RemoteError):
            return error
        if isinstance(error, DureError):
            return Refused(str(error))
        if not isolated:
            raise error
        return self._failed(service, call, error)

    def _failed(self, service: str, call: Call, error: Exception) -> Refused:
        """Log the `error` of a handler. Return the answer for the caller."""
        place = f"{call.method} of {service} at {self._node.name}"
        self._node.on_error(error)
        what, frames = sentence_of(error), frames_of(error)
        said = f"{what}\n{frames}".rstrip()
        log.error("%s, called by %s, has failed: %s", place, call.caller, said, exc_info=None if frames else error)
        return Refused(f"{place} has failed with {what.rstrip('.')}")


class Connector:
    """Connects the process `name` to the hosts in `directory`, which maps names to addresses."""

    def __init__(self, name: str, loop: ProcessLoop, directory: Mapping[str, tuple[str, int]]) -> None:
        self._directory = directory
        self._name = name
        self._loop = loop
        self._wire = loop.wire
        self._waiting: dict[str, list[Callable[[RemoteError | None], None]]] = {}

    def when_connected(self, peer: str, start: Callable[[RemoteError | None], None]) -> None:
        """Call `start` once `peer` is connected, or with the error if it cannot be: at once, or from the loop.

        This method runs no other task: code without `await` stays atomic, and calls leave in the order of their start.
        """
        if self._wire.connected(peer):
            start(None)
        elif peer in self._waiting:
            self._waiting[peer].append(start)
        elif peer not in self._directory:
            known = ", ".join(self._directory) or "no node"
            start(RemoteError(f"{self._name} does not know where {peer} is; it knows {known}."))
        else:
            self._waiting[peer] = [start]
            self._connect(peer, time.monotonic() + GREETING_SECONDS)

    def _connect(self, peer: str, deadline: float) -> None:
        """Connect to `peer`; repeat a lost greeting until the `deadline`.

        A greeting is lost if one of both processes is stopped for longer than a host waits for a greeting, or if the
        link between them is down.
        """

        def opened(error: RemoteError | None) -> None:
            # A host closes a greeting that takes too long; a process stopped for seconds, at a start under load, comes
            # again.
            if isinstance(error, GreetingLost) and time.monotonic() < deadline:
                self._loop.after(AGAIN_SECONDS, lambda: self._connect(peer, deadline))
            else:
                self._opened(peer, error)

        try:
            self._wire.open(peer, *self._directory[peer], opened, CONNECT_SECONDS)
        except RemoteError as error:
            opened(error)

    def _opened(self, peer: str, error: RemoteError | None) -> None:
        for start in self._waiting.pop(peer):
            start(error)


class Outbox(RemoteService):
    """Service of point-to-point messages: a sender keeps each until the receiver, which knows its size, fetches it."""

    called = "an outbox"

    def __init__(self, node: ProcessNode) -> None:
        self._node = node
        self._deposits: dict[tuple[str, int], deque[tuple[Operation[None], torch.Tensor]]] = {}
        self._fetching: dict[tuple[str, int], deque[Operation[Reply]]] = {}

    def put(self, peer: str, tensor: torch.Tensor, tag: int) -> Operation[None]:
        operation: Operation[None] = Operation(self._node.loop, f"its message to {peer} to be fetched")
        self._deposits.setdefault((peer, tag), deque()).append((operation, tensor))
        self._match((peer, tag))
        return operation

    @remote(tag=COUNT)
    async def _fetch(self, call: Call) -> Reply:
        """The next message to the caller with that tag, once there is one."""
        key = (call.caller, int(call.fields["tag"]))
        fetched: Operation[Reply] = Operation(self._node.loop, f"a message for {call.caller}")
        self._fetching.setdefault(key, deque()).append(fetched)
        self._match(key)
        return await fetched

    def _match(self, key: tuple[str, int]) -> None:
        deposits, fetching = self._deposits.get(key), self._fetching.get(key)
        # A message is read where it lies when the receiver asks: until then the sender keeps it, and nothing is copied.
        while deposits and fetching:
            operation, tensor = deposits.popleft()
            fetching.popleft().resolve(Reply(tensors=(tensor.reshape(-1),), release=operation.resolve))


class ProcessLoop(Loop):
    """The event loop of a process: runs tasks, and sleeps in the wire until a message, a timer or a lost connection.

    `waiting` is true while the loop sleeps. `check` is called at least once a second of a wait; an exception that it
    raises ends the wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wire: Wire
        self.waiting = False
        self.check: Callable[[], None] = nothing
        self._polled: list[Callable[[], bool]] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        self._sequence += 1  # timers of one time run in the order of their calls
        heapq.heappush(self._timers, (time.monotonic() + seconds, self._sequence, callback))

    def poll(self, callback: Callable[[], bool]) -> None:
        """Call `callback` in each round from now on, for as long as it returns True. The loop does not sleep then."""
        self._polled.append(callback)

    def yield_once(self) -> Operation[None]:
        """Yield once: resolves after all ready tasks and the transport have run. For busy-waiting code."""
        operation: Operation[None] = Operation(self, "its turn")
        self.after(0.0, operation.resolve)
        return operation

    def run_until(self, operation: Operation[T]) -> T:
        """Run the loop until `operation` is done. Return its value."""
        self.run_ready()
        while not operation.done:
            self._wait(IDLE_SECONDS)
            self.run_ready()
            self.check()
            self.run_ready()
        return operation.result()

    def turn(self, longest: float) -> None:
        """Run one round: wait at most `longest` seconds for the wire or a timer, then run what is due."""
        self._wait(longest)
        self.run_ready()

    def _wait(self, longest: float) -> None:
        """Wait at most `longest` seconds for the wire or a timer, and run their callbacks."""
        if self._timers:
            longest = min(longest, max(0.0, self._timers[0][0] - time.monotonic()))
        # A heartbeat tells of it: a process that waits for others is not frozen, however long it sends nothing.
        self.waiting = True
        self.wire.poll(0.0 if self.ready or self._polled else longest)
        self.waiting = False
        if self._polled:
            polled, self._polled = self._polled, []
            self._polled += [callback for callback in polled if callback()]
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()
