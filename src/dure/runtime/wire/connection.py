"""One connection: the frames that its socket carries in both directions. The meaning of a frame is its side's."""

from __future__ import annotations

import contextlib
import math
import os
import select
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from dure.core.node import TensorSpec
from dure.errors import DamagedFrame, DureError, PeerLost, Refused, RemoteError
from dure.runtime.wire.frame import (
    GREETING_NBYTES,
    META_NBYTES,
    Frame,
    Header,
    Kind,
    Outgoing,
    Parser,
    encode_meta,
    job_code,
)
from dure.runtime.wire.memory import Borrower, Lender, Staging, process_behind
from dure.runtime.wire.reactor import Reactor, loss_by, silence, tune
from dure.runtime.wire.seals import REFUSAL, UNPROVEN_NBYTES, Credentials, KeyedSeals, PlainSeals, Seals
from dure.runtime.wire.values import HostCallbacks, Identity, PeerTraffic, WireLimits

if TYPE_CHECKING:
    import torch


LOOK_SECONDS = 1.0
"""Period of the look at the silence of peers."""

SILENT_SECONDS = 3.0
"""Silence of a machine that shows that its link is down: keep-alives ask it after two seconds, then every second."""

SETTLE_SECONDS = 5.0
"""Time after a silence in which messages from before may still arrive: TCP tries again every few seconds."""

_WAKE_NBYTES = 1 << 20  # while bulk data arrive, sleep until so much is available


class Broken(PeerLost):
    """The transport has ended a connection: its peer has failed, or the network between them.

    `silence`: seconds for which the machine of the peer had not answered before.
    """

    def __init__(self, reason: str, silence: float = 0.0) -> None:
        super().__init__(reason)
        self.silence = silence

    @staticmethod
    def by(error: OSError, sock: socket.socket) -> Broken:
        """The end of a connection by an error of its socket."""
        return Broken(error.strerror or str(error), silence(sock))


class Shared:
    """State that all connections of one wire share."""

    def __init__(
        self, identity: Identity, host: HostCallbacks, limits: WireLimits, reactor: Reactor, credentials: Credentials
    ) -> None:
        self.identity = identity
        self.host = host
        self.limits = limits
        self.reactor = reactor
        self.credentials = credentials
        self.job = job_code(identity.job)
        self.staging = Staging(limits.staging_nbytes)
        self.lender = Lender()
        self.rooms = Staging(limits.staging_nbytes, self.lender.empty)  # for tensors of requests
        self.borrower = Borrower(limits.staging_nbytes)
        self.traffic: dict[str, PeerTraffic] = {}
        self.connections: set[Connection] = set()
        self.listens: tuple[str, int] | None = None  # an address where peers can see whether this process runs
        self.damaged = 0
        self.refused = 0
        self._looking = False

    def look_at_links(self) -> None:
        """Look for silent peers, from now on until there are no connections to other machines."""
        if not self._looking:
            self._looking = True
            self.reactor.timers.after(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._looking = False
        for connection in self.connections:
            if connection.crosses_network:
                if silence(connection.sock) >= SILENT_SECONDS:
                    connection.silent_at = time.monotonic()
                self.look_at_links()

    def traffic_with(self, peer: str) -> PeerTraffic:
        return self.traffic.setdefault(peer, PeerTraffic())


class Side(Protocol):
    """The end of a connection that handles its frames: a handshake, then an `Inbound` or `Outbound`."""

    def frame(self, frame: Frame) -> None: ...

    def ended(self, error: RemoteError, finished: bool) -> None: ...


class Connection:
    """One connection: reads and writes frames in bounded turns. At its end it tells its `Side` the reason, once."""

    def __init__(self, shared: Shared, sock: socket.socket, side: Side, *, connecting: bool = False) -> None:
        self.shared = shared
        self.sock = sock
        self.side = side
        # A peer that has not proved that it has the key gets 64 bytes of memory, and none of its bytes is decoded.
        self.parser = Parser(None, meta_limit=UNPROVEN_NBYTES)
        self.parser.reads = False
        self.traffic = PeerTraffic()  # of its own until the name of the peer is known
        self.seals: Seals = PlainSeals()
        self.queue: deque[Outgoing] = deque()
        self.closed = False
        self.paused = False
        self.received_nbytes = 0
        self.proven = False  # both ends have proved that they have the key
        self.neighbor = process_behind(sock)  # process whose memory this one may read
        self.lends = False  # whether the neighbor may read memory of this process
        self.trusted = shared.credentials.integrity == "checksum" or sock.family == socket.AF_UNIX
        self.crosses_network = sock.family != socket.AF_UNIX  # a Unix socket ends with one of its processes only
        self.silent_at = -math.inf  # when the peer's machine was last found silent
        self._connecting = connecting
        self._closing = False  # the last frame is in the queue; received bytes are dropped
        self._low = 1
        tune(sock, shared.limits.silent_seconds)
        shared.connections.add(self)
        if self.crosses_network:
            shared.look_at_links()
        self._watch()

    def prove(self, seals: tuple[KeyedSeals, KeyedSeals]) -> None:
        """Seal with the first and check with the second, from the next frame on: both ends have the key."""
        self.proven = self.parser.reads = True
        self.parser.meta_limit = GREETING_NBYTES
        self.seals, self.parser.seals = self._keyed = seals

    def trust(self) -> None:
        """Use checksums for payloads: both ends trust the transport."""
        for seals in self._keyed:
            seals.trust()

    def offer(self) -> dict[str, bool]:
        """The abilities of this end: whether it can map memory of the peer, and whether it trusts the transport."""
        return {"maps": self.neighbor is not None, "trusts": self.trusted}

    def agree(self, meta: Mapping[str, Any]) -> None:
        """Use shared memory, and trust the transport, only where the peer offers the same in `meta`."""
        self.lends = self.neighbor is not None and meta.get("maps") is True
        self.trusted = self.trusted and meta.get("trusts") is True

    def open_up(self) -> None:
        """Accept long metas, and frames of this job only: the peer is known."""
        self.parser.meta_limit = META_NBYTES
        self.parser.job = self.shared.job

    def count_with(self, peer: str) -> None:
        """Count the traffic, with the part so far, for `peer`."""
        total = self.shared.traffic_with(peer)
        for name in PeerTraffic.__slots__:
            setattr(total, name, getattr(total, name) + getattr(self.traffic, name))
        self.traffic = total

    def send(
        self,
        kind: Kind,
        meta: Mapping[str, Any] | bytes,
        payload: Sequence[memoryview] = (),
        *,
        request: int = 0,
        on_sent: Callable[[], None] | None = None,
        lent_nbytes: int = 0,
    ) -> Outgoing:
        """Queue a frame, and send at once the bytes that the socket takes.

        `on_sent` is called when the frame has left or never will. `lent_nbytes` counts payload that is not sent: the
        peer reads it in this process's memory.
        """
        frame = self._frame(kind, meta, payload, request)
        self.traffic.payload_nbytes_sent += lent_nbytes
        if on_sent is not None:
            frame.on_sent = on_sent
        if self.closed or self._closing:
            frame.abort()
            frame.on_sent()
        elif self._enqueue(frame):
            self._write()
        return frame

    def withdraw(self, frame: Outgoing) -> bool:
        """Remove a frame from the queue if no byte of it has left, else abort it. Return whether it was removed."""
        if frame in self.queue and not frame.started:
            self.queue.remove(frame)
            return True
        frame.abort()
        return False

    def refuse(self, error: RemoteError) -> None:
        """Send the reason, then close after `linger_seconds`. A peer without the key gets only `REFUSAL`."""
        if self.closed or self._closing:
            return
        reason = {"error": type(error).__name__, "message": str(error)[:4096]}
        # Close in three steps: REFUSAL, then the end of writing (`_write`), then the socket, after a while. A socket
        # that is closed with unread bytes sends RST, and the peer's kernel drops the reason unread.
        self._send_last(Kind.REFUSAL, reason if self.proven else REFUSAL)
        self.shared.reactor.timers.after(self.shared.limits.linger_seconds, lambda: self.end(error))
        # For the side it is over now, whatever still happens on the socket.
        self.side.ended(error, False)

    def hang_up(self) -> None:
        """Shut the socket down for writing, which the peer can see."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def finish(self) -> None:
        """Send GOODBYE after the queued frames; the peer then closes."""
        if not self.closed and not self._closing:
            self._send_last(Kind.GOODBYE, {})
            self.side.ended(PeerLost("this process has finished"), True)

    def end(self, error: RemoteError, *, finished: bool = False) -> None:
        """Close at once."""
        if self.closed:
            return
        self.closed = True
        # `closed` is set and the socket gone before any callback: each of them may call this connection again.
        self.shared.connections.discard(self)
        self.shared.reactor.watch(self.sock, 0, self)
        self.sock.close()
        # Frames that will never leave: their tensors are free.
        while self.queue:
            frame = self.queue.popleft()
            frame.abort()
            frame.on_sent()
        self.side.ended(error, finished)

    def pause(self) -> None:
        """Stop reading until `resume`; TCP then makes the peer wait."""
        self.paused = True
        self._watch()

    def resume(self) -> None:
        self.paused = False
        # The parser may hold whole frames that arrived before the pause: no event of the socket would announce them.
        self.shared.reactor.soon(self._catch_up)

    def deserted(self) -> bool:
        """Whether the peer has closed behind bytes that are not read yet (where the system can tell)."""
        if self.closed or not hasattr(select, "POLLRDHUP"):
            return self.closed
        # POLLRDHUP tells of the peer's end although unread bytes lie before it; `recv` would have to read them first.
        poll = select.poll()
        poll.register(self.sock, select.POLLRDHUP)
        return bool(poll.poll(0))

    def ready(self, mask: int) -> None:
        if self.closed:
            return
        if self._connecting:
            self._connected()
            return
        if mask & selectors.EVENT_WRITE:
            self._write()
        if mask & selectors.EVENT_READ and not self.closed:
            self.guarded(self._read)
        if not self.closed:
            self._watch()

    def _frame(
        self, kind: Kind, meta: Mapping[str, Any] | bytes, payload: Sequence[memoryview], request: int
    ) -> Outgoing:
        me = self.shared.identity
        if self.proven:
            header = Header(kind, self.shared.job, me.rank, me.incarnation, request)
        else:
            header = Header(kind, 0, 0, 0)  # a peer without the key learns nothing of the run
        raw = meta if isinstance(meta, bytes) else encode_meta(meta)
        return Outgoing(header, raw, payload, self.seals)

    def _enqueue(self, frame: Outgoing) -> bool:
        """Count a frame and queue it. Return whether it can leave at once."""
        self.traffic.messages_sent += 1
        self.traffic.overhead_nbytes_sent += frame.nbytes[0]
        self.traffic.payload_nbytes_sent += frame.nbytes[1]
        self.queue.append(frame)
        return len(self.queue) == 1 and not self._connecting

    def _send_last(self, kind: Kind, meta: Mapping[str, Any] | bytes) -> None:
        self._closing = True
        # Reading goes on, to see the peer's end: received bytes are dropped (`_ignore`).
        self.paused = False
        if self._enqueue(self._frame(kind, meta, (), 0)):
            self._write()
        self._watch()

    def _connected(self) -> None:
        code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self.end(loss_by(code)(os.strerror(code)))
            return
        self._connecting = False
        self._write()
        if not self.closed:
            self._watch()

    def _catch_up(self) -> None:
        if not self.closed and not self.paused:
            self.guarded(self._take)
            if not self.closed:
                self._watch()

    def guarded(self, function: Callable[[], None]) -> None:
        """Call `function`; refuse the peer if it finds damage, and end the connection if the peer is lost."""
        try:
            function()
        except DamagedFrame as error:
            self.shared.damaged += 1
            self.refuse(error)
        except Refused as error:
            self.shared.refused += 1
            self.refuse(error)
        except PeerLost as error:
            self.end(error)

    def _read(self) -> None:
        left = self.shared.limits.turn_nbytes
        while left > 0 and not self.closed and not self.paused:
            if self._closing:
                self._ignore()
                return
            space = self.parser.space()
            if not space:
                return
            got = self._receive(space)
            if got <= 0:
                return
            self.parser.received(got)
            self._take()
            left -= got
            # The socket is empty for now; asking it again would only cost a system call.
            if got < len(space):
                return

    def _receive(self, space: memoryview) -> int:
        """Receive into `space`. Return the number of bytes; 0 at the end, -1 if none are available."""
        try:
            got = self.sock.recv_into(space)
        except BlockingIOError:
            return -1
        except OSError as error:
            self.end(Broken.by(error, self.sock))
            return 0
        self.received_nbytes += max(got, 0)
        if not got:
            self.end(Broken("its connection closed" + ("" if self.parser.idle else " in the middle of a message")))
        return got

    def _ignore(self) -> None:
        """Drop received bytes: the last frame of this end is queued or sent."""
        trash = memoryview(bytearray(1 << 16))
        for _ in range(16):
            if self._receive(trash) <= 0:
                return

    def _take(self) -> None:
        while not self.closed and not self.paused and not self._closing:
            frame = self.parser.take()
            if frame is None:
                break
            # A frame comes twice if its payload needs memory; it counts when it is whole.
            if frame.complete:
                self._count(frame)
            self.side.frame(frame)
        self._set_low()

    def borrowed(self, listed: object, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
        """The neighbor's tensors in its memory. Raises `DamagedFrame`; `PeerLost` if the memory is gone."""
        try:
            tensors = self.shared.borrower.tensors(self.neighbor, listed, specs)
        except DureError as error:
            if isinstance(error, RemoteError):
                raise
            raise PeerLost("the memory that it named is gone") from error
        self.traffic.payload_nbytes_received += sum(tensor.nbytes for tensor in tensors)
        return tensors

    def _count(self, frame: Frame) -> None:
        overhead, payload = frame.nbytes
        self.traffic.messages_received += 1
        self.traffic.overhead_nbytes_received += overhead
        self.traffic.payload_nbytes_received += payload

    def _write(self) -> None:
        left = self.shared.limits.turn_nbytes
        try:
            while self.queue and left > 0:
                frame = self.queue[0]
                view = frame.peek()
                if not view:
                    self.queue.popleft()
                    frame.on_sent()
                    continue
                sent = self.sock.send(view)
                frame.advance(sent)
                left -= sent
        except BlockingIOError:
            pass
        except OSError as error:
            self._unwritable(error)
            return
        # The last frame has left. The peer reads it, then the end, and closes.
        if self._closing and not self.queue:
            self.hang_up()
        self._watch()

    def _unwritable(self, error: OSError) -> None:
        """End the connection after a failed write; the peer may have sent the reason before it closed."""
        with contextlib.suppress(RemoteError):
            self.guarded(self._read)
        if not self.closed:
            self.end(Broken.by(error, self.sock))

    def _watch(self) -> None:
        if self.closed:
            return
        mask = 0 if self.paused or self._connecting else selectors.EVENT_READ
        # Watched for writing only while frames wait: a socket is nearly always writable, and the loop would spin.
        if self.queue or self._connecting:
            mask |= selectors.EVENT_WRITE
        self.shared.reactor.watch(self.sock, mask, self)

    def _set_low(self) -> None:
        """Set the bytes that wake this process: many while bulk data arrive."""
        # Waking for every segment of a large payload costs more than the copies. The rest of a payload below the mark
        # wakes at one byte again, else it would never be read.
        low = _WAKE_NBYTES if self.parser.awaited_nbytes >= _WAKE_NBYTES else 1
        if low != self._low and not self.closed:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low)
            self._low = low
