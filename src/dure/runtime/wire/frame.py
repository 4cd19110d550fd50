"""Frames: how calls and tensors look as bytes. No input or output in here.

    ┌────────────────────────────┬───────────────┬────────────┬──────────────────────────┬────────────┐
    │ header, 60 bytes           │ meta          │ tag        │ payload                  │ trailer    │
    │ fixed fields, own xxh3-64  │ JSON in UTF-8 │ see `seal` │ tensors, back to back    │ see `seal` │
    └────────────────────────────┴───────────────┴────────────┴──────────────────────────┴────────────┘

The header carries its own checksum, so its lengths may be believed before anything else has arrived, and the
checksum of the meta. The tag seals both: the meta is read only once it has matched. The trailer seals the payload: it
comes last, so that bytes are hashed piece by piece while they are still in the cache, by the sender as they leave and
by the receiver as they arrive. A frame is sealed as it begins to leave, so that one that waits can be taken back.

A sender that gives up half-way (its caller cancelled, and wants its tensor back) fills the rest with zeros and
closes with the *other* trailer: the frame counts as never sent and the connection stays usable.
"""

from __future__ import annotations

import enum
import json
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import xxhash

from dure.errors import DamagedFrame, Refused
from dure.runtime.wire.integrity import PlainSeals, Seal, Seals, check_tag

MAGIC = b"dure"
VERSION = 2
PIECE_NBYTES = 1 << 20  # bytes moved, then hashed, at a time: they fit the cache
SMALL_NBYTES = 1 << 16  # payloads up to here are copied and leave together with their header
META_NBYTES = 1 << 20
GREETING_NBYTES = 1 << 14  # meta of whoever has not yet said who they are
INBOX_NBYTES = 1 << 15

_FIELDS = struct.Struct("<4sHBxQiIQIQQ")
_CHECK = struct.Struct("<Q")
HEADER_NBYTES = _FIELDS.size + _CHECK.size
_ZEROS = memoryview(bytes(SMALL_NBYTES))
_NO_SPACE = memoryview(bytearray(0))
_encode = json.JSONEncoder(separators=(",", ":")).encode
_decode = json.JSONDecoder().raw_decode


class Kind(enum.IntEnum):
    """What a frame is."""

    CHALLENGE = 1  # host -> caller, at once: a nonce (`proof`)
    HELLO = 2  # caller -> host: who I am
    WELCOME = 3  # host -> caller: who I am; calls may begin
    REQUEST = 4
    REPLY = 5
    ERROR = 6  # in place of a reply
    CANCEL = 7  # caller -> host: the reply is no longer wanted
    REFUSAL = 8  # either way: I close this connection, and why
    GOODBYE = 9  # either way: I have finished
    RETURNED = 10  # caller -> host: the memory that a reply lent has been read
    PROOF = 11  # either way, after CHALLENGE: this end has the key (`proof`)


_KINDS = {kind.value: kind for kind in Kind}
_WITH_PAYLOAD = (Kind.REQUEST, Kind.REPLY)


class Header(NamedTuple):
    """The fixed part of a frame. `job` is `job_code` of the job's name; lengths are bytes."""

    kind: Kind
    job: int
    rank: int
    incarnation: int
    request: int = 0
    meta_nbytes: int = 0
    payload_nbytes: int = 0
    meta_check: int = 0


def job_code(job: str) -> int:
    """The 64 bits that stand for a job's name in every header."""
    return xxhash.xxh3_64_intdigest(job.encode())


def pack_header(header: Header) -> bytes:
    """The 60 bytes of `header`, checksum included."""
    fields = _FIELDS.pack(MAGIC, VERSION, *header)
    return fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))


def unpack_header(raw: bytes) -> Header:
    """The header in `raw` (60 bytes). Raises `DamagedFrame`; `Refused` for another protocol version."""
    magic, version, kind, *rest = _FIELDS.unpack_from(raw)
    if magic != MAGIC:
        raise DamagedFrame(
            f"a frame begins with {MAGIC!r}, these bytes with {magic!r}: not a dure peer, or out of step."
        )
    if version != VERSION:
        raise Refused(
            f"the other side speaks protocol version {version}, this side {VERSION}: run one release on both."
        )
    (check,) = _CHECK.unpack_from(raw, _FIELDS.size)
    if check != xxhash.xxh3_64_intdigest(raw[: _FIELDS.size]):
        raise DamagedFrame("a frame's header does not match its checksum.")
    if kind not in _KINDS:
        raise DamagedFrame(f"a frame of kind {kind}, which version {VERSION} does not have.")
    return Header(_KINDS[kind], *rest)


def encode_meta(meta: Mapping[str, Any]) -> bytes:
    """`meta` as JSON. Raises `TypeError` for what JSON can't say, `ValueError` over `META_NBYTES`."""
    try:
        raw = _encode(meta).encode()
    except TypeError as error:
        raise TypeError(f"fields of a call are plain JSON values ({error}); send a tensor as a tensor.") from None
    if len(raw) > META_NBYTES:
        raise ValueError(f"fields of a call weigh {len(raw)} bytes, at most {META_NBYTES} fit; send bulk as a tensor.")
    return raw


def decode_meta(raw: bytes) -> dict[str, Any]:
    """The reverse of `encode_meta`. Raises `DamagedFrame`."""
    try:
        text = raw.decode()
        meta, end = _decode(text)
    except (ValueError, RecursionError):
        raise DamagedFrame("a frame's meta is no JSON.") from None
    if end != len(text):
        raise DamagedFrame("a frame's meta goes on behind its JSON.")
    if not isinstance(meta, dict):
        raise DamagedFrame(f"a frame's meta is a JSON {type(meta).__name__}, must be an object.")
    return meta


def _nothing() -> None:
    return None


class Outgoing:
    """A frame on its way out: `peek` at the next bytes, send some, `advance` by as many.

    `payload` is lent until `on_sent` was called. Small payloads are copied here, so their tensors are free at once.
    Frames are sealed, and counted by `seals`, in the order in which they are first peeked at: `started`.
    """

    __slots__ = (
        "_aborted", "_copied", "_head", "_header", "_last", "_left", "_meta", "_payload", "_seal", "_seals",
        "kind", "nbytes", "on_sent", "request", "started",
    )  # fmt: skip

    def __init__(
        self, header: Header, meta: bytes, payload: Sequence[memoryview] = (), seals: Seals | None = None
    ) -> None:
        payload = [view for view in payload if len(view)]
        size = sum(map(len, payload))
        check = xxhash.xxh3_64_intdigest(meta)
        self._header = pack_header(Header(*header[:5], len(meta), size, check))
        self._meta = meta
        self._seals = seals or PlainSeals()
        sealed = self._seals.tag_nbytes + (self._seals.trailer_nbytes if size else 0)
        self.kind = header.kind
        self.request = header.request
        self.nbytes = (HEADER_NBYTES + len(meta) + sealed, size)
        self.on_sent: Callable[[], None] = _nothing
        self.started = False
        self._seal: Seal | None = None
        self._aborted = self._last = False
        self._copied = size <= SMALL_NBYTES
        self._payload = deque([memoryview(b"".join(payload))] if self._copied and size else payload)
        self._left = size
        self._head = _NO_SPACE

    @property
    def lent(self) -> bool:
        """Whether tensors are still being read."""
        return bool(self._payload) and not self._copied

    def peek(self) -> memoryview:
        """The next bytes to send; empty when all have left."""
        if not self.started:
            self._start()
        if not self._head and not self._left and not self._last:
            self._close()
        if self._head or not self._left:
            return self._head
        return _ZEROS[: self._left] if self._aborted else self._payload[0][:PIECE_NBYTES]

    def advance(self, nbytes: int) -> None:
        """`nbytes` of what `peek` showed have left."""
        if self._head:
            self._head = self._head[nbytes:]
            return
        sent = self.peek()[:nbytes]
        assert self._seal is not None
        self._seal.update(sent)
        self._left -= nbytes
        if self._aborted:
            return
        self._payload[0] = self._payload[0][nbytes:]
        if not self._payload[0]:
            self._payload.popleft()

    def abort(self) -> None:
        """Let go of the tensors now; what is left of the payload becomes zeros and the receiver drops the frame."""
        if self._payload and not self._copied:
            self._aborted = True
            self._payload.clear()

    def _start(self) -> None:
        self.started = True
        parts: list[bytes | memoryview]
        parts = [self._header, self._meta, self._seals.tag(self._header, self._meta)]
        if self._left:
            self._seal = self._seals.payload()
        if self._copied:
            for view in self._payload:
                assert self._seal is not None
                self._seal.update(view)
                parts += [view, self._seal.close(False)]
            self._payload.clear()
            self._left = 0
            self._last = True
        self._head = memoryview(b"".join(parts))

    def _close(self) -> None:
        assert self._seal is not None
        self._head = memoryview(self._seal.close(self._aborted))
        self._last = True


@dataclass(slots=True)
class Frame:
    """A frame that came in. First seen when its payload needs a place, again when all is there and verified."""

    header: Header
    meta: dict[str, Any]
    raw: bytes = b""
    """The meta of one that has proved nothing yet, whose JSON is not read."""
    complete: bool = False
    aborted: bool = False
    sealed_nbytes: int = 0

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes besides the payload, bytes of payload."""
        return HEADER_NBYTES + self.header.meta_nbytes + self.sealed_nbytes, self.header.payload_nbytes


class _Stage(enum.Enum):
    HEADER = 0
    META = 1
    PLACING = 2
    PAYLOAD = 3
    TRAILER = 4


class Parser:
    """Turns bytes into frames. Put bytes into `space()`, say how many with `received`, then `take` until None.

    A frame with a payload comes out of `take` twice: incomplete, to be answered with `place` or `drop` (until then
    `space` is empty and nothing is received), and complete, once its trailer matched. Raises `DamagedFrame`
    or `Refused`, after which the bytes have no meaning any more. It allocates its meta (limited), never a payload.
    `job` is the only `job_code` taken; None, before it is agreed, takes all. Without `reads` a meta is handed out as it
    is.
    """

    def __init__(self, job: int | None, *, seals: Seals | None = None, meta_limit: int = META_NBYTES) -> None:
        self.job = job
        self.seals: Seals = seals or PlainSeals()
        self.meta_limit = meta_limit
        self.reads = True
        self._inbox = memoryview(bytearray(INBOX_NBYTES))
        self._start = self._stop = 0
        self._stage = _Stage.HEADER
        self._frame: Frame | None = None
        self._raw_header = b""
        self._meta: bytes | bytearray = b""
        self._header: Header | None = None
        self._seal: Seal | None = None
        self._targets: deque[memoryview] = deque()
        self._dropping = False
        self._left = 0

    @property
    def idle(self) -> bool:
        """Between two frames, with nothing received of the next."""
        return self._stage is _Stage.HEADER and self._start == self._stop

    @property
    def awaited_nbytes(self) -> int:
        """Bytes that certainly are still to come, outside the inbox, of the part being received."""
        return self._left if self._targets else 1

    def space(self) -> memoryview:
        """Where the next bytes go."""
        if self._stage is _Stage.PLACING:
            return _NO_SPACE
        if self._start == self._stop:
            self._start = self._stop = 0
            if self._targets:
                return self._targets[0][:PIECE_NBYTES]
        elif self._start:
            rest = self._stop - self._start
            self._inbox[:rest] = bytes(self._inbox[self._start : self._stop])
            self._start, self._stop = 0, rest
        return self._inbox[self._stop :]

    def received(self, nbytes: int) -> None:
        """The first `nbytes` of `space()` are filled."""
        if self._start == self._stop and self._targets:
            self._filled(nbytes)
        else:
            self._stop += nbytes

    def take(self) -> Frame | None:
        """The next frame, or None until more bytes are here."""
        while True:
            stage = self._stage
            if stage is _Stage.HEADER:
                if self._stop - self._start < HEADER_NBYTES:
                    return None
                self._open()
            elif stage is _Stage.PLACING or not self._fill():
                return None
            elif stage is _Stage.META:
                if self._read_meta():
                    return self._frame
            elif stage is _Stage.PAYLOAD:
                self._stage = _Stage.TRAILER
            elif not self._at_trailer():
                return None
            else:
                return self._finish()

    def place(self, views: Sequence[memoryview]) -> None:
        """Receive the announced payload into `views`, which weigh exactly as much."""
        assert self._stage is _Stage.PLACING
        assert self._header is not None
        self._targets = deque(view for view in views if len(view))
        self._left = self._header.payload_nbytes
        assert sum(map(len, self._targets)) == self._left
        self._stage = _Stage.PAYLOAD

    def drop(self) -> None:
        """Receive the announced payload, or what is left of it, into nothing."""
        if self._stage is _Stage.PLACING:
            assert self._header is not None
            self._left = self._header.payload_nbytes
            self._stage = _Stage.PAYLOAD
        if self._stage is _Stage.PAYLOAD:
            self._targets.clear()
            self._dropping = True

    def _pop(self, nbytes: int) -> bytes:
        piece = bytes(self._inbox[self._start : self._start + nbytes])
        self._start += nbytes
        return piece

    def _open(self) -> None:
        self._raw_header = self._pop(HEADER_NBYTES)
        header = unpack_header(self._raw_header)
        if self.job is not None and header.job != self.job:
            raise Refused(f"the frame belongs to job {header.job:016x}, this connection to {self.job:016x}.")
        if header.meta_nbytes > self.meta_limit:
            raise DamagedFrame(
                f"a frame announces {header.meta_nbytes} bytes of meta, at most {self.meta_limit} are taken."
            )
        if header.payload_nbytes and header.kind not in _WITH_PAYLOAD:
            raise DamagedFrame(f"a {header.kind.name} announces {header.payload_nbytes} bytes of payload, it has none.")
        self._header = header
        self._seal = None
        size = header.meta_nbytes + self.seals.tag_nbytes
        if size <= self._stop - self._start:  # the commonest
            self._meta = self._pop(size)
            self._targets.clear()
            self._left = 0
        else:
            self._meta = bytearray(size)
            self._targets = deque([memoryview(self._meta)])
            self._left = size
        self._stage = _Stage.META

    def _read_meta(self) -> bool:
        """Whether the owner must be asked where the payload goes."""
        header = self._header
        assert header is not None
        raw, tag = bytes(self._meta[: header.meta_nbytes]), bytes(self._meta[header.meta_nbytes :])
        if xxhash.xxh3_64_intdigest(raw) != header.meta_check:
            raise DamagedFrame("a frame's meta does not match its checksum.")
        check_tag(tag, self.seals.tag(self._raw_header, raw))
        self._seal = self.seals.payload() if header.payload_nbytes else None
        self._frame = Frame(header, decode_meta(raw)) if self.reads else Frame(header, {}, raw)
        self._dropping = False
        self._stage = _Stage.PLACING if header.payload_nbytes else _Stage.TRAILER
        return self._stage is _Stage.PLACING

    def _fill(self) -> bool:
        """Move what the inbox has into the part being received; whether that part is full."""
        while self._left and self._start < self._stop:
            if self._dropping:
                target = self._inbox[self._start : self._stop][: self._left]
            else:
                target = self._targets[0][: self._stop - self._start]
                target[:] = self._inbox[self._start : self._start + len(target)]
            self._start += len(target)
            self._filled(len(target), target)
        return not self._left

    def _filled(self, nbytes: int, piece: memoryview | None = None) -> None:
        if self._stage is _Stage.PAYLOAD:
            assert self._seal is not None
            self._seal.update(self._targets[0][:nbytes] if piece is None else piece)
        self._left -= nbytes
        if self._targets:
            self._targets[0] = self._targets[0][nbytes:]
            if not self._targets[0]:
                self._targets.popleft()

    def _at_trailer(self) -> bool:
        return self._stop - self._start >= self._trailer_nbytes()

    def _trailer_nbytes(self) -> int:
        assert self._header is not None
        return self.seals.trailer_nbytes if self._header.payload_nbytes else 0

    def _finish(self) -> Frame:
        assert self._frame is not None
        frame, self._frame = self._frame, None
        size = self._trailer_nbytes()
        if self._seal is not None:
            frame.aborted = self._seal.check(self._pop(size))
        frame.complete = True
        frame.sealed_nbytes = self.seals.tag_nbytes + size
        self._stage = _Stage.HEADER
        self._dropping = False
        return frame
