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
    """Of one frame. `update` with its payload in order, then `close` (sender) or `check` (receiver)."""

    @property
    def control(self) -> bytes:
        """What follows the meta."""
        ...

    def check_control(self, got: bytes) -> None:
        """Raises `DamagedFrame` when what follows the meta is not `control`."""
        ...

    def update(self, piece: memoryview) -> None: ...

    def close(self, aborted: bool) -> bytes:
        """The trailer of the payload; `aborted` marks a frame that its sender gave up."""
        ...

    def check(self, trailer: bytes) -> bool:
        """Whether the sender gave the frame up. Raises `DamagedFrame` when the trailer is neither."""
        ...


class Seals(Protocol):
    """Of one direction of one connection: a seal for each frame in turn."""

    @property
    def control_nbytes(self) -> int:
        """What follows a meta weighs."""
        ...

    @property
    def trailer_nbytes(self) -> int:
        """What follows a payload weighs."""
        ...

    def start(self, header: bytes, meta: bytes, *, payload: bool) -> Seal: ...


class _Plain:
    __slots__ = ("_hash",)

    control = b""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()

    def check_control(self, got: bytes) -> None:
        """Nothing follows the meta."""

    def update(self, piece: memoryview) -> None:
        self._hash.update(piece)

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

    control_nbytes = 0
    trailer_nbytes = 8

    def start(self, header: bytes, meta: bytes, *, payload: bool) -> Seal:
        return _Plain()


class _Keyed:
    """`mac` has taken in count, header and meta; the payload's digest comes last."""

    __slots__ = ("_digest", "_mac", "control")

    def __init__(self, mac: hashlib.blake2b, digest: Callable[[], Digest], *, payload: bool) -> None:
        self._mac = mac
        self._digest = digest() if payload else None
        self.control = mac.digest()

    def check_control(self, got: bytes) -> None:
        if not hmac.compare_digest(got, self.control):
            raise _forged()

    def update(self, piece: memoryview) -> None:
        assert self._digest is not None
        self._digest.update(piece)

    def close(self, aborted: bool) -> bytes:
        assert self._digest is not None
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

    control_nbytes = trailer_nbytes = TAG_NBYTES

    def __init__(self, key: bytes, direction: bytes) -> None:
        """`key` is of at most 64 bytes, `direction` of at most 16: the limits of BLAKE2b's key and personalization."""
        self._empty = hashlib.blake2b(key=key, digest_size=TAG_NBYTES, person=direction)
        self._digest: Callable[[], Digest] = hashlib.sha256
        self._count = 0

    def trust(self) -> None:
        """From the next frame on, take a checksum for the digest of a payload: nobody can change it on its way."""
        self._digest = xxhash.xxh3_64

    def start(self, header: bytes, meta: bytes, *, payload: bool) -> Seal:
        mac = self._empty.copy()
        mac.update(self._count.to_bytes(8, "little") + header + meta)
        self._count += 1
        return _Keyed(mac, self._digest, payload=payload)


def _forged() -> DamagedFrame:
    return DamagedFrame("a frame's authentication code does not match: another key, or changed on the way.")
