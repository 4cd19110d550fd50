"""The host's end of a connection: its handshake, then requests until the owner gets them, and their answers.

accepted ── CHALLENGE ──► greeting ── PROOF ──► proven ── HELLO ──► being admitted ── WELCOME ──► open
                             │ no key, deadline, garbage               │ refused
                             ▼                                         ▼

`HostHandshake` is the `Side` of a new connection. `Inbound` replaces it.
"""

from __future__ import annotations

import socket
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dure.core.node import Call, Reply, TensorSpec, nothing
from dure.errors import DamagedFrame, PeerLost, Refused, RemoteError
from dure.runtime.wire.connection import Broken, Connection, Shared
from dure.runtime.wire.frame import Frame, Kind
from dure.runtime.wire.memory import (
    Lease,
    Share,
    Stall,
    announced,
    bytes_of,
    described,
    fitting,
    has_memory,
    nbytes_of,
    spec_of,
)
from dure.runtime.wire.resumption import (
    AGAIN_SECONDS,
    ConnectionLost,
    KeptAnswers,
    ListenerProbe,
    SupersededSide,
    WireSession,
    seconds_left,
)
from dure.runtime.wire.seals import NONCE_NBYTES, Prover
from dure.runtime.wire.values import Identity, Loss

if TYPE_CHECKING:
    from dure.runtime.wire.reactor import Timer

_LOOK_SECONDS = 0.25  # period of the check on callers that wait for memory


class Callers:
    """The callers of a host: connected, greeting, evicted, and waiting for memory."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.open: dict[str, Inbound] = {}
        self.greeting: OrderedDict[Connection, None] = OrderedDict()  # whose handshake is not done
        # Callers that wait for memory, first come first served. A connection stands in line at most once: it reads no
        # further request before this one has its memory.
        self._line: deque[Inbound] = deque()
        # By name, the least incarnation that is admitted. It outlives the connection: a late packet of an evicted
        # process, or the process itself after a pause, must not come back as the process that has replaced it.
        self._fence: dict[str, int] = {}
        self._looking = False

    def came(self, connection: Connection) -> None:
        self.greeting[connection] = None
        if len(self.greeting) > self.shared.limits.handshakes:
            # A process without the key can open connections, but only displace others that have not proved theirs.
            oldest = next(iter(self.greeting))
            oldest.end(PeerLost("too many connections were half-open"))

    def gone(self, connection: Connection) -> None:
        self.greeting.pop(connection, None)

    def objection(self, caller: Identity) -> str | None:
        """The reason of the wire itself to refuse `caller`; None if it has none."""
        mine = self.shared.identity
        if caller.job != mine.job:
            return f"{caller.name} belongs to job {caller.job!r}, {mine.name} to job {mine.job!r}."
        fence = self._fence.get(caller.name, 0)
        if caller.incarnation < fence:
            return (
                f"{caller.name} comes as incarnation {caller.incarnation}, "
                f"{mine.name} admits {fence} or later: it was evicted."
            )
        there = self.open.get(caller.name)
        if there is not None and there.caller.incarnation > caller.incarnation:
            return (
                f"{caller.name} comes as incarnation {caller.incarnation}, "
                f"but is connected to {mine.name} as {there.caller.incarnation}."
            )
        return None

    def enter(self, inbound: Inbound) -> None:
        name = inbound.caller.name
        there = self.open.get(name)
        if there is not None:
            # Its requests that the owner has not run yet are dropped (`hand_over`): the new incarnation repeats them.
            there.fenced = True
            there.give_up(Refused(f"{name} connected again as incarnation {inbound.caller.incarnation}."))
        self.open[name] = inbound

    def former(self, caller: Identity, session: WireSession | None) -> Inbound | None:
        """The end that has the session of a caller, which may have lost its connection."""
        there = self.open.get(caller.name)
        if there is None or session is None or not session.resumes or there.fenced or there.session is None:
            return None
        return there if (there.caller, there.session.name) == (caller, session.name) else None

    def leave(self, inbound: Inbound) -> None:
        if self.open.get(inbound.caller.name) is inbound:
            del self.open[inbound.caller.name]

    def evict(self, name: str, incarnation: int, reason: str) -> None:
        """Close the connection of `name`, and admit it again only under a larger incarnation."""
        self._fence[name] = max(self._fence.get(name, 0), incarnation + 1)
        there = self.open.get(name)
        if there is not None and there.caller.incarnation <= incarnation:
            # As above: nothing of an evicted caller may count after the owner has decided that it is gone.
            there.fenced = True
            there.give_up(Refused(f"{name}, incarnation {incarnation}, was evicted: {reason}"))

    def memory_for(self, inbound: Inbound, specs: Sequence[TensorSpec]) -> Lease | None:
        """Memory for a payload; None if there is none, and `inbound` waits in line for a call of `placed`."""
        # No overtaking, although a small payload might fit: a stream of them would let a large one wait for ever.
        # Callers in line that already hold their whole share do not count: they wait for themselves.
        lease = None if any(map(self._may_hold, self._line)) else self._take(inbound)
        if lease is None:
            self._line.append(inbound)
            self._look_soon()
        return lease

    def leave_line(self, inbound: Inbound) -> None:
        """Wait for no memory any more: the request is not received over this connection."""
        if inbound in self._line:
            self._line.remove(inbound)

    def memory_freed(self) -> None:
        if self._line:
            # In the next turn, not here: a release can come from the middle of a frame of another connection.
            self.shared.reactor.soon(self._serve_line)

    def _take(self, inbound: Inbound) -> Lease | None:
        # Lent tensors count as if they were copied here: otherwise lending would evade the budget of requests that
        # wait.
        elsewhere = inbound.waiting is not None
        return self.shared.staging.take(inbound.wanted, elsewhere=elsewhere, share=inbound.share)

    def _may_hold(self, inbound: Inbound) -> bool:
        """Whether `inbound` waits for memory that others hold, and does not hold its own share already."""
        return not inbound.connection.closed and not self.shared.staging.exceeds(inbound.share, inbound.wanted)

    def _serve_line(self) -> None:
        """Give memory to the waiting callers, in order."""
        for waiting in list(self._line):
            if waiting.connection.closed:
                self._line.remove(waiting)
            elif self._may_hold(waiting):
                lease = self._take(waiting)
                # The first that may hold memory gets the next that is free; the ones behind it keep waiting.
                if lease is None:
                    return
                self._line.remove(waiting)
                waiting.placed(lease)

    def _look_soon(self) -> None:
        if not self._looking:
            self._looking = True
            self.shared.reactor.timers.after(_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        """End waiting connections whose caller is gone, which no read would notice, and stalled payloads."""
        self._looking = False
        # A caller that stops in the middle of a payload holds memory for which others wait. Nothing else would end it:
        # its process may live, and its connection answer keep-alives.
        for inbound in list(self.open.values()):
            inbound.check_progress()
        for waiting in list(self._line):
            # A waiting connection is not read, so that its end is not seen by a read either.
            if waiting.connection.deserted():
                waiting.connection.end(PeerLost("its connection closed in the middle of a message"))
        self._serve_line()
        if self._line:
            self._look_soon()


class HostHandshake:
    """The host's end of a new connection: verifies the caller's proof, and admits or refuses the caller."""

    def __init__(self, shared: Shared, callers: Callers, sock: socket.socket) -> None:
        self._shared = shared
        self._callers = callers
        self._session: WireSession | None = None
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
        self._session = WireSession.of(frame.meta) if self._connection.crosses_network else None
        self._connection.agree(frame.meta)
        self._shared.reactor.timers.cancel(self._deadline)
        self._connection.pause()
        self._shared.reactor.events.append(lambda: self._admit(caller))

    def _admit(self, caller: Identity) -> None:
        """Admit the caller, or refuse it with the reason. Runs on the owner's thread."""
        if self._ended:
            return
        connection, shared, session = self._connection, self._shared, self._session
        reason = self._callers.objection(caller) or shared.host.admit(caller)
        with shared.reactor.lock:
            if reason is not None:
                shared.refused += 1
                connection.refuse(Refused(reason))
                return
            inbound = self._callers.former(caller, session)
            if inbound is None and session is not None and session.resumes:
                connection.refuse(PeerLost(f"{shared.identity.name} has not waited any longer for {caller.name}."))
                return
            self._callers.gone(connection)
            # The side changes before WELCOME leaves: the caller may send its first request at once.
            if inbound is None:
                inbound = Inbound(shared, self._callers, connection, caller, session)
                self._callers.enter(inbound)
            else:
                inbound.go_on(connection)
            connection.count_with(caller.name)
            connection.open_up()
            keeps = {"keeps": session is not None}
            connection.send(Kind.WELCOME, shared.identity.to_meta() | connection.offer() | keeps)
            # After WELCOME, which is the last frame under the strict seals of the handshake; the caller does the same.
            if connection.trusted:
                connection.trust()
            if not inbound.full:
                connection.resume()


class Inbound:
    """The host's end of an open connection: receives the requests of `caller` and sends the answers.

    With a `session` it outlives the connection, and goes on over another one.
    """

    def __init__(
        self,
        shared: Shared,
        callers: Callers,
        connection: Connection,
        caller: Identity,
        session: WireSession | None = None,
    ) -> None:
        self.shared = shared
        self.callers = callers
        self.connection = connection
        self.caller = caller
        self.session = session
        self.fenced = False
        self.wanted: Sequence[TensorSpec] = ()
        self.waiting: Frame | None = None  # a request with lent tensors that waits until they can be mapped
        self.answers: dict[int, Answer] = {}
        self.copied: dict[int, Callable[[], None]] = {}  # releases of lent replies that the caller copies
        self.lent: dict[int, Callable[[], None]] = {}  # releases of lent replies that the caller keeps reading
        self.share = Share()
        self._lease: Lease | None = None
        self._stalled = Stall(shared.limits)
        self._dropping = False
        self.full = False
        self._ended = False
        self._kept = KeptAnswers(shared)
        self._broken = Broken("")  # why the last connection has ended
        self._deadline: Timer | None = None
        connection.side = self

    def frame(self, frame: Frame) -> None:
        header = frame.header
        if (header.rank, header.incarnation) != (self.caller.rank, self.caller.incarnation):
            raise DamagedFrame(
                f"a frame of rank {header.rank}, incarnation {header.incarnation} from {self.caller.name}."
            )
        if header.kind is Kind.REQUEST:
            self._kept.free(_numbers(frame.meta, "done"))
            if self.session is not None and (header.request in self.answers or header.request in self._kept):
                self._repeated(frame)
            elif frame.complete:
                self._arrived(frame)
            else:
                self._announced(frame)
        elif header.kind is Kind.CANCEL:
            if header.request in self.answers:
                self.answers[header.request].cancelled = True
        elif header.kind is Kind.RETURNED:
            if "outstanding" in frame.meta:
                self._kept.free_all_but(_numbers(frame.meta, "outstanding"))
            self._kept.free([header.request])
            for kept in (self.copied, self.lent):
                if header.request in kept:
                    self.shared.reactor.events.append(kept.pop(header.request))
        elif header.kind is Kind.GOODBYE:
            self.connection.end(PeerLost("it has finished"), finished=True)
        elif header.kind is Kind.REFUSAL:
            self.connection.end(PeerLost(f"it said: {frame.meta.get('message')}"))
        else:
            raise DamagedFrame(f"a {header.kind.name}, which a caller never sends.")

    def placed(self, lease: Lease) -> None:
        """Use the memory for the announced payload, or for the tensors that the caller lends."""
        frame, self.waiting = self.waiting, None
        if frame is None:
            self._receive_into(lease)
        else:
            self.connection.guarded(lambda: self._borrow(frame, lease))
        self.connection.resume()

    def ended(self, error: RemoteError, finished: bool) -> None:
        if self._ended:
            return
        if self.session is None or finished or self.fenced or not isinstance(error, Broken):
            self._finish(error, finished=finished)
            return
        self._drop_arriving()
        self._broken = error
        left = seconds_left(self.shared.limits, error)
        self._deadline = self.shared.reactor.timers.after(left, self._too_late)
        self._ask()

    def give_up(self, error: RemoteError) -> None:
        """End the session, with its connection if it has one: the caller gets the reason."""
        if self.connection.closed:
            self._finish(error, finished=False)
        else:
            self.connection.refuse(error)

    def go_on(self, connection: Connection) -> None:
        """Go on over a new connection of the same session."""
        old, self.connection = self.connection, connection
        connection.side = self
        self.shared.reactor.timers.cancel(self._deadline)
        if not old.closed:  # only the caller has seen its end
            old.side = SupersededSide()
            old.end(PeerLost("connected again"))
            self._drop_arriving()

    def _ask(self) -> None:
        """Ask the caller's machine whether its process still runs, until it has connected again."""
        if self.session is not None and self.connection.closed and not self._ended:
            ListenerProbe(self.shared, self.session.listens, self._asked)

    def _asked(self, answer: bool | None) -> None:
        if answer is False and self.connection.closed:
            self._finish(self._broken, finished=False)
        else:
            self.shared.reactor.timers.after(AGAIN_SECONDS, self._ask)

    def _too_late(self) -> None:
        seconds = self.shared.limits.silent_seconds
        self._finish(ConnectionLost(self.caller.name, seconds, self._broken), finished=False)

    def _drop_arriving(self) -> None:
        """Forget the request that was arriving: it comes again, or never."""
        self._dropping, self.waiting = False, None
        self.callers.leave_line(self)
        if self._lease is not None:
            self._lease.release()
            self._lease = None
            self.callers.memory_freed()

    def _finish(self, error: RemoteError, *, finished: bool) -> None:
        if self._ended:
            return
        self._ended = True
        self.shared.reactor.timers.cancel(self._deadline)
        # First out of the table: the callbacks below must not find this caller as connected.
        self.callers.leave(self)
        self._take_back(finished=finished)
        self._kept.free_all_but(())
        self._drop_arriving()
        loss = Loss(self.caller.name, str(error), finished, True, self.caller.incarnation)
        self.shared.reactor.events.append(lambda: self.shared.host.lost(loss))

    def _take_back(self, *, finished: bool) -> None:
        """Release lent replies, except for memory that a running caller may still read: it is never used again."""
        if self.copied or self.lent:
            self.connection.hang_up()  # before the memory is written to: a caller checks the connection after a copy
        self.shared.reactor.events.extend(self.copied.values())
        # A caller that still runs may be reading lent memory, whatever became of its connection. Only its
        # GOODBYE or its end shows that it does not. Without either, the owner is never told to reuse the memory.
        if finished or not has_memory(self.connection.neighbor):
            self.shared.reactor.events.extend(self.lent.values())
        self.copied.clear()
        self.lent.clear()

    def answered(self, request: int) -> None:
        """Remove a request from the outstanding ones, and read on if their number had stopped that."""
        self.answers.pop(request, None)
        if self.full and len(self.answers) < self.shared.limits.outstanding:
            self.full = False
            self.connection.resume()

    def _announced(self, frame: Frame) -> None:
        try:
            specs = self._specs(frame)
        except Refused as error:
            self._refuse(frame, error)
            return
        self.wanted = specs
        lease = self.callers.memory_for(self, specs)
        if lease is None:
            self.connection.pause()
        else:
            self._receive_into(lease)

    def check_progress(self) -> None:
        """End the connection if its payload is stalled. Called repeatedly while others wait for memory."""
        if self._lease is None or self.connection.paused:
            return
        if self._stalled.is_over(self.connection.received_nbytes):
            size = self._lease.memory.nbytes
            self.connection.end(PeerLost(f"its payload of {size} bytes stalled while others waited for memory"))

    def _receive_into(self, lease: Lease) -> None:
        self._lease = lease
        self._stalled.begin(self.connection.received_nbytes)
        self.connection.parser.place(lease.memory.views)

    def _refuse(self, frame: Frame, error: Refused) -> None:
        self.shared.refused += 1
        self._send_error(frame.header.request, error)
        size, most = frame.header.payload_nbytes, self.shared.limits.drain_nbytes
        if frame.complete:
            return
        if size > most:
            self.connection.refuse(
                Refused(f"{error} Its payload of {size} bytes is more than the {most} that are skipped.")
            )
        else:
            self._dropping = True
            self.connection.parser.drop()

    def _specs(self, frame: Frame) -> Sequence[TensorSpec]:
        """The tensors that the frame announces. Raises `Refused` if the service expects others."""
        service, method = frame.meta.get("service"), frame.meta.get("method")
        if (
            not isinstance(service, str)
            or not isinstance(method, str)
            or not isinstance(frame.meta.get("fields"), dict)
        ):
            raise DamagedFrame("a request without service, method and fields.")
        if frame.header.request in self.answers:
            raise DamagedFrame(f"request {frame.header.request} is outstanding already.")
        try:
            expected = [TensorSpec(*spec) for spec in self.shared.host.expects(service, method)]
        except (LookupError, TypeError, ValueError):
            raise Refused(f"{self.shared.identity.name} has no {service!r} with a method {method!r}.") from None
        listed = frame.meta.get("tensors")
        specs = fitting(expected, listed)
        if specs is None:
            raise Refused(
                f"{service}.{method} carries {described(expected)}, {self.caller.name} announced {announced(listed)}."
            )
        size = 0 if "memory" in frame.meta else sum(map(nbytes_of, specs))
        if size != frame.header.payload_nbytes:
            raise DamagedFrame(
                f"{described(specs)} weigh {size} bytes, the frame announces {frame.header.payload_nbytes}."
            )
        return specs

    def _arrived(self, frame: Frame) -> None:
        lease, self._lease = self._lease, None
        if self._dropping:
            self._dropping = False
            return
        if frame.aborted:
            if lease is not None:
                lease.release()
                self.callers.memory_freed()
            self._send_error(frame.header.request, RemoteError("its caller gave it up."))
            return
        if lease is None:
            try:
                specs = self._specs(frame)
            except Refused as error:
                self._refuse(frame, error)
                return
            if "memory" in frame.meta:
                self._wait_to_borrow(frame, specs)
                return
            lease = Lease.of_nothing(specs)
        self._deliver(frame, lease)

    def _repeated(self, frame: Frame) -> None:
        """Skip a request that came over an earlier connection too, and send its answer if there is one."""
        self._dropping = not frame.complete
        if self._dropping:
            self.connection.parser.drop()
        elif frame.header.request in self._kept:
            self._kept.send(frame.header.request, self.connection)

    def _wait_to_borrow(self, frame: Frame, specs: Sequence[TensorSpec]) -> None:
        """Borrow the tensors of a request now, or when memory is free: borrowed bytes count as received ones."""
        # Set before the attempt: `placed` may come later from the line, and finds both here.
        self.wanted, self.waiting = specs, frame
        lease = self.callers.memory_for(self, specs)
        if lease is None:
            self.connection.pause()
            return
        self.waiting = None
        self._borrow(frame, lease)

    def _borrow(self, frame: Frame, lease: Lease) -> None:
        """Deliver a request whose tensors are in memory of its caller."""
        self._lease = lease  # released if the connection ends in the next line
        lease.memory.tensors = self.connection.borrowed(frame.meta["memory"], self.wanted)
        self._lease = None
        self._deliver(frame, lease)

    def _deliver(self, frame: Frame, lease: Lease) -> None:
        meta = frame.meta
        answer = Answer(self, frame.header.request, lease, borrows=meta.get("borrows") is True)
        self.answers[frame.header.request] = answer
        # An owner that answers slowly would otherwise collect requests without limit; TCP makes the caller wait
        # instead.
        if len(self.answers) >= self.shared.limits.outstanding:
            self.full = True
            self.connection.pause()
        call = Call(self.caller.name, meta["method"], meta["fields"], lease.tensors, answer.release)

        def hand_over() -> None:
            # Decided here, on the owner's thread: the fence may have come after the frame.
            if self.fenced:
                answer.release()
            else:
                self.shared.host.request(meta["service"], call, answer)

        self.shared.reactor.events.append(hand_over)

    def lend(self, request: int, reply: Reply, meta: dict[str, Any], *, for_long: bool) -> bool:
        """Let the caller read a large reply in memory; `for_long`: until it releases it. Return whether that works."""
        nbytes = sum(tensor.nbytes for tensor in reply.tensors)
        if self._ended or not self.connection.lends or nbytes < self.shared.limits.lent_nbytes:
            return False
        where = self.shared.lender.where(reply.tensors)
        if where is None:
            return False
        # The owner may not reuse the tensors until RETURNED, or the end of the connection (`_take_back`).
        (self.lent if for_long else self.copied)[request] = reply.release
        self.connection.send(Kind.REPLY, meta | {"memory": where}, request=request, lent_nbytes=nbytes)
        return True

    def send(
        self,
        kind: Kind,
        meta: dict[str, Any],
        payload: Sequence[memoryview] = (),
        *,
        request: int,
        release: Callable[[], None] = nothing,
    ) -> None:
        """Send an answer now and, if it does not arrive, again over the next connection of the session."""
        if self.session is None or self._ended:
            events = self.shared.reactor.events
            self.connection.send(kind, meta, payload, request=request, on_sent=lambda: events.append(release))
            return
        self._kept.keep(request, kind, meta, payload, release)
        self._kept.send(request, self.connection)

    def _send_error(self, request: int, error: RemoteError) -> None:
        meta = {"error": type(error).__name__, "message": str(error)[: 1 << 16]}
        self.send(Kind.ERROR, meta, request=request)


class Answer:
    """Answers one request, once."""

    __slots__ = ("_borrows", "_inbound", "_lease", "_request", "cancelled", "sent")

    def __init__(self, inbound: Inbound, request: int, lease: Lease, *, borrows: bool = False) -> None:
        self._borrows = borrows
        self._inbound = inbound
        self._request = request
        self._lease: Lease | None = lease
        self.cancelled = False
        self.sent = False

    def __call__(self, answer: Reply | RemoteError) -> None:
        if self.sent:
            raise RuntimeError(
                f"request {self._request} of {self._inbound.caller.name} was answered already: answer once."
            )
        with self._inbound.shared.reactor.lock:
            self._send(answer)
            self.sent = True
            self.release()
            self._inbound.answered(self._request)

    def release(self) -> None:
        with self._inbound.shared.reactor.lock:
            if self._lease is not None:
                self._lease.release()
                self._lease = None
                self._inbound.callers.memory_freed()

    def _send(self, answer: Reply | RemoteError) -> None:
        inbound = self._inbound
        events = inbound.shared.reactor.events
        if isinstance(answer, RemoteError):
            inbound._send_error(self._request, answer)
        elif self.cancelled:
            inbound._send_error(self._request, RemoteError("cancelled."))
            events.append(answer.release)
        else:
            meta = {"fields": answer.fields, "tensors": [spec_of(tensor)[:2] for tensor in answer.tensors]}
            payload = [bytes_of(tensor) for tensor in answer.tensors]
            if inbound.lend(self._request, answer, meta, for_long=self._borrows):
                return
            inbound.send(Kind.REPLY, meta, payload, request=self._request, release=answer.release)


def _numbers(meta: Mapping[str, Any], key: str) -> Sequence[int]:
    """The numbers of requests in a meta. Raises `DamagedFrame`."""
    found = meta.get(key, ())
    if not isinstance(found, Sequence) or not all(isinstance(number, int) for number in found):
        raise DamagedFrame(f"{key} of a frame lists numbers of requests, got {found!r}.")
    return found
