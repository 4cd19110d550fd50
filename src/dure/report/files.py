"""JSON that any reader can parse, files that are whole or absent, and files to which whole records are appended.

JSON has no word for what is no number. Here "NaN", "Infinity" and "-Infinity" are written as these texts, as
Protocol Buffers' JSON mapping does.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

_NOT_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_json(value: Any, *, indent: int | None = None) -> str:
    """`value` as strict JSON: what is no finite number becomes "NaN", "Infinity" or "-Infinity"."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def from_json(text: str) -> Any:
    """The inverse of `to_json`. Raises `json.JSONDecodeError`."""
    return _numbers(json.loads(text))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _numbers(value: Any) -> Any:
    if isinstance(value, str):
        return _NOT_NUMBERS.get(value, value)
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return value


def check_regular(path: Path) -> None:
    """Raise OSError for a pipe or a device under the name of a record's file: reading it may wait for ever."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file", str(path))


def read_regular(path: Path) -> bytes:
    """The content of a file of a record. Raises OSError where there is none, or it is no regular file."""
    check_regular(path)
    return path.read_bytes()


@contextmanager
def replacing(path: Path) -> Iterator[IO[str]]:
    """A text file that takes the place of `path` when the block ends, and leaves it alone when the block fails.

    The new file is on the disk (fsync) before it gets its name: a kill or a full disk leaves the old one whole.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("w", encoding="utf-8", newline="\n") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class AppendedFile:
    """Appends whole records to the end of `path`; a record is with the operating system when `append` returns.

    Of a record that the disk has no room for, nothing stays in the file. It is kept, and written before the next one.
    """

    def __init__(self, path: Path) -> None:
        self._file = cast(BinaryIO, path.open("ab", buffering=0))
        self._kept = b""

    def append(self, record: bytes) -> None:
        """Raises OSError where this record, and those that are kept, are not written."""
        self._kept += record
        end = os.fstat(self._file.fileno()).st_size
        rest = memoryview(self._kept)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(end)
            raise
        self._kept = b""

    def close(self) -> None:
        """Raises OSError where records are lost: there is still no room for what was kept."""
        with self._file:
            self.append(b"")
