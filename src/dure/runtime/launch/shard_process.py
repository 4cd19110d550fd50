"""A shard process, started by a process of the user; it ends when its starter ends.

    starter ── {"..."} ──> python -m dure.runtime.launch.shard_process MODULE NAME LIFE REQUEST ANSWER
    starter <── {"port": ...} ──

runs `main` of MODULE. `LIFE`, `REQUEST` and `ANSWER` are descriptors of pipes. The starter alone holds the other end of
`LIFE`. The watch of that end starts before the import of MODULE, which takes seconds with torch. The standard streams
carry no message: standard input is empty, and what the process prints goes to standard error, after `NAME`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from dure.core.node import nothing
from dure.errors import DureError
from dure.runtime.launch.relay import relayed, write_all

START_SECONDS = 120.0
"""Time limit for the start of a shard process."""

LOOK_SECONDS = 1.0
"""Time between two checks for signals while its end is awaited."""


class ShardProcess:
    """The starter's interface to a process `name` that runs `main` of `module` on `request`."""

    def __init__(self, module: str, name: str, request: Mapping[str, Any]) -> None:
        life, self._sentinel = os.pipe()
        read, write = os.pipe()
        self._answer, answer = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dure.runtime.launch.shard_process", module, name, *map(str, (life, read, answer))],
            stdin=subprocess.DEVNULL,
            pass_fds=[life, read, answer],
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        for end in (life, read, answer):
            os.close(end)
        with contextlib.suppress(BrokenPipeError):  # `answer` raises then
            write_all(write, json.dumps(dict(request)).encode() + b"\n")
        os.close(write)

    def answer(self) -> dict[str, Any]:
        """Read the answer of the process. Raises `DureError` if it gives none."""
        deadline = time.monotonic() + START_SECONDS
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._answer], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(self._answer, 1 << 12) if ready else b""
            if not piece:
                raise DureError("the process of a server did not start; see its message above.")
            line += piece
        answer: dict[str, Any] = json.loads(line)
        return answer

    @property
    def pid(self) -> int:
        return self._process.pid

    def until_gone(self, check: Callable[[], None] = nothing) -> None:
        """Wait until the process has ended by itself, after all workers have finished or failed.

        `check` is called once a second; an exception that it raises ends the wait.
        """
        while self._process.poll() is None:
            check()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(LOOK_SECONDS)
        self._release()

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
        self.until_gone()

    def _release(self) -> None:
        if self._sentinel >= 0:
            os.close(self._sentinel)
            os.close(self._answer)
            self._sentinel = -1


class Starter:
    """The pipes between a process and its starter; each carries one JSON line."""

    def __init__(self, request: int, answer: int) -> None:
        for end in (request, answer):
            os.set_inheritable(end, False)
        self._request = request
        self._answer = answer

    def request(self) -> dict[str, Any]:
        """Read the starter's request. The process exits if there is none."""
        line = b""
        while piece := os.read(self._request, 1 << 12):
            line += piece
        if not line.endswith(b"\n"):
            sys.exit(0)
        request: dict[str, Any] = json.loads(line)
        return request

    def answer(self, **fields: Any) -> None:
        write_all(self._answer, json.dumps(fields).encode() + b"\n")


def watch(life: int) -> None:
    """Exit this process when the other end of the pipe `life` closes, which the end of its holder does too."""
    threading.Thread(target=_wait_for_the_end, args=(life,), daemon=True, name="dure sentinel").start()


def _wait_for_the_end(life: int) -> None:
    """Exit when the read returns: no process holds the other end any more."""
    os.read(life, 1)
    os._exit(1)


if __name__ == "__main__":
    module, name, life, *pipes = sys.argv[1:]
    # Before the import below: the starter may end during the seconds that torch takes.
    watch(int(life))
    with relayed(name):
        import_module(module).main(Starter(*map(int, pipes)))
    os._exit(0)  # skips the interpreter's clean-up, for which the starter would wait
