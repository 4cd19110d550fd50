"""What a run asks of its launcher, which starts and watches processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Launcher(Protocol):
    """Who starts and watches processes."""

    @property
    def exited(self) -> Mapping[str, int]:
        """Names and exit statuses, negative for a signal."""
        ...

    @property
    def processes(self) -> Mapping[str, int]:
        """The numbers of the processes of this machine that run."""
        ...

    def start(self, name: str, **arguments: Any) -> None: ...

    def signal(self, name: str, number: int) -> None: ...

    def look(self) -> None: ...

    def last_line(self, name: str) -> str: ...
