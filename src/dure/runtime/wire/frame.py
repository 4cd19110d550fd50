"""Frames: the binary form of calls and tensors. This module does no input or output.

    ┌────────────────────────────┬───────────────┬────────────┬──────────────────────────┬────────────┐
    │ header, 60 bytes           │ meta          │ tag        │ payload                  │ trailer    │
    │ fixed fields, own xxh3-64  │ JSON in UTF-8 │ integrity  │ tensors, back to back    │ integrity  │
    └────────────────────────────┴───────────────┴────────────┴──────────────────────────┴────────────┘

The header has its own checksum, so its lengths are valid before the rest has arrived, and the checksum of the meta. The
tag (`seals`) seals both; the meta is read only after its tag has matched. The trailer seals the payload and comes
last: both sides hash the payload piece by piece, as it leaves or arrives, while the piece is in the cache. A frame is
sealed when its first byte leaves, so a waiting frame can be removed from the queue.

If the caller cancels a call while its payload leaves, the sender fills the rest of the payload with zeros and sends the
trailer of an aborted frame. The receiver drops the frame, and the connection stays usable.
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

from dure.core.node import nothing
from dure.errors import DamagedFrame, Refused
from dure.runtime.wire.seals import PlainSeals, Seals, check_tag

MAGIC = b"dure"
VERSION = 2
PIECE_NBYTES = 1 << 20  # bytes moved and then hashed at a time; they fit the cache
SMALL_NBYTES = 1 << 16  # largest payload that is copied and sent together with its header
META_NBYTES = 1 << 20
GREETING_NBYTES = 1 << 14  # largest meta of a peer that has not sent its identity yet
INBOX_NBYTES = 1 << 15

_FIELDS = struct.Struct("<4sHBxQiIQIQQ")
_CHECK = struct.Struct("<Q")
HEADER_NBYTES = _FIELDS.size + _CHECK.size
_ZEROS = memoryview(bytes(SMALL_NBYTES))
_NO_SPACE = memoryview(bytearray(0))
_encode = json.JSONEncoder(separators=(",", ":")).encode
_decode = json.JSONDecoder().raw_decode


class Kind(enum.IntEnum):
    """Kinds of frames."""

    CHALLENGE = 1  # host -> caller, first frame: a nonce (`seals`)
    HELLO = 2  # caller -> host: the identity of the caller
    WELCOME = 3  # host -> caller: the identity of the host; calls can begin
    REQUEST = 4
    REPLY = 5
    ERROR = 6  # instead of a reply
    CANCEL = 7  # caller -> host: the caller has dropped the call
    REFUSAL = 8  # either direction: the sender closes the connection, with the reason
    GOODBYE = 9  # either direction: the sender has finished
    RETURNED = 10  # caller -> host: the caller has read the memory that a reply lent
    PROOF = 11  # either direction, after CHALLENGE: the sender has the key (`seals`)


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
    """Hash of a job's name, 64 bits; every header has it."""
    return xxhash.xxh3_64_intdigest(job.encode())


def pack_header(header: Header) -> bytes:
    """Encode `header` as 60 bytes, checksum included."""
    fields = _FIELDS.pack(MAGIC, VERSION, *header)
    return fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))


def unpack_header(raw: bytes) -> Header:
    """Decode the 60 bytes `raw`. Raises `DamagedFrame`; `Refused` for another protocol version."""
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
    """Encode `meta` as JSON. Raises `TypeError` for values that JSON does not have, `ValueError` over `META_NBYTES`."""
    try:
        raw = _encode(meta).encode()
    except TypeError as error:
        raise TypeError(f"fields of a call are plain JSON values ({error}); send a tensor as a tensor.") from None
    if len(raw) > META_NBYTES:
        raise ValueError(f"fields of a call weigh {len(raw)} bytes, at most {META_NBYTES} fit; send bulk as a tensor.")
    return raw


def decode_meta(raw: bytes) -> dict[str, Any]:
    """Decode the result of `encode_meta`. Raises `DamagedFrame`."""
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


class Outgoing:
    """A frame to send: `peek` at the next bytes, send some, `advance` by their number.

    `payload` is in use until `on_sent` is called. Small payloads are copied, so their tensors are free at once. `seals`
    seals and counts frames in the order of their first `peek`, which sets `started`.
    """

    __slots__ = (
        "_aborted", "_copied", "_head", "_header", "_last", "_left", "_meta", "_payload", "_seals",
        "nbytes", "on_sent", "started",
    )  # fmt: skip

    def __init__(
        self, header: Header, meta: bytes, payload: Sequence[memoryview] = (), seals: Seals | None = None
    ) -> None:
        payload = [view for view in payload if len(view)]
        size = sum(map(len, payload))
        # In the header, so that the meta is verified before a byte of it is decoded.
        check = xxhash.xxh3_64_intdigest(meta)
        self._header = pack_header(Header(*header[:5], len(meta), size, check))
        self._meta = meta
        self._seals = seals or PlainSeals()
        sealed = self._seals.tag_nbytes + (self._seals.trailer_nbytes if size else 0)
        self.nbytes = (HEADER_NBYTES + len(meta) + sealed, size)
        self.on_sent: Callable[[], None] = nothing
        self.started = False
        self._aborted = self._last = False
        # One system call for the whole frame, and the caller's tensors are free at once.
        self._copied = size <= SMALL_NBYTES
        self._payload = deque([memoryview(b"".join(payload))] if self._copied and size else payload)
        self._left = size
        self._head = _NO_SPACE

    @property
    def lent(self) -> bool:
        """Whether the frame still reads tensors."""
        return bool(self._payload) and not self._copied

    def peek(self) -> memoryview:
        """The next bytes to send; empty after the last."""
        if not self.started:
            self._seal()
        elif not self._head and not self._left and not self._last:
            self._head, self._last = memoryview(self._seals.trailer(self._aborted)), True
        if self._head or not self._left:
            return self._head
        return _ZEROS[: self._left] if self._aborted else self._payload[0][:PIECE_NBYTES]

    def advance(self, nbytes: int) -> None:
        """Move on by `nbytes` bytes, which were sent."""
        if self._head:
            self._head = self._head[nbytes:]
            return
        self._seals.update(self.peek()[:nbytes])
        self._left -= nbytes
        if self._aborted:
            return
        self._payload[0] = self._payload[0][nbytes:]
        if not self._payload[0]:
            self._payload.popleft()

    def abort(self) -> None:
        """Stop reading the tensors. Zeros replace the rest of the payload, and the receiver drops the frame."""
        # The header has announced the payload's length, and part of it may have left: the stream stays in step only if
        # as many bytes follow.
        if self._payload and not self._copied:
            self._aborted = True
            self._payload.clear()

    def _seal(self) -> None:
        """Seal the frame: it is its turn to leave. A small payload leaves together with its header and trailer."""
        self.started = True
        parts: list[bytes | memoryview]
        parts = [self._header, self._meta, self._seals.tag(self._header, self._meta)]
        if self._copied:
            for view in self._payload:
                self._seals.update(view)
                parts += [view, self._seals.trailer(False)]
            self._payload.clear()
            self._left, self._last = 0, True
        self._head = memoryview(b"".join(parts))


@dataclass(slots=True)
class Frame:
    """A received frame. The parser gives it out when its payload needs memory, and again when it is complete."""

    header: Header
    meta: dict[str, Any]
    raw: bytes = b""
    """The undecoded meta of a peer that has not proved that it has the key."""
    complete: bool = False
    aborted: bool = False
    sealed_nbytes: int = 0

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of overhead and bytes of payload."""
        return HEADER_NBYTES + self.header.meta_nbytes + self.sealed_nbytes, self.header.payload_nbytes


class _Stage(enum.Enum):
    HEADER = 0
    META = 1
    PLACING = 2
    PAYLOAD = 3
    TRAILER = 4


class Parser:
    """Decodes frames. Write bytes to `space()`, give their number to `received`, then `take` frames until None.

    `take` returns a frame with a payload twice: incomplete, so that the owner calls `place` or `drop` (until then
    `space` is empty and nothing is received), and complete, after its trailer has matched. After `DamagedFrame` or
    `Refused` the parser cannot be used any more. It allocates memory for a meta, within its limit, but never for a
    payload. `job` is the only valid `job_code`; None accepts all, before the peers have agreed on one. Without `reads`
    a meta is not decoded.
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
        self._targets: deque[memoryview] = deque()
        self._dropping = False
        self._left = 0

    @property
    def idle(self) -> bool:
        """Whether all received bytes belong to finished frames."""
        return self._stage is _Stage.HEADER and self._start == self._stop

    @property
    def awaited_nbytes(self) -> int:
        """Least number of bytes that are still to arrive for the current part of a frame."""
        return self._left if self._targets else 1

    def space(self) -> memoryview:
        """Memory for the next bytes."""
        if self._stage is _Stage.PLACING:
            return _NO_SPACE
        if self._start == self._stop:
            self._start = self._stop = 0
            # The inbox is empty: large parts are received where they belong, without a copy.
            if self._targets:
                return self._targets[0][:PIECE_NBYTES]
        elif self._start:
            rest = self._stop - self._start
            # A frame is cut by the end of the inbox. The copy makes the overlap safe; it is at most a header and a
            # meta.
            self._inbox[:rest] = bytes(self._inbox[self._start : self._stop])
            self._start, self._stop = 0, rest
        return self._inbox[self._stop :]

    def received(self, nbytes: int) -> None:
        """Account for `nbytes` bytes that were written to `space()`."""
        if self._start == self._stop and self._targets:
            self._filled(nbytes)
        else:
            self._stop += nbytes

    def take(self) -> Frame | None:
        """Return the next frame; None if more bytes are needed."""
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
            elif self._stop - self._start < self._trailer_nbytes:
                return None
            else:
                return self._finish()

    def place(self, views: Sequence[memoryview]) -> None:
        """Receive the announced payload into `views`, whose total size is the payload's."""
        assert self._stage is _Stage.PLACING
        assert self._header is not None
        self._targets = deque(view for view in views if len(view))
        self._left = self._header.payload_nbytes
        assert sum(map(len, self._targets)) == self._left
        self._stage = _Stage.PAYLOAD

    def drop(self) -> None:
        """Receive and drop the announced payload, or the rest of it."""
        if self._stage is _Stage.PLACING:
            assert self._header is not None
            self._left = self._header.payload_nbytes
            self._stage = _Stage.PAYLOAD
        if self._stage is _Stage.PAYLOAD:
            # The bytes still pass the seal, so that the trailer is checked and the connection goes on.
            self._targets.clear()
            self._dropping = True

    def _pop(self, nbytes: int) -> bytes:
        piece = bytes(self._inbox[self._start : self._start + nbytes])
        self._start += nbytes
        return piece

    def _open(self) -> None:
        self._raw_header = self._pop(HEADER_NBYTES)
        header = unpack_header(self._raw_header)
        # Before the lengths are used, the cheap refusals.
        if self.job is not None and header.job != self.job:
            raise Refused(f"the frame belongs to job {header.job:016x}, this connection to {self.job:016x}.")
        if header.meta_nbytes > self.meta_limit:
            raise DamagedFrame(
                f"a frame announces {header.meta_nbytes} bytes of meta, at most {self.meta_limit} are taken."
            )
        if header.payload_nbytes and header.kind not in _WITH_PAYLOAD:
            raise DamagedFrame(f"a {header.kind.name} announces {header.payload_nbytes} bytes of payload, it has none.")
        self._header = header
        size = header.meta_nbytes + self.seals.tag_nbytes
        if size <= self._stop - self._start:  # the most frequent case
            self._meta = self._pop(size)
            self._targets.clear()
            self._left = 0
        else:
            self._meta = bytearray(size)
            self._targets = deque([memoryview(self._meta)])
            self._left = size
        self._stage = _Stage.META

    def _read_meta(self) -> bool:
        """Check and decode the meta. Return whether a payload needs memory."""
        header = self._header
        assert header is not None
        raw, tag = bytes(self._meta[: header.meta_nbytes]), bytes(self._meta[header.meta_nbytes :])
        if xxhash.xxh3_64_intdigest(raw) != header.meta_check:
            raise DamagedFrame("a frame's meta does not match its checksum.")
        # Only now is the meta decoded: nothing that an attacker wrote reaches the JSON parser.
        check_tag(tag, self.seals.tag(self._raw_header, raw))
        self._frame = Frame(header, decode_meta(raw)) if self.reads else Frame(header, {}, raw)
        self._dropping = False
        self._trailer_nbytes = self.seals.trailer_nbytes if header.payload_nbytes else 0
        self._stage = _Stage.PLACING if header.payload_nbytes else _Stage.TRAILER
        return self._stage is _Stage.PLACING

    def _fill(self) -> bool:
        """Move bytes from the inbox to the current part of the frame. Return whether that part is complete."""
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
            self.seals.update(self._targets[0][:nbytes] if piece is None else piece)
        self._left -= nbytes
        if self._targets:
            self._targets[0] = self._targets[0][nbytes:]
            if not self._targets[0]:
                self._targets.popleft()

    def _finish(self) -> Frame:
        assert self._frame is not None
        frame, self._frame = self._frame, None
        size = self._trailer_nbytes
        if size:
            frame.aborted = self.seals.check(self._pop(size))
        frame.complete = True
        frame.sealed_nbytes = self.seals.tag_nbytes + size
        self._stage = _Stage.HEADER
        self._dropping = False
        return frame
