"""Seals: what proves that a frame arrived as it was sent.

| | after the meta | after a payload | against |
|---|---|---|---|
| `PlainSeals` | nothing: header and meta have checksums | xxh3-64 of the payload, 8 bytes | damage |
| `KeyedSeals` | a tag: direction, count, header, meta | a tag: these, payload's digest | forgery, replay, damage |

A tag is BLAKE2b in its keyed mode (RFC 7693) with a digest of 16 bytes, under a key of the connection. 16 bytes are
enough: an attacker has one guess in 2^128 per connection, since the first wrong tag ends it, and cannot search for
collisions without the key. The payload's digest is SHA-256 (a hash that is then authenticated), or xxh3-64 where the
payload cannot be changed on its way (`KeyedSeals.trust`). `docs/decisions/0005-sealed-frames.md` has the figures.

The plain seals serve until both sides have proved that they have the key (`proof`), and carry no payload then.
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
    """A hash of a payload, piece by piece."""

    def update(self, piece: memoryview, /) -> None: ...

    def digest(self) -> bytes: ...


class Seal(Protocol):
    """Of one payload. `update` with it in order, then `close` (sender) or `check` (receiver)."""

    def update(self, piece: memoryview, /) -> None: ...

    def close(self, aborted: bool) -> bytes:
        """The trailer; `aborted` marks a frame that its sender gave up."""
        ...

    def check(self, trailer: bytes) -> bool:
        """Whether the sender gave the frame up. Raises `DamagedFrame` when the trailer is neither."""
        ...


class Seals(Protocol):
    """Of one direction of one connection: for each frame in turn its tag, then a seal of its payload if it has one."""

    @property
    def tag_nbytes(self) -> int:
        """What follows a meta weighs."""
        ...

    @property
    def trailer_nbytes(self) -> int:
        """What follows a payload weighs."""
        ...

    def tag(self, header: bytes, meta: bytes) -> bytes:
        """What follows the meta of the next frame. The receiver compares it with what has come (`check_tag`)."""
        ...

    def payload(self) -> Seal:
        """A seal for the payload of the frame whose tag was asked for last."""
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
    """Checksums: find damage, stop nobody."""

    tag_nbytes = 0
    trailer_nbytes = 8

    def tag(self, header: bytes, meta: bytes) -> bytes:
        return b""

    def payload(self) -> Seal:
        return _Plain()


class _Keyed:
    """`mac` has taken in count, header and meta; the payload's digest comes last."""

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
    """Tags under the connection's key; counts frames, so none can be left out, repeated or turned round."""

    tag_nbytes = trailer_nbytes = TAG_NBYTES

    def __init__(self, key: bytes, direction: bytes) -> None:
        """`key` is of at most 64 bytes, `direction` of at most 16: the limits of BLAKE2b's key and personalization."""
        self._empty = self._mac = hashlib.blake2b(key=key, digest_size=TAG_NBYTES, person=direction)
        self._digest: Callable[[], Digest] = hashlib.sha256
        self._count = 0

    def trust(self) -> None:
        """From the next frame on, take a checksum for the digest of a payload: nobody can change it on its way."""
        self._digest = xxhash.xxh3_64

    def tag(self, header: bytes, meta: bytes) -> bytes:
        mac = self._mac = self._empty.copy()
        mac.update(self._count.to_bytes(8, "little") + header + meta)
        self._count += 1
        return mac.digest()

    def payload(self) -> Seal:
        return _Keyed(self._mac, self._digest())


def check_tag(got: bytes, expected: bytes) -> None:
    """Raises `DamagedFrame` where a frame's tag is not the one that it should have."""
    if not hmac.compare_digest(got, expected):
        raise _forged()


def _forged() -> DamagedFrame:
    return DamagedFrame("a frame's authentication code does not match: another key, or changed on the way.")
