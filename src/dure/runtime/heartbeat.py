"""Heartbeats: a thread of each process sends an observer a datagram once a second while the process runs.

    worker, server ── datagram (token, clock, waiting) ──> `Receiver` of the launcher

A process that is stopped (SIGSTOP, a debugger, a failed machine) sends none. During a computation, `time.sleep` and a
loop in Python the thread can send. During native code that keeps the interpreter's lock it cannot: on the observer's
machine `process_state.cpu_seconds` distinguishes such code from a stopped process.

A token is random and belongs to one incarnation of one process, which gets it at its start. A datagram with another
token is ignored.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

PERIOD_SECONDS = 1.0
"""Longest time between two heartbeats."""

LONGEST_GAP_SECONDS = 2.0
"""Longest silence that one look can add: an observer that looks later was stopped itself."""

_DATAGRAM = struct.Struct("!16sq?")


class Beat(NamedTuple):
    """A heartbeat: the steps that a worker has made, and whether the process waits for others."""

    name: str
    clock: int
    waiting: bool


class Heartbeat:
    """Sends the heartbeats of this process to `address`, one in `period` seconds, until `stop`.

    `state` is called on a thread of its own and gives the clock, and whether the process waits for others.
    """

    def __init__(
        self, address: tuple[str, int], token: str, state: Callable[[], tuple[int, bool]], period: float
    ) -> None:
        self._token = bytes.fromhex(token)
        self._period = period
        self._state = state
        self._stopped = threading.Event()
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        with contextlib.suppress(OSError):  # a connected socket receives from the observer only
            self._socket.connect(address)
        self._thread = threading.Thread(target=self._send, name="dure heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop sending."""
        self._stopped.set()
        self._thread.join(PERIOD_SECONDS)
        self._socket.close()

    def _send(self) -> None:
        while not self._stopped.is_set():
            with contextlib.suppress(OSError):  # a datagram may be lost; the next follows in a second
                self._socket.send(_DATAGRAM.pack(self._token, *self._state()))
            self._stopped.wait(self._period)


class Receiver:
    """Receives heartbeats on a port of `interface`, from processes that have a token."""

    def __init__(self, interface: str) -> None:
        family = socket.AF_INET6 if ":" in interface else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.bind((interface, 0))
        self._socket.setblocking(False)
        self.address: tuple[str, int] = (interface, self._socket.getsockname()[1])
        self._names: dict[bytes, str] = {}

    def token(self, name: str) -> str:
        """Make a token, in hexadecimal, for the process `name`. Its earlier token becomes invalid."""
        self._names = {token: other for token, other in self._names.items() if other != name}
        token = secrets.token_bytes(16)
        self._names[token] = name
        return token.hex()

    def received(self) -> Iterator[Beat]:
        """Yield the heartbeats that have arrived since the last call."""
        with contextlib.suppress(BlockingIOError):
            while True:
                datagram = self._socket.recv(_DATAGRAM.size + 1)
                if len(datagram) == _DATAGRAM.size:
                    token, clock, waiting = _DATAGRAM.unpack(datagram)
                    if token in self._names:
                        yield Beat(self._names[token], clock, waiting)

    def close(self) -> None:
        self._socket.close()


class Silence:
    """Seconds since the last sign of each process, counted while this observer runs.

    `pass_time` is called several times a second. Time for which the observer itself was stopped (the machine slept, or
    all processes were stopped) counts against no process.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._seconds: dict[str, float] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._seconds

    def heard(self, name: str) -> None:
        """Reset the silence of a process that has shown that it runs. The first call starts the count."""
        self._seconds[name] = 0.0

    def forget(self, name: str) -> None:
        self._seconds.pop(name, None)

    def pass_time(self) -> None:
        """Add the seconds since the last call to the silence of each process."""
        now = self._clock()
        gap, self._last = min(now - self._last, LONGEST_GAP_SECONDS), now
        for name in self._seconds:
            self._seconds[name] += gap

    def seconds(self, name: str) -> float:
        """Seconds of silence of the process; 0 before its first sign."""
        return self._seconds.get(name, 0.0)
