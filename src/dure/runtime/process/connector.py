"""Connections of a process to the hosts that it calls, opened by the first call."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from dure.errors import GreetingLost, RemoteError
from dure.runtime.process.loop import ProcessLoop

CONNECT_SECONDS = 20.0
"""Time limit of one greeting."""

GREETING_SECONDS = 120.0
"""Time for which a lost greeting is repeated: as long as a run may take to start."""

AGAIN_SECONDS = 0.1
"""Pause between two greetings."""


class Connector:
    """Connects the process `name` to the hosts in `directory`, which maps names to addresses."""

    def __init__(self, name: str, loop: ProcessLoop, directory: Mapping[str, tuple[str, int]]) -> None:
        self._directory = directory
        self._name = name
        self._loop = loop
        self._wire = loop.wire
        self._waiting: dict[str, list[Callable[[RemoteError | None], None]]] = {}

    def when_connected(self, peer: str, start: Callable[[RemoteError | None], None]) -> None:
        """Call `start` once `peer` is connected, or with the error if it cannot be: at once, or from the loop.

        This method runs no other task: code without `await` stays atomic, and calls leave in the order of their start.
        """
        if self._wire.connected(peer):
            start(None)
        elif peer in self._waiting:
            self._waiting[peer].append(start)
        elif peer not in self._directory:
            known = ", ".join(self._directory) or "nobody"
            start(RemoteError(f"{self._name} does not know where {peer} is; it knows {known}."))
        else:
            self._waiting[peer] = [start]
            self._connect(peer, time.monotonic() + GREETING_SECONDS)

    def _connect(self, peer: str, deadline: float) -> None:
        """Connect to `peer`; repeat a lost greeting until the `deadline`.

        A greeting is lost if one of both processes is stopped for longer than a host waits for a greeting.
        """

        def opened(error: RemoteError | None) -> None:
            if isinstance(error, GreetingLost) and time.monotonic() < deadline:
                self._loop.after(AGAIN_SECONDS, lambda: self._connect(peer, deadline))
            else:
                self._opened(peer, error)

        try:
            self._wire.open(peer, *self._directory[peer], opened, CONNECT_SECONDS)
        except RemoteError as error:
            opened(error)

    def _opened(self, peer: str, error: RemoteError | None) -> None:
        for start in self._waiting.pop(peer):
            start(error)
