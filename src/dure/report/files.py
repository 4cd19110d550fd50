"""Writes files of a record: JSON that any reader can parse, complete or absent, or appended row by row.

JSON cannot write numbers that are not finite. They are written as the texts "NaN", "Infinity" and "-Infinity", as in
the JSON mapping of Protocol Buffers.

A sink is a destination of the rows of a history, written while the run goes on: `JsonLines` here, others in `sinks`. A
row is a mapping such as `{"seconds": 1.5, "step": 20, "updates": 40, "samples": 640, "loss": 0.4, "accuracy": 0.9,
"bytes": 8192}`. A row of reinforcement learning has a mean return, and figures of actors and replays. A value may be
None.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, Protocol, cast

from dure.core.regular_file import check_regular
from dure.core.text import log

_NOT_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Writes `value` as strict JSON: a number that is not finite becomes "NaN", "Infinity" or "-Infinity"."""
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


@contextmanager
def replacing(path: Path) -> Iterator[IO[str]]:
    """Yields a text file that replaces `path` at the end of the block; after an error `path` stays as it was.

    The new file is on the disk (fsync) before it gets its name: a kill or a full disk leaves the old file complete.
    Raises OSError if `path` is a pipe or a device, which root could replace, as `/dev/null` of the whole machine.
    """
    check_regular(path)
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
    """Appends complete records to `path`; the operating system has a record when `append` returns.

    If the disk is full, no part of a record stays in the file. The record is kept, and written before the next one.
    """

    def __init__(self, path: Path) -> None:
        self._file = cast(BinaryIO, path.open("ab", buffering=0))
        self._kept = b""

    def lock(self) -> None:
        """Hold a lock that other writers may hold, too, until `close` or the end of this process."""
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def append(self, record: bytes) -> None:
        """Append a record after those that are kept. Raises OSError if they cannot be written."""
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
        """Close the file. Raises OSError if records are lost because the disk is still full."""
        with self._file:
            self.append(b"")


def has_writer(path: Path) -> bool:
    """Whether a process has locked the file `path` (`AppendedFile.lock`). False if the file system has no locks."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False


class Unwritten:
    """The `causes` of missing content, by the name of the file."""

    def __init__(self) -> None:
        self.causes: dict[str, str] = {}

    @contextmanager
    def tolerated(self, name: str) -> Iterator[None]:
        """While open, note an error of the file system in writing `name`, and log it once, instead of raising it.

        A later block of the same name without an error removes the note: the file is complete then.
        """
        try:
            yield
        except OSError as error:
            cause = error.strerror or str(error)
            if name not in self.causes:
                log.warning("%s cannot be written (%s).", name, cause)
            self.causes[name] = cause
        else:
            self.causes.pop(name, None)


class Sink(Protocol):
    """Writes the rows of a run's history.

    Both methods raise OSError if a row cannot be written, as on a full disk. The run logs that once, and goes on.
    """

    def write(self, row: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """Appends one line for each row to `path`, after its last complete line.

    After `write` has returned, a kill of this process does not lose the row. A row that the disk has no space for is
    written before the next one. Until `close`, `has_writer` says so of the file.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = AppendedFile(Path(path))
        self._file.lock()
        _drop_torn_line(Path(path))  # after `AppendedFile` has created it; appends follow the new end

    def write(self, row: Mapping[str, Any]) -> None:
        self._file.append(to_json(row).encode("utf-8") + b"\n")

    def close(self) -> None:
        self._file.close()


def _drop_torn_line(path: Path) -> None:
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)
