"""Credentials: the secret key that all processes of a run have, and no other process."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dure.errors import UsageError

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
