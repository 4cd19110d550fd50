"""How a process that was started here hears of its start, and of its starter's end.

    python -m dure.runtime.launch.sentinel LIFE MODULE

runs `main` of MODULE, and watches from before it is imported: with torch, that takes seconds.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from importlib import import_module
from typing import Any


def watch(life: int) -> None:
    """End this process as soon as the other end of the pipe `life` is closed, however that came about."""
    threading.Thread(target=_wait_for_the_end, args=(life,), daemon=True, name="dure sentinel").start()


def first_request() -> dict[str, Any]:
    """The first line of standard input, JSON; ends the process where there is none.

    Read byte by byte: what follows the line stays in the pipe.
    """
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit(0)
        line += byte
    request: dict[str, Any] = json.loads(line)
    return request


def _wait_for_the_end(life: int) -> None:
    """Returns from the read only when nobody holds the other end any more."""
    os.read(life, 1)
    os._exit(1)


if __name__ == "__main__":
    watch(int(sys.argv[1]))
    import_module(sys.argv[2]).main()
