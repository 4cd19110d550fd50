"""Seals: checksums and authentication codes that show that a frame is unchanged.

| | after the meta | after a payload | against |
|---|---|---|---|
| `PlainSeals` | nothing: header and meta have checksums | xxh3-64 of the payload, 8 bytes | damage |
| `KeyedSeals` | a tag: direction, count, header, meta | a tag: these, payload's digest | forgery, replay, damage |

A tag is BLAKE2b in its keyed mode (RFC 7693) with a digest of 16 bytes, under a key of the connection. 16 bytes are
enough: an attacker has one guess in 2^128 per connection, since the first wrong tag ends it, and cannot search for
collisions without the key. The payload's digest is SHA-256 (a hash that is then authenticated), or xxh3-64 where the
payload cannot be changed on its way (`KeyedSeals.trust`). `docs/decisions/0005-sealed-frames.md` has the figures.

Plain seals are used until both sides have proved that they have the key (`proof`); frames have no payload before.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import Protocol

import xxhash

from dure.errors import DamagedFrame

TAG_NBYTES = 16

_ALL_ONES = (1 << 64) - 1


class Digest(Protocol):
    """An incremental hash of a payload."""

    def update(self, piece: memoryview, /) -> None: ...

    def digest(self) -> bytes: ...


class Seal(Protocol):
    """The seal of one payload: `update` with each piece in order, then `close` (sender) or `check` (receiver)."""

    def update(self, piece: memoryview, /) -> None: ...

    def close(self, aborted: bool) -> bytes:
        """Return the trailer; `aborted` marks a frame that its sender has cancelled."""
        ...

    def check(self, trailer: bytes) -> bool:
        """Return whether the sender has aborted the frame. Raises `DamagedFrame` for an invalid trailer."""
        ...


class Seals(Protocol):
    """The seals of one direction of a connection: for each frame a tag, then the seal of its payload if any."""

    @property
    def tag_nbytes(self) -> int:
        """Bytes of a tag."""
        ...

    @property
    def trailer_nbytes(self) -> int:
        """Bytes of a trailer."""
        ...

    def tag(self, header: bytes, meta: bytes) -> bytes:
        """Return the tag of the next frame. The receiver compares it with the received one (`check_tag`)."""
        ...

    def payload(self) -> Seal:
        """Return the seal for the payload of the frame of the last tag."""
        ...


class _Plain:
    __slots__ = ("_hash", "update")

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()
        self.update = self._hash.update

    def close(self, aborted: bool) -> bytes:
        digest = self._hash.intdigest()
        return (digest ^ _ALL_ONES if aborted else digest).to_bytes(8, "little")

    def check(self, trailer: bytes) -> bool:
        got = int.from_bytes(trailer, "little")
        digest = self._hash.intdigest()
        if got not in (digest, digest ^ _ALL_ONES):
            raise DamagedFrame("a frame's payload does not match its checksum.")
        return got != digest


class PlainSeals:
    """Checksums, which detect damage but no forgery."""

    tag_nbytes = 0
    trailer_nbytes = 8

    def tag(self, header: bytes, meta: bytes) -> bytes:
        return b""

    def payload(self) -> Seal:
        return _Plain()


class _Keyed:
    """Seal under a key: `mac` contains count, header and meta; `close` adds the digest of the payload."""

    __slots__ = ("_digest", "_mac", "update")

    def __init__(self, mac: hashlib.blake2b, digest: Digest) -> None:
        self._mac = mac
        self._digest = digest
        self.update = digest.update

    def close(self, aborted: bool) -> bytes:
        mac = self._mac.copy()
        mac.update(self._digest.digest() + (b"aborted" if aborted else b"whole"))
        return mac.digest()

    def check(self, trailer: bytes) -> bool:
        if hmac.compare_digest(trailer, self.close(False)):
            return False
        if hmac.compare_digest(trailer, self.close(True)):
            return True
        raise _forged()


class KeyedSeals:
    """Tags under the connection's key. Their count of frames reveals a dropped, repeated or reflected frame."""

    tag_nbytes = trailer_nbytes = TAG_NBYTES

    def __init__(self, key: bytes, direction: bytes) -> None:
        """`key` has at most 64 bytes, `direction` at most 16: the limits of BLAKE2b's key and personalization."""
        self._empty = self._mac = hashlib.blake2b(key=key, digest_size=TAG_NBYTES, person=direction)
        self._digest: Callable[[], Digest] = hashlib.sha256
        self._count = 0

    def trust(self) -> None:
        """Use a checksum as the digest of payloads from the next frame on: no other process can change them."""
        self._digest = xxhash.xxh3_64

    def tag(self, header: bytes, meta: bytes) -> bytes:
        mac = self._mac = self._empty.copy()
        mac.update(self._count.to_bytes(8, "little") + header + meta)
        self._count += 1
        return mac.digest()

    def payload(self) -> Seal:
        return _Keyed(self._mac, self._digest())


def check_tag(got: bytes, expected: bytes) -> None:
    """Raise `DamagedFrame` if the tag `got` is not the `expected` one."""
    if not hmac.compare_digest(got, expected):
        raise _forged()


def _forged() -> DamagedFrame:
    return DamagedFrame("a frame's authentication code does not match: another key, or changed in transit.")
