"""Ends what remains of a local Ray: a program that waits for the end of the process that has started Ray.

Ray's agents outlive a driver that is killed. The guard reads the end of a pipe that only the driver can write to. It
then kills the processes that have files open in the folder of Ray, as all of Ray's have, and removes the folder. It
imports the standard library only, and nothing of dure: the driver starts it by the path of this file.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

ROUNDS = 100
"""Looks for processes at most; a process may start another while it is killed."""

PAUSE_SECONDS = 0.1
"""Seconds between two looks."""


def using(folder: str, spared: Collection[int]) -> list[int]:
    """Process ids of the processes with an open file in `folder`, except for the `spared` ones."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to another user
            files = [os.readlink(each) for each in (entry / "fd").iterdir()]
            if int(entry.name) not in spared and any(file.startswith(folder + os.sep) for file in files):
                found.append(int(entry.name))
    return found


def clean(folder: str, spared: Collection[int] = ()) -> None:
    """Kill the processes of the Ray in `folder`, except for the `spared` ones, and remove the folder."""
    for _ in range(ROUNDS):
        left = using(folder, {os.getpid(), *spared})
        if not left:
            break
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(PAUSE_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    driver = os.getppid()
    sys.stdin.buffer.read()
    clean(sys.argv[1], {driver})
