"""Protection of a connection: the key of a run, the proof that both ends have it, and the seals of their frames.

Each end proves to the other that it has the run's key, before any other exchange:

    host ── CHALLENGE: nonce ──────────────> caller       32 random bytes
    host <────────── PROOF: nonce, proof ─── caller       HMAC-SHA256 under the key of "caller" and both nonces
    host ── PROOF: proof ──────────────────> caller       the same of "host"
    ... all further frames are sealed with a key that is derived from the run's key and both nonces

A recorded proof is invalid on another connection, since each end draws a new nonce. The key is never sent. These frames
say nothing about the run: names are in the first sealed frames, HELLO and WELCOME.

Seals are checksums and authentication codes that show that a frame is unchanged:

| | after the meta | after a payload | against |
|---|---|---|---|
| `PlainSeals` | nothing: header and meta have checksums | xxh3-64 of the payload, 8 bytes | damage |
| `KeyedSeals` | a tag: direction, count, header, meta | a tag: these, payload's digest | forgery, replay, damage |

A tag is BLAKE2b in its keyed mode (RFC 7693) with a digest of 16 bytes, under a key of the connection. 16 bytes are
enough: an attacker has one guess in 2^128 per connection, since the first wrong tag ends it, and cannot search for
collisions without the key. The payload's digest is SHA-256 (a hash that is then authenticated), or xxh3-64 where the
payload cannot be changed on its way (`KeyedSeals.trust`). `docs/explanations/decisions/0005-sealed-frames.md` has the
figures.

Plain seals are used until both sides have proved that they have the key; frames have no payload before.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import xxhash

from dure.errors import DamagedFrame, UsageError

KEY_NBYTES = 32

MOST_NBYTES = 4096
"""Largest size of a key file."""

Integrity = Literal["mac", "checksum"]


@dataclass(frozen=True, slots=True)
class Credentials:
    """The secret `key` of a run, the same in all its processes, and the protection of payloads between machines.

    `integrity` is "mac", an authentication code under the key, or "checksum", which detects damage but no forgery.
    Checksums are used only if both ends of a connection have "checksum". Headers and fields always have a code.
    """

    key: bytes = field(repr=False)
    integrity: Integrity = "mac"

    def __post_init__(self) -> None:
        if len(self.key) < KEY_NBYTES:
            raise ValueError(f"a key has at least {KEY_NBYTES} bytes, this one has {len(self.key)}.")

    @classmethod
    def drawn(cls, integrity: Integrity = "mac") -> Credentials:
        """Make credentials with a new random key."""
        return cls(secrets.token_bytes(KEY_NBYTES), integrity)

    @classmethod
    def of_file(cls, path: Path, integrity: Integrity = "mac") -> Credentials:
        """Read the key from a file. Raises `UsageError` if others may read the file, or the key is too short."""
        right = f"head -c {KEY_NBYTES} /dev/urandom > {path}, then chmod 600 {path}"
        try:
            with open(path, "rb", opener=_opened) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise UsageError(f"the key file {path} is no regular file. Make one: {right}.")
                key = file.read(MOST_NBYTES + 1)
        except OSError as error:
            raise UsageError(f"cannot read the key file {path}: {error.strerror}. Make one: {right}.") from None
        mode = stat.S_IMODE(status.st_mode)
        if mode & 0o077:
            raise UsageError(f"the key file {path} has mode {mode:04o}, and others may use it. Write chmod 600 {path}.")
        if status.st_uid not in (os.geteuid(), 0):
            raise UsageError(
                f"the key file {path} belongs to user {status.st_uid}, who knows the key; this process is of user "
                f"{os.geteuid()}. Make one of your own: {right}."
            )
        if not KEY_NBYTES <= len(key) <= MOST_NBYTES:
            held = f"more than {MOST_NBYTES}" if len(key) > MOST_NBYTES else str(len(key))
            raise UsageError(
                f"the key file {path} holds {held} bytes, a key has {KEY_NBYTES} to {MOST_NBYTES}. Make one: {right}."
            )
        return cls(key, integrity)

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Credentials:
        """Make credentials of the result of `plain`."""
        return cls(bytes.fromhex(plain["key"]), plain["integrity"])

    def plain(self) -> dict[str, str]:
        """The credentials as JSON values. Only for a pipe to a process of the run."""
        return {"key": self.key.hex(), "integrity": self.integrity}


def _opened(path: str, flags: int) -> int:
    """Open without blocking: a named pipe without a writer would block."""
    return os.open(path, flags | os.O_NONBLOCK)


TAG_NBYTES = 16

_ALL_ONES = (1 << 64) - 1


class Digest(Protocol):
    """An incremental hash of a payload."""

    def update(self, piece: memoryview, /) -> None: ...

    def digest(self) -> bytes: ...


class Seals(Protocol):
    """The seals of one direction of a connection, whose frames follow one another: `tag` begins the next frame.

    If it has a payload: `update` with each piece in order, then `trailer` (sender) or `check` (receiver).
    """

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

    def update(self, piece: memoryview, /) -> None: ...

    def trailer(self, aborted: bool) -> bytes:
        """Return the trailer; `aborted` marks a frame that its sender has cancelled."""
        ...

    def check(self, trailer: bytes) -> bool:
        """Return whether the sender has aborted the frame. Raises `DamagedFrame` for an invalid trailer."""
        ...


class PlainSeals:
    """Checksums, which detect damage but no forgery."""

    tag_nbytes = 0
    trailer_nbytes = 8

    def tag(self, header: bytes, meta: bytes) -> bytes:
        self._hash = xxhash.xxh3_64()
        return b""

    def update(self, piece: memoryview, /) -> None:
        self._hash.update(piece)

    def trailer(self, aborted: bool) -> bytes:
        digest = self._hash.intdigest()
        return (digest ^ _ALL_ONES if aborted else digest).to_bytes(8, "little")

    def check(self, trailer: bytes) -> bool:
        if trailer not in (self.trailer(False), self.trailer(True)):
            raise DamagedFrame("a frame's payload does not match its checksum.")
        return trailer == self.trailer(True)


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
        # The count is not sent: both ends count. A frame that is dropped, repeated or moved has another number here.
        mac.update(self._count.to_bytes(8, "little") + header + meta)
        self._count += 1
        # The payload is hashed while it is in the cache; the mac of the trailer then covers header, meta and this
        # digest.
        self._payload = self._digest()
        return mac.digest()

    def update(self, piece: memoryview, /) -> None:
        self._payload.update(piece)

    def trailer(self, aborted: bool) -> bytes:
        mac = self._mac.copy()  # a receiver asks for both trailers of a frame
        mac.update(self._payload.digest() + (b"aborted" if aborted else b"whole"))
        return mac.digest()

    def check(self, trailer: bytes) -> bool:
        if hmac.compare_digest(trailer, self.trailer(False)):
            return False
        if hmac.compare_digest(trailer, self.trailer(True)):
            return True
        raise _forged()


def check_tag(got: bytes, expected: bytes) -> None:
    """Raise `DamagedFrame` if the tag `got` is not the `expected` one."""
    if not hmac.compare_digest(got, expected):
        raise _forged()


def _forged() -> DamagedFrame:
    return DamagedFrame("a frame's authentication code does not match: another key, or changed in transit.")


NONCE_NBYTES = 32
PROOF_NBYTES = hashlib.sha256().digest_size
UNPROVEN_NBYTES = NONCE_NBYTES + PROOF_NBYTES
"""Largest meta that an end reads before the other end has proved that it has the key."""

REFUSAL = b"refused: give both processes the key of the same run"
"""The reason that a peer without a proof gets."""


class Prover:
    """The proof of one end of a connection. `mine` is its nonce; `calling` is true at the caller's end."""

    def __init__(self, key: bytes, *, calling: bool) -> None:
        self.mine = secrets.token_bytes(NONCE_NBYTES)
        self._key = key
        self._calling = calling
        self._nonces = b""

    def meet(self, theirs: bytes) -> bool:
        """Set the nonce of the other end. Return whether its length is valid."""
        host, caller = (theirs, self.mine) if self._calling else (self.mine, theirs)
        self._nonces = host + caller
        return len(theirs) == NONCE_NBYTES

    @property
    def proof(self) -> bytes:
        """The proof for the other end that this end has the key."""
        return self._of(b"caller" if self._calling else b"host")

    def accepts(self, proof: bytes) -> bool:
        """Whether `proof` is the valid proof of the other end."""
        # In constant time: the time of a comparison must not tell how many bytes were right.
        return hmac.compare_digest(proof, self._of(b"host" if self._calling else b"caller"))

    def seals(self) -> tuple[KeyedSeals, KeyedSeals]:
        """Seals of all frames after the proofs: those that this end sends, those that it receives."""
        secret = self._of(b"session")
        # Each direction has its own seals, so that a frame cannot be sent back to its sender.
        up, down = KeyedSeals(secret, b"to host"), KeyedSeals(secret, b"to caller")
        return (up, down) if self._calling else (down, up)

    def _of(self, what: bytes) -> bytes:
        return hmac.digest(self._key, b"dure " + what + b" " + self._nonces, "sha256")
