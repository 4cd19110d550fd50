"""Processes of a run in control groups with a limit of memory, below the group of the tests."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from dure.runtime.launch.fork_server import ForkServer

GROUPS = Path("/sys/fs/cgroup")


def _memory_group() -> tuple[Path, str, str] | None:
    """The group of this process that accounts memory, and the files of a limit and of the most memory used."""
    membership = Path("/proc/self/cgroup")
    for line in membership.read_text(encoding="utf-8").splitlines() if membership.exists() else ():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return GROUPS / "memory" / path.strip("/"), "memory.limit_in_bytes", "memory.max_usage_in_bytes"
        group = GROUPS / path.strip("/")
        control = group / "cgroup.subtree_control"
        if number == "0" and control.exists() and "memory" in control.read_text(encoding="utf-8").split():
            return group, "memory.max", "memory.peak"
    return None


class LimitedServer(ForkServer):
    """A fork server that puts each process into a group of its own with this `limit`, before the process is at work.

    A process has registered with the driver before it allocates its model, and the driver waits here.
    """

    def __init__(self, group: Path, limit_file: str, limit: int) -> None:
        self.group, self.limit_file, self.limit = group, limit_file, limit
        self.groups: dict[str, Path] = {}
        super().__init__()

    def start(self, name: str, **arguments: object) -> None:
        super().start(name, **arguments)
        while name not in self.pids:
            self.look()
            time.sleep(0.001)
        place = self.groups[name] = self.group / f"dure-{os.getpid()}-{name.replace(' ', '-')}"
        place.mkdir()
        (place / self.limit_file).write_text(str(self.limit), encoding="utf-8")
        (place / "cgroup.procs").write_text(str(self.pids[name]), encoding="utf-8")


@contextlib.contextmanager
def limited(limit: int) -> Iterator[tuple[LimitedServer, dict[str, int]]]:
    """A fork server whose processes have `limit` bytes each, and at the end the most that each of them used."""
    found = _memory_group()
    assert found is not None
    group, limit_file, peak_file = found
    used: dict[str, int] = {}
    with LimitedServer(group, limit_file, limit) as server:
        try:
            yield server, used
        finally:
            server.clear()
            for name, place in server.groups.items():
                if (place / peak_file).exists():
                    used[name] = int((place / peak_file).read_text(encoding="utf-8"))
                _remove(place)


def _remove(place: Path) -> None:
    """Remove a group, once its last process has gone."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            place.rmdir()
            return
        time.sleep(0.05)


def can_limit_memory() -> bool:
    """Whether this process may make groups with a limit of memory."""
    found = _memory_group() if os.geteuid() == 0 else None
    if found is None:
        return False
    place = found[0] / f"dure-{os.getpid()}-probe"
    try:
        place.mkdir()
        return (place / found[1]).exists()
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            place.rmdir()
