"""Seals: what proves that a frame arrived as it was sent.

| | trailer | covers | against |
|---|---|---|---|
| `PlainSeals` | xxh3-64, 8 bytes, after a payload | the payload; header and meta have their own | damage |
| `KeyedSeals` | HMAC-SHA256, 32 bytes, always | all, its direction and place in the stream | forgery, replay |

The key of a connection is derived from the job's key and one fresh nonce from each side, so that nothing recorded
on one connection is worth anything on another.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Protocol

import xxhash

from dure.errors import DamagedFrame

_ALL_ONES = (1 << 64) - 1


class Seal(Protocol):
    """Of one frame. `update` with its payload in order, then `close` (sender) or `check` (receiver)."""

    def nbytes(self, payload_nbytes: int) -> int:
        """What the trailer weighs."""
        ...

    def update(self, piece: memoryview) -> None: ...

    def close(self, aborted: bool) -> bytes:
        """The trailer; `aborted` marks a frame that its sender gave up."""
        ...

    def check(self, trailer: bytes) -> bool:
        """Whether the sender gave the frame up. Raises `DamagedFrame` when the trailer is neither."""
        ...


class Seals(Protocol):
    """Of one direction of one connection: a seal for each frame in turn."""

    def start(self, header: bytes, meta: bytes) -> Seal: ...


class _Plain:
    __slots__ = ("_hash",)

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()

    def nbytes(self, payload_nbytes: int) -> int:
        return 8 if payload_nbytes else 0

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

    def start(self, header: bytes, meta: bytes) -> Seal:
        return _Plain()


class _Keyed:
    __slots__ = ("_mac",)

    def __init__(self, key: bytes, *parts: bytes) -> None:
        self._mac = hmac.new(key, digestmod=hashlib.sha256)
        for part in parts:
            self._mac.update(part)

    def nbytes(self, payload_nbytes: int) -> int:
        return 32

    def update(self, piece: memoryview) -> None:
        self._mac.update(piece)

    def close(self, aborted: bool) -> bytes:
        mac = self._mac.copy()
        mac.update(b"aborted" if aborted else b"whole")
        return mac.digest()

    def check(self, trailer: bytes) -> bool:
        if hmac.compare_digest(trailer, self.close(False)):
            return False
        if hmac.compare_digest(trailer, self.close(True)):
            return True
        raise DamagedFrame("a frame's authentication code does not match: another key, or changed on the way.")


class KeyedSeals:
    """HMAC-SHA256 under the connection's key; counts frames, so none can be left out, repeated or turned round."""

    def __init__(self, key: bytes, direction: bytes) -> None:
        self._key = key
        self._direction = direction
        self._count = 0

    def start(self, header: bytes, meta: bytes) -> Seal:
        count = self._count.to_bytes(8, "little")
        self._count += 1
        return _Keyed(self._key, self._direction, count, header, meta)


def connection_key(key: bytes, *nonces: bytes) -> bytes:
    """The key of one connection, from the job's `key` and the sides' nonces."""
    return hmac.new(
        key, b"dure" + b"".join(hashlib.sha256(nonce).digest() for nonce in nonces), hashlib.sha256
    ).digest()


def greeting_seals(key: bytes, host_nonce: bytes) -> Seals:
    """Of the caller's HELLO: proves, to the host that drew `host_nonce` just now, that the caller has the key."""
    return KeyedSeals(connection_key(key, host_nonce), b"hello")


def session_seals(key: bytes, host_nonce: bytes, caller_nonce: bytes, *, calling: bool) -> tuple[Seals, Seals]:
    """Of everything after it: (of what this end sends, of what it receives)."""
    secret = connection_key(key, host_nonce, caller_nonce)
    up, down = KeyedSeals(secret, b"to host"), KeyedSeals(secret, b"to caller")
    return (up, down) if calling else (down, up)
