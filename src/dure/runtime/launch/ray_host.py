"""One process of a run on a machine of Ray: a fork server, in an actor that the driver calls.

    driver                                    actor (this module)              fork server
      load(set-up) ──────────────────────────>  load ────────────────────────>  loads the job once
      start(number, name, arguments) ────────>  start ───────────────────────>  forks the process
      look() ────────────────────────────────>  waits for something new
        <── exit, pid, output ────────────────

The fork server ends when the actor ends in any way, and its process with it (`fork_server`). Ray ends the actor after
the end of the driver or of the machine's raylet. Values that reach the actor are arguments of calls: the constructor
has none that is secret.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from dure.errors import DureError
from dure.runtime.launch.fork_server import ForkServer

WAIT_SECONDS = 0.5
"""Longest time for which `look` waits."""


class RayHost:
    """Starts one process at a time, and reports its exit and its output."""

    def __init__(self, folder: str) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, [])  # Ray blocks SIGINT, and processes inherit that
        if os.path.isdir(folder):
            os.chdir(folder)
        self._place = _place()
        self._number = -1
        self._name = ""
        self._open = True
        self._lock = threading.Lock()  # Ray calls `look` on a thread of its own
        self._output, sink = os.pipe()
        os.set_blocking(self._output, False)
        self._fork_server = ForkServer(sink)
        os.close(sink)

    def where(self) -> dict[str, Any]:
        """The machine of this actor: its name, its number in Ray, its address, and whether its Ray asks for tokens.

        `gpus` are the numbers of the GPUs that this actor has there, and that its process sees.
        """
        return self._place

    def load(self, setup: Mapping[str, Any]) -> None:
        """Load a run in the fork server."""
        with self._lock, suppress(DureError):  # as in `start`
            self._fork_server.load(setup)

    def start(self, number: int, name: str, arguments: Mapping[str, Any], *, loopback: bool) -> None:
        """Start incarnation `number` of the process `name`, which listens at the loopback or the machine's address."""
        with self._lock, suppress(DureError):  # the fork server has ended, which `look` reports
            self._number, self._name = number, name
            interface = "127.0.0.1" if loopback else self._place["address"]
            self._fork_server.start(name, **{**arguments, "interface": interface})

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        with self._lock:
            self._fork_server.signal(self._name, number)

    def clear(self) -> None:
        """End the process."""
        with self._lock:
            self._number = -1
            self._fork_server.clear()

    def look(self) -> dict[str, Any]:
        """Wait for something new, and return it with the number of the incarnation to which it belongs."""
        with suppress(OSError, ValueError):  # `close` has closed the descriptors meanwhile
            select.select([self._fork_server.source, self._output], [], [], WAIT_SECONDS)
        with self._lock:
            return self._news() if self._open else {}

    def close(self) -> bytes:
        """End the process and the fork server; returns the rest of the output."""
        with self._lock:
            self._open = False
            self._fork_server.close()
            return self._read()

    def _news(self) -> dict[str, Any]:
        fork_server, name, status, last_line = self._fork_server, self._name, None, ""
        try:
            fork_server.look()
        except DureError as error:
            status, last_line = fork_server.status, str(error)
        return {
            "number": self._number,
            "place": self._place,
            "pid": fork_server.pids.get(name),
            "status": fork_server.exited.get(name) if status is None else status,
            "last_line": last_line or fork_server.last_line(name),
            "output": self._read(),
            "usable": status is None,
        }

    def _read(self) -> bytes:
        pieces = []
        with suppress(BlockingIOError):
            while piece := os.read(self._output, 1 << 16):
                pieces.append(piece)
        return b"".join(pieces)


def _place() -> dict[str, Any]:
    import ray

    context: Any = ray.get_runtime_context()
    return {
        "host": socket.gethostname(),
        "node": context.get_node_id(),
        "address": ray.util.get_node_ip_address(),
        "gpus": [str(number) for number in ray.get_gpu_ids()],
        "authenticates": os.environ.get("RAY_AUTH_MODE", "").lower() == "token",
    }
