"""Entry point of a process that another process starts: reads its request, and exits when its starter ends.

    python -m dure.runtime.launch.sentinel MODULE NAME LIFE REQUEST ANSWER

runs `main` of MODULE. The watch starts before the import of MODULE, which takes seconds with torch.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from importlib import import_module
from typing import Any

from dure.runtime.launch.relay import relayed, write_all


def watch(life: int) -> None:
    """Exit this process when the other end of the pipe `life` closes, which the end of its holder does too."""
    threading.Thread(target=_wait_for_the_end, args=(life,), daemon=True, name="dure sentinel").start()


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


def _wait_for_the_end(life: int) -> None:
    """Exit when the read returns: no process holds the other end any more."""
    os.read(life, 1)
    os._exit(1)


if __name__ == "__main__":
    module, name, life, *pipes = sys.argv[1:]
    watch(int(life))
    with relayed(name):
        import_module(module).main(Starter(*map(int, pipes)))
    os._exit(0)  # skips the interpreter's clean-up, for which the starter would wait
