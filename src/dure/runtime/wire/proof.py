"""Proofs: each end of a new connection shows the other that it has the run's key, before it reads anything else of it.

    host ── CHALLENGE: nonce ──────────────> caller       32 random bytes
    host <────────── PROOF: nonce, proof ─── caller       HMAC-SHA256 under the key of "caller" and both nonces
    host ── PROOF: proof ──────────────────> caller       the same of "host"
    ... from here on every frame is sealed with a key that is derived from the run's and both nonces (`seal`)

What is recorded on one connection is worth nothing on another: each end draws its nonce anew. The key itself never
travels, and nothing that does tells of the run: names come in the first sealed frames, HELLO and WELCOME.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from dure.runtime.wire.integrity import KeyedSeals

NONCE_NBYTES = 32
PROOF_NBYTES = hashlib.sha256().digest_size
UNPROVEN_NBYTES = NONCE_NBYTES + PROOF_NBYTES
"""The most that an end reads of one that has proved nothing yet, headers apart."""

REFUSAL = b"refused: give both processes the key of the same run"
"""All that one hears who has proved nothing."""


class Prover:
    """One end of one connection: `mine` is its nonce. `calling`: it is the caller's."""

    def __init__(self, key: bytes, *, calling: bool) -> None:
        self.mine = secrets.token_bytes(NONCE_NBYTES)
        self._key = key
        self._calling = calling
        self._nonces = b""

    def meet(self, theirs: bytes) -> bool:
        """Take in the other end's nonce; whether it is one."""
        host, caller = (theirs, self.mine) if self._calling else (self.mine, theirs)
        self._nonces = host + caller
        return len(theirs) == NONCE_NBYTES

    @property
    def proof(self) -> bytes:
        """What shows the other end that this one has the key."""
        return self._of(b"caller" if self._calling else b"host")

    def accepts(self, proof: bytes) -> bool:
        """Whether `proof` shows that the other end has the key."""
        return hmac.compare_digest(proof, self._of(b"host" if self._calling else b"caller"))

    def seals(self) -> tuple[KeyedSeals, KeyedSeals]:
        """Of everything after the proofs: (of what this end sends, of what it receives)."""
        secret = self._of(b"session")
        up, down = KeyedSeals(secret, b"to host"), KeyedSeals(secret, b"to caller")
        return (up, down) if self._calling else (down, up)

    def _of(self, what: bytes) -> bytes:
        return hmac.digest(self._key, b"dure " + what + b" " + self._nonces, "sha256")
