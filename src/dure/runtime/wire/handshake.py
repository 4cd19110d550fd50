"""The handshake of a connection: both ends prove that they have the key, then exchange identities.

accepted ── CHALLENGE ──► greeting ── PROOF ──► proven ── HELLO ──► being admitted ── WELCOME ──► open
                             │ no key, deadline, garbage               │ refused
                             ▼                                         ▼

Each end has a handshake as the `Side` of its connection, until `Inbound` at the host and `Outbound` at the caller
replace it.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Mapping
from typing import Any

from dure.core.node import nothing
from dure.errors import DamagedFrame, GreetingLost, PeerLost, Refused, RemoteError
from dure.runtime.wire.connection import Connection, Shared, connect_unix, is_loopback
from dure.runtime.wire.frame import Frame, Kind
from dure.runtime.wire.inbound import Callers, Inbound
from dure.runtime.wire.outbound import Outbound, error_told
from dure.runtime.wire.seals import NONCE_NBYTES, Prover
from dure.runtime.wire.values import Identity

_SAME_KEY = "Give all processes of a run the same key, and each the address of its own run's processes."


class HostHandshake:
    """The host's end of a new connection: verifies the caller's proof, and admits or refuses the caller."""

    def __init__(self, shared: Shared, callers: Callers, sock: socket.socket) -> None:
        self._shared = shared
        self._callers = callers
        self._caller: Identity | None = None
        self._prover = Prover(shared.credentials.key, calling=False)
        self._ended = False
        self._connection = Connection(shared, sock, self)
        callers.came(self._connection)
        self._deadline = shared.reactor.timers.after(shared.limits.handshake_seconds, self._too_late)
        self._connection.send(Kind.CHALLENGE, self._prover.mine)

    def frame(self, frame: Frame) -> None:
        if self._connection.proven:
            self._greeted(frame)
        else:
            self._proved(frame)

    def ended(self, error: RemoteError, finished: bool) -> None:
        self._ended = True
        self._shared.reactor.timers.cancel(self._deadline)
        self._callers.gone(self._connection)

    def _too_late(self) -> None:
        self._connection.end(PeerLost(f"it did not introduce itself within {self._shared.limits.handshake_seconds} s"))

    def _proved(self, frame: Frame) -> None:
        nonce, proof = frame.raw[:NONCE_NBYTES], frame.raw[NONCE_NBYTES:]
        if frame.header.kind is not Kind.PROOF or not self._prover.meet(nonce):
            raise DamagedFrame(f"a {frame.header.kind.name} before the proof that its sender has the key.")
        if not self._prover.accepts(proof):
            raise Refused("a caller came without the key of this run.")
        self._connection.send(Kind.PROOF, self._prover.proof)
        self._connection.prove(self._prover.seals())

    def _greeted(self, frame: Frame) -> None:
        if frame.header.kind is not Kind.HELLO:
            raise DamagedFrame(f"a {frame.header.kind.name} before the HELLO.")
        caller = Identity.from_meta(frame.meta)
        _agree(self._connection, frame.meta)
        self._shared.reactor.timers.cancel(self._deadline)
        self._connection.pause()
        self._shared.reactor.events.append(lambda: self._admit(caller))

    def _admit(self, caller: Identity) -> None:
        """Admit the caller, or refuse it with the reason. Runs on the owner's thread."""
        if self._ended:
            return
        connection, shared = self._connection, self._shared
        reason = self._callers.objection(caller) or shared.host.admit(caller)
        with shared.reactor.lock:
            if reason is not None:
                shared.refused += 1
                connection.refuse(Refused(reason))
                return
            self._callers.gone(connection)
            self._callers.enter(Inbound(shared, self._callers, connection, caller))
            connection.count_with(caller.name)
            connection.open_up()
            connection.send(Kind.WELCOME, shared.identity.to_meta() | _offer(connection))
            if connection.trusted:
                connection.trust()
            connection.resume()


class CallerHandshake:
    """The caller's end of a new connection to the host `name`.

    It ends with an `outbound` or an `error`, and then `on_end` is called on the owner's thread.
    """

    def __init__(
        self, shared: Shared, name: str, address: tuple[str, int], on_end: Callable[[], None] = nothing
    ) -> None:
        self.outbound: Outbound | None = None
        self._error: RemoteError | None = None
        self._shared = shared
        self._name = name
        self._on_end = on_end
        self._prover = Prover(shared.credentials.key, calling=True)
        self._challenged = False
        self.connection = Connection(shared, _begin(address), self, connecting=True)

    @property
    def error(self) -> RemoteError | None:
        """The error that ended the handshake, or the new connection already."""
        return self._error if self.outbound is None else self.outbound.error

    def frame(self, frame: Frame) -> None:
        kind = frame.header.kind
        if not self.connection.proven:
            self._proved(frame)
        elif kind is Kind.REFUSAL:
            self.connection.end(error_told(frame.meta))
        elif kind is Kind.GOODBYE:
            self.connection.end(PeerLost("it has finished"), finished=True)
        elif kind is Kind.WELCOME:
            self._welcomed(frame)
        else:
            raise DamagedFrame(f"a {kind.name} before the WELCOME.")

    def ended(self, error: RemoteError, finished: bool) -> None:
        if self._error is not None:
            return
        kind = type(error) if isinstance(error, (DamagedFrame, Refused)) else PeerLost
        if kind is PeerLost and self._challenged and not finished:
            kind = GreetingLost
        self._error = kind(f"{self._name} is gone: {error}")
        self._shared.reactor.events.append(self._on_end)

    def _welcomed(self, frame: Frame) -> None:
        host = Identity.from_meta(frame.meta)
        if host.name != self._name:
            raise Refused(f"{self._name} was expected at this address, {host.name} answered: correct the addresses.")
        _agree(self.connection, frame.meta)
        if self.connection.trusted:
            self.connection.trust()
        self.connection.count_with(self._name)
        self.connection.open_up()
        self.outbound = Outbound(self._shared, host, self.connection)
        self._shared.reactor.events.append(self._on_end)

    def _proved(self, frame: Frame) -> None:
        """Answer the host's nonce, check its proof, and then send the own identity."""
        kind = frame.header.kind
        if kind is Kind.REFUSAL:
            self.connection.end(Refused(f"{self._name} did not take this process's key. {_SAME_KEY}"))
        elif kind is Kind.GOODBYE:
            self.connection.end(PeerLost("it has finished"), finished=True)
        elif kind is Kind.CHALLENGE and not self._challenged and self._prover.meet(frame.raw):
            self._challenged = True  # so the listening process is a wire
            self.connection.send(Kind.PROOF, self._prover.mine + self._prover.proof)
        elif kind is not Kind.PROOF or not self._challenged:
            raise DamagedFrame(f"a {kind.name} before the proof that its sender has the key.")
        elif not self._prover.accepts(frame.raw):
            raise Refused(f"the process at its address does not have the key of this run. {_SAME_KEY}")
        else:
            self.connection.prove(self._prover.seals())
            self.connection.send(Kind.HELLO, self._shared.identity.to_meta() | _offer(self.connection))


def _offer(connection: Connection) -> dict[str, bool]:
    """Whether this end can map memory of the peer, and whether it trusts the transport."""
    return {"maps": connection.neighbor is not None, "trusts": connection.trusted}


def _agree(connection: Connection, meta: Mapping[str, Any]) -> None:
    """Use shared memory, and trust the transport, only where both ends do."""
    connection.lends = connection.neighbor is not None and meta.get("maps") is True
    connection.trusted = connection.trusted and meta.get("trusts") is True


def _begin(address: tuple[str, int]) -> socket.socket:
    """Start to connect a socket to `address`. Raises `PeerLost` if that fails at once."""
    near = connect_unix(address[1]) if is_loopback(address[0]) else None
    if near is not None:
        return near
    try:
        family, kind, protocol, _, resolved = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise PeerLost(f"{endpoint(*address)} can't be reached: {error.strerror}") from None
    sock.setblocking(False)
    code = sock.connect_ex(resolved)
    if code not in (0, errno.EINPROGRESS, errno.EWOULDBLOCK):
        sock.close()
        raise PeerLost(f"{endpoint(*address)} can't be reached: {errno.errorcode.get(code, code)}")
    return sock


def endpoint(host: str, port: int) -> str:
    """A host and a port as text; an IPv6 address has brackets.

    >>> endpoint("10.0.0.1", 80), endpoint("fd00::1", 80)
    ('10.0.0.1:80', '[fd00::1]:80')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
