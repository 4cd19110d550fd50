"""The caller's end of a connection: its handshake, then calls, their answers, and their cancellation.

`CallerHandshake` is the `Side` of a new connection. It answers the host's nonce, checks the proof of the host, and
exchanges identities. `Outbound` replaces it.
"""

from __future__ import annotations

import itertools
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dure.core.node import Reply, TensorSpec, nothing
from dure.errors import CallTimeout, DamagedFrame, GreetingLost, NobodyListens, PeerLost, Refused, RemoteError
from dure.runtime.wire.connection import Broken, Connection, Shared
from dure.runtime.wire.frame import Frame, Kind, encode_meta
from dure.runtime.wire.memory import Lease, announced, bytes_of, described, fitting, nbytes_of, parsed_specs, spec_of
from dure.runtime.wire.reactor import begin_connection
from dure.runtime.wire.resumption import AGAIN_SECONDS, TRY_SECONDS, ConnectionLost, WireSession, seconds_left
from dure.runtime.wire.seals import Prover
from dure.runtime.wire.values import Identity, Loss, OnDone, Request

if TYPE_CHECKING:
    import torch

    from dure.runtime.wire.frame import Outgoing
    from dure.runtime.wire.reactor import Timer

_SAME_KEY = "Give all processes of a run the same key, and each the address of its own run's processes."

_KINDS: tuple[type[RemoteError], ...] = (Refused, *Refused.__subclasses__(), CallTimeout, DamagedFrame)

_ERRORS = {kind.__name__: kind for kind in _KINDS}
"""Errors that keep their class on the way to the caller; every other error becomes a `RemoteError`."""


class Pending:
    """A call in progress. It ends once: by `on_done` on the owner's thread, or by `cancel`, without a callback."""

    __slots__ = ("_outbound", "done", "into", "number", "on_done", "outgoing", "request", "timer", "views")

    def __init__(self, outbound: Outbound | None, number: int, request: Request, on_done: OnDone) -> None:
        self._outbound = outbound
        self.number = number
        self.request = request
        self.on_done = on_done
        self.into = [spec_of(tensor) for tensor in request.into or ()]
        if request.at_most:
            self.into = [spec._replace(at_most=True) for spec in self.into]
        self.views = [bytes_of(tensor) for tensor in request.into or ()]
        self.outgoing: Outgoing | None = None
        self.timer: Timer | None = None
        self.done = False

    def places(self, listed: Sequence[tuple[str, int]]) -> list[memoryview]:
        """Memory for the tensors `listed` of a reply, which fit."""
        if not self.request.at_most:
            return self.views
        return [bytes_of(tensor[:numel]) for tensor, (_, numel) in zip(self.request.into or (), listed, strict=True)]

    def cancel(self) -> None:
        """Cancel the call. Afterwards its tensors are neither read nor written; the host may still have executed it.

        Exception: tensors in rooms (`Wire.room_like`) are read by the host until it has answered.
        """
        if not self.done and self._outbound is not None:
            self._outbound.abandon(self)
        self.done = True


class Outbound:
    """The caller's end of an open connection: sends calls to `host` and receives its answers."""

    def __init__(
        self,
        shared: Shared,
        host: Identity,
        connection: Connection,
        address: tuple[str, int],
        session: WireSession | None,
    ) -> None:
        """`session`: it outlives the connection; then it goes on over another one to `address`."""
        self.shared = shared
        self.host = host
        self.name = host.name
        self.connection = connection
        self.session = session
        self.error: RemoteError | None = None
        self._address = address
        self._broken = Broken("")  # why the last connection has ended
        self._until = math.inf  # when it is too late to go on over another one
        self._again: CallerHandshake | None = None
        self._timer: Timer | None = None
        self._done: list[int] = []  # requests whose answers have arrived since the last request
        self.calls: dict[int, Pending] = {}
        self._numbers = itertools.count(1)
        self._abandoned: dict[int, int] = {}  # bytes of the reply of each cancelled call, by number
        self._rooms: dict[int, Lease] = {}  # memory in which the host reads the tensors of each request
        self._receiving: Pending | None = None  # the call whose reply is arriving in its tensors
        self._dropping = False  # whether the arriving reply is skipped
        connection.side = self

    def request(self, request: Request, on_done: OnDone) -> Pending:
        """Send a call. Raises `TypeError` or `ValueError` if its fields or tensors cannot be sent."""
        pending = Pending(self, next(self._numbers), request, on_done)
        payload, meta, raw = self._encoded(request)  # before the call is listed: an error leaves no pending call
        # The connection may have ended before its owner has learned of it: the call fails by `on_done` like others.
        if self.error is not None:
            self.finish(pending, self.error)
            return pending
        self.calls[pending.number] = pending
        if request.timeout is not None:
            pending.timer = self.shared.reactor.timers.after(request.timeout, lambda: self._too_late(pending))
        if self.connection.closed:  # `go_on` sends it
            return pending
        room = self._room(request.tensors)
        if room is None:
            pending.outgoing = self.connection.send(Kind.REQUEST, raw, payload, request=pending.number)
            return pending
        self._rooms[pending.number] = room
        raw = encode_meta(meta | {"memory": self.shared.lender.where(room.tensors)})
        nbytes = sum(map(len, payload))
        pending.outgoing = self.connection.send(Kind.REQUEST, raw, request=pending.number, lent_nbytes=nbytes)
        return pending

    def _encoded(self, request: Request) -> tuple[list[memoryview], dict[str, Any], bytes]:
        """The payload and the meta of a request, which confirms the answers that have arrived since the last one."""
        payload = [bytes_of(tensor) for tensor in request.tensors]
        meta: dict[str, Any] = {
            "service": request.service,
            "method": request.method,
            "fields": request.fields,
            "tensors": [spec_of(tensor)[:2] for tensor in request.tensors],
        }
        if request.into is None:
            meta["borrows"] = True
        if self._done:
            meta["done"] = self._done
        raw = encode_meta(meta)
        self._done = []
        return payload, meta, raw

    def _room(self, tensors: Sequence[torch.Tensor]) -> Lease | None:
        """Memory that the host can read, with large `tensors` or copies of them; None if they must be sent."""
        if not self.connection.lends or sum(tensor.nbytes for tensor in tensors) < self.shared.limits.lent_nbytes:
            return None
        # The tensors lie in a shared buffer of the owner's (`Wire.room_like`): no copy, and no budget of this wire.
        if self.shared.lender.where(tensors) is not None:
            return Lease.of(tensors)
        room = self.shared.rooms.take([spec_of(tensor) for tensor in tensors])
        if room is not None:
            for place, tensor in zip(room.tensors, tensors, strict=True):
                place.copy_(tensor.detach().reshape(-1))
        return room

    def _free_shared(self, number: int) -> None:
        """Free the room of a request: the host has answered, or never gets the request."""
        room = self._rooms.pop(number, None)
        if room is not None:
            room.release()

    def finish(self, pending: Pending, result: Reply | RemoteError) -> None:
        """End a call with `result`, which the owner gets."""
        self.calls.pop(pending.number, None)
        self.shared.reactor.timers.cancel(pending.timer)
        # A call can end before its request has left (a time-out): its tensors are the owner's again from here on.
        if pending.outgoing is not None:
            pending.outgoing.abort()

        def hand_over() -> None:
            # The owner may have cancelled the call since the reply arrived; it then gets no callback, but lent memory
            # still has to go back.
            if not pending.done:
                pending.done = True
                pending.on_done(result)
            elif isinstance(result, Reply):
                result.release()

        self.shared.reactor.events.append(hand_over)

    def abandon(self, pending: Pending) -> None:
        """Cancel a call: stop using its tensors, and tell the host if the request has begun to leave."""
        with self.shared.reactor.lock:
            if self.calls.pop(pending.number, None) is None:
                return
            self.shared.reactor.timers.cancel(pending.timer)
            # Three cases: its reply is arriving, into tensors that are the owner's again; its request has left at least
            # in part, so that the host will answer; or no byte of it has left.
            if self._receiving is pending:
                self._receiving = None
                self._dropping = True
                self.connection.parser.drop()
            elif pending.outgoing is None or not self.connection.withdraw(pending.outgoing):
                # The answer may be under way: it is received and dropped, up to the size that the call allowed.
                self._abandoned[pending.number] = sum(map(nbytes_of, pending.into))
                self.connection.send(Kind.CANCEL, {}, request=pending.number)
            else:
                self._free_shared(pending.number)

    def frame(self, frame: Frame) -> None:
        kind = frame.header.kind
        if kind is Kind.REFUSAL:
            self.connection.end(error_of(frame.meta))
        elif kind is Kind.GOODBYE:
            self.connection.end(PeerLost("it has finished"), finished=True)
        elif kind is Kind.REPLY and not frame.complete:
            self._announced(frame)
        elif kind is Kind.REPLY:
            self._arrived(frame)
        elif kind is Kind.ERROR:
            self._failed(frame)
        else:
            raise DamagedFrame(f"a {kind.name}, which a host never sends.")

    def ended(self, error: RemoteError, finished: bool) -> None:
        if self.error is not None:
            return
        if self.session is None or finished or not isinstance(error, Broken):
            self._fail(error, finished=finished)
            return
        self._receiving, self._dropping = None, False
        self._broken = error
        self._until = time.monotonic() + seconds_left(self.shared.limits, error)
        self._connect_again()

    def give_up(self, error: RemoteError) -> None:
        """End the session, with its connection if it has one."""
        if self.connection.closed:
            self._fail(error, finished=False)
        else:
            self.connection.end(error)

    def _connect_again(self) -> None:
        if self.error is not None:
            return
        try:
            again = CallerHandshake(self.shared, self.name, self._address, self._tried, former=self)
        except PeerLost as error:
            self._not_yet(error, final=isinstance(error, NobodyListens))
            return
        self._again = again
        self._timer = self.shared.reactor.timers.after(
            TRY_SECONDS, lambda: again.connection.end(PeerLost("no welcome in time"))
        )

    def _tried(self) -> None:
        """Look at the end of an attempt to connect again. Runs on the owner's thread."""
        with self.shared.reactor.lock:
            again, self._again = self._again, None
            if again is None or again.outbound is not None or self.error is not None:
                return
            assert again.error is not None
            self._not_yet(again.error, final=again.refused or isinstance(again.error, (NobodyListens, DamagedFrame)))

    def _not_yet(self, error: RemoteError, *, final: bool) -> None:
        """Try again later, or give up: the process has ended, its host refuses this caller, or it is too late."""
        timers = self.shared.reactor.timers
        timers.cancel(self._timer)
        if isinstance(error, NobodyListens):
            self._fail(self._broken, finished=False)
        elif final:
            self._fail(error, finished=False)
        elif time.monotonic() >= self._until:
            self._fail(ConnectionLost(self.name, self.shared.limits.silent_seconds, self._broken), finished=False)
        else:
            self._timer = timers.after(AGAIN_SECONDS, self._connect_again)

    def go_on(self, connection: Connection) -> None:
        """Go on over a new connection: repeat all calls that are not answered."""
        self.shared.reactor.timers.cancel(self._timer)
        self.connection, self._again, self._done = connection, None, []
        connection.side = self
        connection.send(Kind.RETURNED, {"outstanding": list(self.calls)})
        for pending in list(self.calls.values()):
            payload, _, raw = self._encoded(pending.request)
            pending.outgoing = connection.send(Kind.REQUEST, raw, payload, request=pending.number)

    def _fail(self, error: RemoteError, *, finished: bool) -> None:
        """End the session: all calls fail."""
        if self.error is not None:
            return
        self.shared.reactor.timers.cancel(self._timer)
        kind = type(error) if isinstance(error, (DamagedFrame, Refused)) else PeerLost
        # Set before the calls fail: their callbacks may call again, and then get this error at once.
        lost = isinstance(error, ConnectionLost)
        self.error = kind(str(error) if lost else f"{self.name} is gone: {error}")
        self._receiving = None
        # The host may still run and read them: memory that is used again would change while it reads.
        for room in self._rooms.values():
            room.forget()
        self._rooms.clear()
        for pending in list(self.calls.values()):
            where = (
                f"{_shown(pending)}: {error}"
                if lost
                else f"{self.name} is gone before {_shown(pending)} was answered: {error}"
            )
            self.finish(pending, kind(where))
        if self._again is not None:
            self._again.connection.end(PeerLost("its session has ended"))
        loss = Loss(self.name, str(error), finished, False, self.host.incarnation)
        self.shared.reactor.events.append(lambda: self.shared.host.lost(loss))

    def _too_late(self, pending: Pending) -> None:
        self.abandon(pending)
        error = CallTimeout(f"{self.name} did not answer {_shown(pending)} within {pending.request.timeout} s.")
        pending.timer = None
        self.finish(pending, error)

    def _expected(self, frame: Frame, pending: Pending) -> RemoteError | None:
        """The error if the reply does not fit `into`; None if it does."""
        listed = frame.meta.get("tensors")
        specs = fitting(pending.into, listed)
        weighs = None if specs is None else sum(map(nbytes_of, specs))
        lent = weighs or 0 if "memory" in frame.meta else 0
        if weighs == frame.header.payload_nbytes + lent and isinstance(frame.meta.get("fields"), dict):
            return None
        answered = f"{self.name} answered {_shown(pending)} with {announced(listed)}"
        return RemoteError(f"{answered}, `into` takes {described(pending.into)}: give `into` tensors that fit.")

    def _announced(self, frame: Frame) -> None:
        pending = self.calls.get(frame.header.request)
        size = frame.header.payload_nbytes
        most = self.shared.limits.drain_nbytes
        if pending is None:
            if frame.header.request not in self._abandoned:
                raise DamagedFrame(f"a reply to request {frame.header.request}, which was not made.")
            # A cancelled call of a large tensor is no damage; a host that sends more than it was asked for is.
            most = max(most, self._abandoned[frame.header.request])
        else:
            error = self._expected(frame, pending)
            if error is None:
                self._receiving = pending
                self.connection.parser.place(pending.places(frame.meta["tensors"]))
                return
            self.finish(pending, error)
            self._abandoned[pending.number] = 0  # its frame still arrives, and is skipped
        if size > most:
            raise DamagedFrame(f"a reply of {size} bytes to a call that has ended; at most {most} are skipped.")
        self._dropping = True
        self.connection.parser.drop()

    def _arrived(self, frame: Frame) -> None:
        number = frame.header.request
        self._free_shared(number)
        if self._abandoned.pop(number, None) is not None or self._dropping:
            self._dropping = False
            self._confirm(frame)
            return
        if frame.aborted:
            raise DamagedFrame("a reply that its host gave up.")
        self._receiving = None
        pending = self.calls.get(number)
        if pending is None:
            raise DamagedFrame(f"a reply to request {number}, which was not made.")
        if pending.request.into is None and "memory" in frame.meta:
            self._borrow(frame, pending)
            return
        error = None if frame.header.payload_nbytes else self._expected(frame, pending)
        # The copy counts only if the connection is still open behind it: a host that has failed or finished writes to
        # its memory without waiting for this process.
        if error is None and "memory" in frame.meta and not self._read(frame, pending.request.into or ()):
            self.connection.end(PeerLost("its connection closed while its memory was read"))
            return
        # Before the callback: the host can go on while the owner works with the reply.
        self._confirm(frame)
        self.finish(pending, error or Reply(frame.meta["fields"], pending.request.into or ()))

    def _borrow(self, frame: Frame, pending: Pending) -> None:
        """End a call with tensors in the host's memory, valid until the reply's `release`."""
        specs = parsed_specs(frame.meta.get("tensors"))
        if specs is None or not isinstance(frame.meta.get("fields"), dict):
            raise DamagedFrame("a reply without fields, or of tensors that it does not describe.")
        lent = self.connection.borrowed(frame.meta["memory"], specs)
        self.finish(pending, Reply(frame.meta["fields"], lent, partial(self._release, frame)))

    def _release(self, frame: Frame) -> None:
        with self.shared.reactor.lock:
            self._confirm(frame)
        if self.shared.reactor.lent:
            self.shared.reactor.wake()

    def _read(self, frame: Frame, into: Sequence[torch.Tensor]) -> bool:
        """Copy tensors from the host's memory. Return whether the host still lent them after the copy."""
        listed = [TensorSpec(*each) for each in frame.meta["tensors"]]
        lent = self.connection.borrowed(frame.meta["memory"], listed)
        for place, tensor in zip(into, lent, strict=True):
            place.detach().view(-1)[: tensor.numel()].copy_(tensor)
        return not self.connection.deserted()

    def _confirm(self, frame: Frame) -> None:
        """Tell the host that an answer has arrived: by the next request or, if the host lends its tensors, now."""
        if self.session is not None and not frame.meta.get("tensors"):
            self._done.append(frame.header.request)
        elif self.session is not None or "memory" in frame.meta:
            self.connection.send(Kind.RETURNED, {}, request=frame.header.request)

    def _failed(self, frame: Frame) -> None:
        number = frame.header.request
        self._free_shared(number)
        self._confirm(frame)
        if self._abandoned.pop(number, None) is not None:
            return
        pending = self.calls.get(number)
        if pending is None:
            raise DamagedFrame(f"an error for request {number}, which was not made.")
        error = error_of(frame.meta)
        self.finish(pending, type(error)(f"{self.name}, {_shown(pending)}: {error}"))


def _shown(pending: Pending) -> str:
    return f"{pending.request.service}.{pending.request.method}"


class CallerHandshake:
    """The caller's end of a new connection to the host `name`.

    It ends with an `outbound` or an `error`, and then `on_end` is called on the owner's thread. `former` goes on over
    the new connection. `refused`: the host has said that it does not want this caller.
    """

    def __init__(
        self,
        shared: Shared,
        name: str,
        address: tuple[str, int],
        on_end: Callable[[], None] = nothing,
        *,
        former: Outbound | None = None,
    ) -> None:
        self.outbound: Outbound | None = None
        self.refused = False
        self._former = former
        self._address = address
        self._error: RemoteError | None = None
        self._shared = shared
        self._name = name
        self._on_end = on_end
        self._prover = Prover(shared.credentials.key, calling=True)
        self._challenged = False
        self.connection = Connection(shared, begin_connection(address), self, connecting=True)
        self._session: WireSession | None = None
        if former is not None and former.session is not None:
            self._session = former.session._replace(resumes=True)
        elif shared.listens is not None and self.connection.crosses_network:
            self._session = WireSession(secrets.token_hex(8), shared.listens)

    @property
    def error(self) -> RemoteError | None:
        """The error that ended the handshake, or the new connection already."""
        return self._error if self.outbound is None else self.outbound.error

    def frame(self, frame: Frame) -> None:
        kind = frame.header.kind
        if not self.connection.proven:
            self._proved(frame)
        elif kind is Kind.REFUSAL:
            self.refused = True
            self.connection.end(error_of(frame.meta))
        elif kind is Kind.GOODBYE:
            self.connection.end(PeerLost("it has finished"), finished=True)
        elif kind is Kind.WELCOME:
            self._welcomed(frame)
        else:
            raise DamagedFrame(f"a {kind.name} before the WELCOME.")

    def ended(self, error: RemoteError, finished: bool) -> None:
        if self._error is not None:
            return
        kind = type(error) if isinstance(error, (DamagedFrame, Refused, NobodyListens, GreetingLost)) else PeerLost
        # A wire listens there, and lost this greeting: one of both processes was stopped. It is worth another try.
        if kind is PeerLost and self._challenged and not finished:
            kind = GreetingLost
        self._error = kind(f"{self._name} is gone: {error}")
        self._shared.reactor.events.append(self._on_end)

    def _welcomed(self, frame: Frame) -> None:
        host = Identity.from_meta(frame.meta)
        if host.name != self._name:
            raise Refused(f"{self._name} was expected at this address, {host.name} answered: correct the addresses.")
        self.connection.agree(frame.meta)
        # The host has done the same right after WELCOME: from here on payloads have checksums.
        if self.connection.trusted:
            self.connection.trust()
        self.connection.count_with(self._name)
        self.connection.open_up()
        former = self._former
        if former is None:
            session = self._session if frame.meta.get("keeps") is True else None
            self.outbound = Outbound(self._shared, host, self.connection, self._address, session)
        else:
            self.outbound = former
            former.go_on(self.connection)
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
            hello = self._shared.identity.to_meta() | self.connection.offer()
            if self._session is not None:
                hello["session"] = self._session
            self.connection.send(Kind.HELLO, hello)


def error_of(meta: Mapping[str, Any]) -> RemoteError:
    """The error that a frame of the host describes."""
    kind = _ERRORS.get(str(meta.get("error")), RemoteError)
    return kind(str(meta.get("message")))
