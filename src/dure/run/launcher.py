"""The interface of a launcher, which starts the processes of a real run and reports their exits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from dure.runtime.heartbeat import BeatPipe


class Launcher(Protocol):
    """Starts processes by name, sends signals to them, and reports their exits."""

    @property
    def exited(self) -> Mapping[str, int]:
        """Exit statuses by name, negative for a signal."""
        ...

    @property
    def beats(self) -> BeatPipe:
        """The pipe through which the heartbeats of all processes come."""
        ...

    @property
    def processes(self) -> Mapping[str, int]:
        """Process ids of the running processes of this machine, by name."""
        ...

    def start(self, name: str, **arguments: Any) -> None:
        """Start a process; `arguments` are those of a `LaunchSpec`."""
        ...

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a process of this machine."""
        ...

    def look(self) -> None:
        """Read the exits since the last call. Raises `DureError` if the launcher itself has failed."""
        ...

    def last_line(self, name: str) -> str:
        """The last line of output of a process that has ended."""
        ...
