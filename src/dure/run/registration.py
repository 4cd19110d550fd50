"""The start of a real run: all processes register, build their parts, and begin together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dure.errors import DureError

if TYPE_CHECKING:
    from dure.core.node import Operation
    from dure.run.roster import ProcessRoster
    from dure.runtime.process.node import ProcessNode

START_SECONDS = 120.0
"""Seconds in which all processes must be ready."""


class Registration:
    """Lets processes wait until all are `registered`, and until all are ready and the run has `begun`.

    `begin` is called before the first process begins.
    """

    def __init__(self, node: ProcessNode, roster: ProcessRoster, begin: Callable[[], None]) -> None:
        self.registered: Operation[None] = node.promise("all processes to register")
        self.begun: Operation[None] = node.promise("all processes to be ready")
        self._node = node
        self._roster = roster
        self._begin = begin

    async def register(self, name: str, place: tuple[str, int]) -> None:
        """Note where a process listens, and wait for the others."""
        self._roster.places[name] = self._node.directory[name] = place
        self._roster.present.add(name)
        self.look()
        await self.registered

    async def ready(self, name: str) -> None:
        """Note that a process is ready, and wait for the others."""
        self._roster.ready.add(name)
        self.look()
        await self.begun

    def look(self) -> None:
        """Go on if no process is missing."""
        if self._roster.all_present:
            self.registered.resolve()
        if not self._roster.missing and not self.begun.done:
            self._begin()
            self.begun.resolve()

    def check(self) -> None:
        """Raise `DureError` if a process is missing for too long."""
        if not self.begun.done and self._node.now() > START_SECONDS:
            missing = ", ".join(sorted(self._roster.missing))
            raise DureError(f"{missing} did not come up within {START_SECONDS:g} s.")
