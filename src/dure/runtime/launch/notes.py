"""Codes of the notes that ranks leave in the engine's store, which everyone can write who reaches its port.

    note = code, space, JSON value        code = HMAC-SHA256 under the key of the meeting over name and JSON value

Ranks with a key file draw a nonce each at the start of a meeting, and derive its key from these and the file's. So a
note that was forged, altered, moved to another name, or recorded in an earlier meeting or attempt has a wrong code.
Notes of ranks without a key file have no code.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Sequence
from typing import Any

from dure.errors import AlteredNote, UsageError

_MARK = "code "
"""Start of a note with a code. No JSON value starts with it."""

_WAS_ALTERED = "in the store where the ranks meet was altered"


class NoteSeal:
    """Writes and reads notes with a code under `key`, or without a code where `key` is None."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key

    def of_meeting(self, topic: str, nonces: Sequence[str]) -> NoteSeal:
        """The seal of one meeting of the ranks that have drawn `nonces`."""
        assert self._key is not None
        return NoteSeal(hmac.digest(self._key, json.dumps(["dure meeting", topic, *nonces]).encode(), "sha256"))

    @property
    def nonce(self) -> str | None:
        """A new nonce; None without a key."""
        return None if self._key is None else secrets.token_hex(32)

    def write(self, name: str, value: Any) -> str:
        """The note of `value` under `name`."""
        text = json.dumps(value)
        return text if self._key is None else f"{_MARK}{self._code(name, text)} {text}"

    def read(self, name: str, note: bytes) -> Any:
        """The value of a note. Raises `AlteredNote` for one that no rank of this meeting has written under `name`."""
        try:
            text = note.decode()
            if self._key is not None:
                text = self._checked(name, text)
            elif text.startswith(_MARK):
                raise UsageError(
                    f"the note {name!r} of another rank has a code of a key file, and this rank has no key file: give "
                    "every rank one, or none."
                )
            return json.loads(text)
        except UsageError:
            raise
        except (ValueError, RecursionError):  # no UTF-8, no JSON, or a number of more digits than Python reads
            raise AlteredNote(f"the note {name!r} {_WAS_ALTERED}: no rank wrote it.") from None

    def _checked(self, name: str, text: str) -> str:
        """The JSON text of a note whose code is valid."""
        code, _, value = text.removeprefix(_MARK).partition(" ")
        if not text.startswith(_MARK) or not hmac.compare_digest(code.encode(), self._code(name, value).encode()):
            raise AlteredNote(
                f"the note {name!r} {_WAS_ALTERED}: it has no valid code of the key file. Another process wrote it, or "
                "a rank that has another key file or none."
            )
        return value

    def _code(self, name: str, text: str) -> str:
        assert self._key is not None
        return hmac.digest(self._key, json.dumps([name, text]).encode(), "sha256").hex()
