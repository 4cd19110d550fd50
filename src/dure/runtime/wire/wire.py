"""The wire of one process: calls in both directions, over one connection for each pair of caller and host.

`poll` does all work in the caller's thread, in bounded turns.

    wire = Wire(Identity(job="digits", name="worker 0"), credentials=Credentials.drawn())
    wire.connect("server 0", "127.0.0.1", port)
    wire.call("server 0", Request("shard", "push", [gradient], into=[values]), on_done)
    while waiting:
        wire.poll(1.0)

`docs/explanations/decisions/0002-bulk-over-tcp.md` has the throughput, and the reasons against Gloo.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Set

import torch

from dure.errors import CallTimeout, PeerLost, RemoteError, UsageError
from dure.runtime.wire.caller import CallerHandshake, Outbound, Pending
from dure.runtime.wire.connection import SETTLE_SECONDS, Shared
from dure.runtime.wire.host import Callers, HostHandshake, Inbound
from dure.runtime.wire.reactor import IS_LINUX, Reactor, endpoint, is_loopback, is_mine, listen_unix
from dure.runtime.wire.seals import Credentials
from dure.runtime.wire.values import HostCallbacks, Identity, OnDone, PeerTraffic, Request, ServesNobody, WireLimits

_EVERYWHERE = ("", "0.0.0.0", "::", "*")  # noqa: S104  (refused, not used)
_ACCEPTS = 64  # connections accepted per turn
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Wire:
    """All connections of a process. Only its owner's thread may call it, except for `wake`."""

    def __init__(
        self,
        identity: Identity,
        host: HostCallbacks | None = None,
        limits: WireLimits | None = None,
        *,
        credentials: Credentials,
    ) -> None:
        """`credentials` are the same in all processes of a job; the wire connects to no other process."""
        self._reactor = Reactor()
        self._shared = Shared(identity, host or ServesNobody(), limits or WireLimits(), self._reactor, credentials)
        self._callers = Callers(self._shared)
        self._hosts: dict[str, Outbound] = {}
        self._listeners: list[_Listener] = []
        self._closed = False

    @property
    def identity(self) -> Identity:
        return self._shared.identity

    @property
    def traffic(self) -> dict[str, PeerTraffic]:
        """Counts by the name of the peer, kept after the peer disconnects."""
        return self._shared.traffic

    @property
    def damaged(self) -> int:
        """Number of connections that were closed because of damaged frames."""
        return self._shared.damaged

    @property
    def refused(self) -> int:
        """Number of callers and requests that were refused."""
        return self._shared.refused

    @property
    def staging_peak_nbytes(self) -> int:
        """Peak memory of requests, in bytes."""
        return self._shared.staging.peak_nbytes

    @property
    def callers(self) -> tuple[Identity, ...]:
        """Identities of the callers that are connected to this host."""
        return tuple(inbound.caller for inbound in self._callers.open.values())

    @property
    def busy(self) -> bool:
        """Whether calls wait for an answer, or frames are in transfer."""
        return any(outbound.calls or outbound.connection.queue for outbound in self._hosts.values()) or any(
            inbound.connection.queue or not (inbound.connection.closed or inbound.connection.parser.idle)
            for inbound in self._callers.open.values()
        )

    def listen(self, host: str = "127.0.0.1", port: int = 0, *, everywhere: bool = False, unix: bool = True) -> int:
        """Listen on the interface with address `host`. Return the port; the system chooses it where `port` is 0.

        On a loopback address callers use a Unix socket where they can (`unix`), else TCP.

        Raises `UsageError` for an address that means every interface, unless `everywhere` is true.
        """
        if host in _EVERYWHERE and not everywhere:
            raise UsageError(
                f"{host!r} would listen on every interface of this machine; give the address of the one that the "
                "others reach it by, or everywhere=True."
            )
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.create_server((host, port), family=family, backlog=1024)
        port = int(sock.getsockname()[1])
        if host not in _EVERYWHERE:
            self._shared.listens = self._shared.listens or (host, port)
        near = listen_unix(port) if unix and is_loopback(host) else None
        self._listeners += [_Listener(self._shared, self._callers, each) for each in (sock, near) if each is not None]
        return port

    def connect(self, name: str, host: str, port: int, timeout: float = 10.0) -> Identity:
        """Connect to the host `name`, while others are served. Return the identity that it states.

        Raises `PeerLost` (no process listens), `Refused` (not admitted), `CallTimeout` (after `timeout` seconds).
        """
        deadline = time.monotonic() + timeout
        with self._reactor.lock:
            handshake = CallerHandshake(self._shared, name, (host, port))
        while handshake.outbound is None and handshake.error is None:
            left = deadline - time.monotonic()
            if left <= 0:
                handshake.connection.end(PeerLost("no welcome in time"))
                raise CallTimeout(f"{name} at {endpoint(host, port)} did not answer the greeting within {timeout} s.")
            self.poll(left)
        if handshake.error is not None:
            handshake.connection.end(handshake.error)
            raise handshake.error
        assert handshake.outbound is not None
        self._add(handshake.outbound)
        return handshake.outbound.host

    def open(
        self, name: str, host: str, port: int, on_open: Callable[[RemoteError | None], None], timeout: float = 10.0
    ) -> None:
        """Connect without waiting: a later `poll` calls `on_open`, with the error if the connection failed."""

        def opened() -> None:
            self._reactor.timers.cancel(timer)
            if handshake.outbound is not None and handshake.error is None:
                self._add(handshake.outbound)
            on_open(handshake.error)

        with self._reactor.lock:
            handshake = CallerHandshake(self._shared, name, (host, port), opened)
            late = PeerLost("no welcome in time")
            timer = self._reactor.timers.after(timeout, lambda: handshake.connection.end(late))

    def _add(self, outbound: Outbound) -> None:
        old = self._hosts.get(outbound.name)
        # This process has connected under a later incarnation of the host, or again after a loss.
        if old is not None:
            old.give_up(PeerLost("connected again"))
        self._hosts[outbound.name] = outbound

    def call(self, peer: str, request: Request, on_done: OnDone) -> Pending:
        """Call a service of `peer`. A later `poll` calls `on_done` with the `Reply` or an error.

        Requests to one peer arrive in order. Raises `TypeError` or `ValueError` for a request that cannot be sent.
        """
        with self._reactor.lock:
            outbound = self._hosts.get(peer)
            if outbound is None:
                error = PeerLost(f"{self.identity.name} is not connected to {peer}: connect first.")
                self._reactor.events.append(lambda: on_done(error))
                return Pending(None, 0, request, on_done)
            pending = outbound.request(request, on_done)
        # The helper thread may sleep in the selector, without the new socket mask.
        if self._reactor.lent:
            self._reactor.wake()
        return pending

    def borrows(self, peer: str, nbytes: int) -> bool:
        """Whether a reply of `nbytes` bytes in rooms of `peer` can be read there, in memory that both map."""
        outbound = self._hosts.get(peer)
        return outbound is not None and outbound.connection.lends and nbytes >= self._shared.limits.lent_nbytes

    def room_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A room: uninitialized memory, with the shape of `tensor`, that other processes of this machine can read.

        They read the tensors of a call there until they have answered it, even if it was cancelled or timed out.
        """
        if tensor.device.type != "cpu":
            return torch.empty_like(tensor)
        if not IS_LINUX or tensor.nbytes < self._shared.limits.lent_nbytes:
            return torch.empty_like(tensor)
        return self._shared.lender.empty(tensor.nbytes).view(tensor.dtype).view_as(tensor)

    def connected(self, peer: str) -> bool:
        """Whether `peer` can be called."""
        outbound = self._hosts.get(peer)
        return outbound is not None and outbound.error is None

    def reaches(self, name: str) -> bool:
        """Whether the machine of a peer answers, and has for a while: what it sent before has arrived.

        True where the system cannot tell, or there is no peer of that name.
        """
        inbound, outbound = self._callers.open.get(name), self._hosts.get(name)
        connections = [] if inbound is None else [inbound.connection]
        if outbound is not None and outbound.error is None:
            connections.append(outbound.connection)
        settled = time.monotonic() - SETTLE_SECONDS
        return not any(each.closed or each.silent_at > settled for each in connections)

    def evict(self, name: str, incarnation: int, reason: str) -> None:
        """Close the connection of a caller, and admit it again only as a later incarnation.

        Requests that the owner has not seen yet are never delivered.
        """
        with self._reactor.lock:
            self._callers.evict(name, incarnation, reason)

    def poll(self, timeout: float = 0.0) -> int:
        """Run one turn: wait up to `timeout` seconds for an event, move bytes, and run the owner's callbacks.

        Return the number of callbacks.
        """
        if not self._reactor.lent:
            self._reactor.turn(timeout)
        return self._reactor.run_events()

    def descriptors(self) -> Set[int]:
        """The sockets that this wire waits for, by descriptor."""
        return self._reactor.descriptors()

    def wake(self) -> None:
        """Make a `poll` in progress return soon. Any thread may call this."""
        self._reactor.wake()

    @contextlib.contextmanager
    def in_background(self) -> Iterator[None]:
        """While open, let a helper thread move bytes, if any are in flight, so that the owner can compute.

        Callbacks wait for the owner's next `poll`. `call` and `Pending.cancel` can be used inside.
        """
        if self._reactor.lent or not self.busy:
            yield
            return
        self._reactor.lend()
        try:
            yield
        finally:
            self._reactor.take_back()

    def close(self, timeout: float = 2.0) -> None:
        """Send queued frames and GOODBYE, and wait at most `timeout` seconds until the peers have closed too.

        Pending calls and all later ones fail. All connections are closed even if a callback raises.
        """
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as stack:
            # Last registered, first run: `_end` breaks what `_finish` left open, its losses are reported, then the
            # selector goes.
            stack.callback(self._reactor.close)
            stack.callback(self._reactor.run_events)
            stack.callback(self._end)
            self._finish(timeout)

    def _finish(self, timeout: float) -> None:
        """Send GOODBYE to all peers, and wait until they have closed."""
        for listener in self._listeners:
            listener.close()
        # GOODBYE follows the queued answers, so that a peer that still waits for one gets it before the end.
        for connection in list(self._shared.connections):
            connection.finish()
        deadline = time.monotonic() + timeout
        while self._shared.connections and time.monotonic() < deadline:
            self._reactor.turn(deadline - time.monotonic())
            self._reactor.run_events()

    def _end(self) -> None:
        for connection in list(self._shared.connections):
            connection.end(PeerLost("this process has finished"), finished=True)
        without: list[Outbound | Inbound] = [*self._hosts.values(), *self._callers.open.values()]
        for side in without:  # sessions without a connection
            side.give_up(PeerLost("this process has finished"))


class _Listener:
    """A socket that accepts connections."""

    def __init__(self, shared: Shared, callers: Callers, sock: socket.socket) -> None:
        self._shared = shared
        self._callers = callers
        self._sock = sock
        self._is_unix = sock.family not in (socket.AF_INET, socket.AF_INET6)
        sock.setblocking(False)
        shared.reactor.watch(sock, selectors.EVENT_READ, self)

    def ready(self, mask: int) -> None:
        for _ in range(_ACCEPTS):
            try:
                sock, _ = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _FULL:
                    self._pause()
                    return
                continue  # the connection broke before it was accepted
            if self._is_unix and not is_mine(sock):
                sock.close()
            else:
                HostHandshake(self._shared, self._callers, sock)

    def close(self) -> None:
        self._shared.reactor.watch(self._sock, 0, self)
        self._sock.close()

    def _pause(self) -> None:
        """Stop accepting for a moment: the process has no free descriptors."""
        self._shared.reactor.watch(self._sock, 0, self)
        self._shared.reactor.timers.after(0.1, self._resume)

    def _resume(self) -> None:
        if self._sock.fileno() >= 0:
            self._shared.reactor.watch(self._sock, selectors.EVENT_READ, self)
