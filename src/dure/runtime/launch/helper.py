"""A helper process of a process that the user started: it ends when its starter does.

    starter ── {"..."} on standard input ──> python -m dure.runtime.launch.sentinel LIFE MODULE
    starter <── {"port": ...} on standard output ──

`LIFE` is the descriptor of a pipe whose other end the starter alone holds (`sentinel.watch`). `MODULE` has a `main`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from dure.errors import DureError

START_SECONDS = 120.0
"""How long a helper may take to come up."""

LOOK_SECONDS = 1.0
"""How long a wait for its end lasts before signals are looked at."""


class Helper:
    """The starter's end of a helper process that runs `main` of `module`, which gets `request`."""

    def __init__(self, module: str, request: Mapping[str, Any]) -> None:
        life, self._sentinel = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dure.runtime.launch.sentinel", str(life), module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[life],
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        os.close(life)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` says what happened
            self._process.stdin.write(json.dumps(dict(request)).encode() + b"\n")
            self._process.stdin.close()

    def answer(self) -> dict[str, Any]:
        """The first line that it prints. Raises `DureError` if none comes."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + START_SECONDS
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(self._process.stdout.fileno(), 1 << 12) if ready else b""
            if not piece:
                raise DureError("a helper process for a server did not come up; see its message above.")
            line += piece
        answer: dict[str, Any] = json.loads(line)
        return answer

    def until_gone(self) -> None:
        """Until it has ended by itself: it does when everybody has finished with it, or is gone."""
        while self._process.poll() is None:
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
            self._sentinel = -1
        assert self._process.stdout is not None
        self._process.stdout.close()
