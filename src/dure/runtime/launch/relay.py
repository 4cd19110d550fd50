"""Output of user code in the processes of a run: each line goes to standard error, after the name of its process.

    worker 0 ── descriptors 1 and 2 ──> pipe ──> Prefixed ──> "worker 0: a line" on standard error

Descriptors 0, 1 and 2 of a process belong to user code, at the level of C too. Messages between processes of this
library use other descriptors.
"""

from __future__ import annotations

import ctypes
import io
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any

from dure.core.text import printable, sentence

STDIN, STDOUT, STDERR = 0, 1, 2

LONGEST = 1 << 16
"""Length from which an unfinished line is written."""

PARTING_SECONDS = 1.0
"""Time limit for other processes to close the output at the end of a relay."""


class Prefixed:
    """Writes lines to the descriptor `target`, each after `name` and a colon.

    `last` is the last line with text: one that is not indented, if there is one, as the frames of an exception are.
    """

    def __init__(self, name: str, target: int) -> None:
        self.last = ""
        self._prefix = f"{name}: ".encode()
        self._target = target
        self._partial = b""

    def feed(self, piece: bytes) -> None:
        """Take the next bytes of the output, and write the lines that are complete."""
        *lines, self._partial = (self._partial + piece).split(b"\n")
        if len(self._partial) > LONGEST:
            lines, self._partial = [*lines, self._partial], b""
        if lines:
            self._write(lines)

    def end(self) -> None:
        """Write an unfinished last line."""
        if self._partial:
            lines, self._partial = [self._partial], b""
            self._write(lines)

    def _write(self, lines: list[bytes]) -> None:
        shown = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]  # of a progress bar, its last state
        texts = [line for line in shown if line.strip()]
        texts = [line for line in texts if not line[:1].isspace()] or texts[-1:] * (not self.last)
        if texts:
            self.last = sentence(texts[-1].decode(errors="replace"))
        with suppress(OSError):  # standard error has no reader
            write_all(self._target, b"".join(self._prefix + _shown(line) + b"\n" for line in shown))


_COLOR = re.compile(r"(\x1b\[[0-9;]*m)")


def _shown(line: bytes) -> bytes:
    """A line of user code with its control characters escaped, except colors."""
    parts = _COLOR.split(line.decode(errors="replace"))
    return "".join(part if number % 2 else printable(part) for number, part in enumerate(parts)).encode()


def write_all(target: int, content: bytes) -> None:
    """Write all of `content` to a descriptor that blocks."""
    while content:
        content = content[os.write(target, content) :]


class _Lossy(io.FileIO):
    """A descriptor that loses output for which a disk has no room."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except BrokenPipeError:
            raise
        except OSError:
            return len(content)


def ready_streams() -> None:
    """Prepare the standard streams of a command, so that they end no run.

    A closed stream becomes /dev/null, else a file or a socket of the run would get its number. Standard error loses
    what cannot be written. A character that the encoding lacks is written as its number.
    """
    for number, name in ((STDIN, "stdin"), (STDOUT, "stdout"), (STDERR, "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number, which is this
            stream = open(number, "w" if number else "r", encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    raw = io.BufferedWriter(_Lossy(STDERR, "w", closefd=False))
    sys.stderr = io.TextIOWrapper(raw, sys.stderr.encoding, "backslashreplace", line_buffering=True)


def flush() -> None:
    """Flush the buffers of Python and the C library for standard output and standard error."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # user code has closed or replaced it
            stream.flush()
    ctypes.CDLL(None).fflush(None)


@contextmanager
def relayed(name: str) -> Iterator[None]:
    """Redirect standard output of this process to standard error while open, each line after `name`."""
    flush()
    source, sink = os.pipe()
    before, target = os.dup(STDOUT), os.dup(STDERR)
    os.dup2(sink, STDOUT)
    relay = threading.Thread(target=_relay, args=(source, Prefixed(name, target)), daemon=True, name="dure relay")
    relay.start()
    try:
        with os.fdopen(sink, "w", buffering=1, errors="replace") as stream, redirect_stdout(stream):
            yield
    finally:
        flush()
        os.dup2(before, STDOUT)
        os.close(before)
        relay.join(PARTING_SECONDS)
        if not relay.is_alive():
            os.close(target)
            os.close(source)


def _relay(source: int, lines: Prefixed) -> None:
    while piece := os.read(source, 1 << 16):
        lines.feed(piece)
    lines.end()
