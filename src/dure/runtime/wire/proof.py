"""Proofs: each end of a new connection proves to the other that it has the run's key, before any other exchange.

    host ── CHALLENGE: nonce ──────────────> caller       32 random bytes
    host <────────── PROOF: nonce, proof ─── caller       HMAC-SHA256 under the key of "caller" and both nonces
    host ── PROOF: proof ──────────────────> caller       the same of "host"
    ... all further frames are sealed with a key that is derived from the run's key and both nonces (`integrity`)

A recorded proof is invalid on another connection, since each end draws a new nonce. The key is never sent. These frames
say nothing about the run: names are in the first sealed frames, HELLO and WELCOME.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from dure.runtime.wire.integrity import KeyedSeals

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
        return hmac.compare_digest(proof, self._of(b"host" if self._calling else b"caller"))

    def seals(self) -> tuple[KeyedSeals, KeyedSeals]:
        """Seals of all frames after the proofs: those that this end sends, those that it receives."""
        secret = self._of(b"session")
        up, down = KeyedSeals(secret, b"to host"), KeyedSeals(secret, b"to caller")
        return (up, down) if self._calling else (down, up)

    def _of(self, what: bytes) -> bytes:
        return hmac.digest(self._key, b"dure " + what + b" " + self._nonces, "sha256")
