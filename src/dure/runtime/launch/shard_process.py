"""A helper process of a process that the user started: it ends when its starter does.

    starter ── {"..."} ──> python -m dure.runtime.launch.sentinel MODULE NAME LIFE REQUEST ANSWER
    starter <── {"port": ...} ──

`LIFE`, `REQUEST` and `ANSWER` are descriptors of pipes. The starter alone holds the other end of `LIFE`
(`sentinel.watch`). `MODULE` has a `main`. The standard streams carry no message: standard input is empty, and what the
helper prints goes to standard error, after `NAME`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from dure.core.node import nothing
from dure.errors import DureError
from dure.runtime.launch.relay import write_all

START_SECONDS = 120.0
"""How long a helper may take to come up."""

LOOK_SECONDS = 1.0
"""How long a wait for its end lasts before signals are looked at."""


class ShardProcess:
    """The starter's end of a helper process `name` that runs `main` of `module`, which gets `request`."""

    def __init__(self, module: str, name: str, request: Mapping[str, Any]) -> None:
        life, self._sentinel = os.pipe()
        read, write = os.pipe()
        self._answer, answer = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dure.runtime.launch.sentinel", module, name, *map(str, (life, read, answer))],
            stdin=subprocess.DEVNULL,
            pass_fds=[life, read, answer],
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        for end in (life, read, answer):
            os.close(end)
        with contextlib.suppress(BrokenPipeError):  # `answer` says what happened
            write_all(write, json.dumps(dict(request)).encode() + b"\n")
        os.close(write)

    def answer(self) -> dict[str, Any]:
        """The line that it answers with. Raises `DureError` if none comes."""
        deadline = time.monotonic() + START_SECONDS
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._answer], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(self._answer, 1 << 12) if ready else b""
            if not piece:
                raise DureError("a helper process for a server did not come up; see its message above.")
            line += piece
        answer: dict[str, Any] = json.loads(line)
        return answer

    @property
    def pid(self) -> int:
        return self._process.pid

    def until_gone(self, check: Callable[[], None] = nothing) -> None:
        """Until it has ended by itself: it does when everybody has finished with it, or is gone.

        `check` is called once a second, and raises what ends the wait.
        """
        while self._process.poll() is None:
            check()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(LOOK_SECONDS)
        self._release()

    def kill(self) -> None:
        """End it now."""
        self._process.kill()
        self.until_gone()

    def _release(self) -> None:
        if self._sentinel >= 0:
            os.close(self._sentinel)
            os.close(self._answer)
            self._sentinel = -1
