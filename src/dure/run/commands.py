"""The calls by which the driver of a real run tells its processes what to do; `process.CONTROL` is the other side."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dure.core.node import Address
from dure.errors import RemoteError

if TYPE_CHECKING:
    from dure.core.node import Operation, Reply
    from dure.run.roster import ProcessRoster
    from dure.runtime.process.node import ProcessNode


class Commands:
    """Calls the processes of `roster` from the driver's `node`; `registered` is done once all can be called.

    `clocks` are the servers with a clock.

    Commands that tell a process of the failure of another one suppress the error of a process that has failed itself:
    the driver notices that failure by the connection.
    """

    def __init__(
        self, node: ProcessNode, roster: ProcessRoster, registered: Operation[None], clocks: Sequence[str]
    ) -> None:
        self.clocks = clocks
        self._node = node
        self._roster = roster
        self._registered = registered

    @property
    def clock(self) -> str:
        """The server that hosts the clock, in a run without a pipeline."""
        return self.clocks[0]

    def call(self, name: str, method: str, /, **fields: Any) -> Operation[Reply]:
        return self._node.call(Address(name, "process"), method, **fields)

    def meet(self, name: str, newcomer: str) -> Operation[Reply]:
        """Tell a process where a newcomer listens."""
        return self.call(name, "meet", name=newcomer, place=list(self._roster.places[newcomer]))

    def introduce(self, worker: str) -> None:
        """Tell the other workers where a new one listens: a neighbor in gossip may call it."""
        for name in self._roster.living() & self._roster.ready - {worker}:
            self.meet(name, worker)

    def bring_back(self, server: str) -> None:
        """Tell all processes where a server that was started again listens."""
        self._node.spawn(self._bring_back(server), f"introducing {server} again")

    async def _bring_back(self, server: str) -> None:
        """The clock hears it first: it knows which incarnations are over."""
        with suppress(RemoteError):
            await self.meet(self.clock, server)
            await self.call(self.clock, "returned", name=server)
        for name in self._roster.present.intersection(self._roster.workers):
            self.meet(name, server)

    def evaluate(self, worker: str) -> None:
        """Make a worker the one whose snapshots are evaluated."""
        self._node.spawn(self._tell(worker, "evaluate"), "choosing the worker whose model is evaluated")

    def tell_clock(self, method: str, worker: str) -> None:
        """Tell the clock that a worker is "lost" or "frozen".

        The host of the clock notices by itself the end of a connection, where the worker has called it before.
        """
        state = "gone" if method == "lost" else method
        self._node.spawn(self._tell_clock(method, worker), f"telling the clock that {worker} is {state}")

    def tell_neighbors(self, worker: str) -> None:
        """Tell the living workers that one is frozen."""
        for name in self._roster.living():
            self._node.spawn(self._tell(name, "frozen", name=worker), f"telling {name} that {worker} is frozen")

    async def stop_at(self, step: int) -> None:
        """Have all workers stop for a checkpoint at one clock. Raises `Refused` if one has passed it."""
        asked = [self.call(name, "stop_at", step=step) for name in self._roster.living()]
        for answer in asked:
            await answer

    async def settle(self) -> None:
        """Have the clocks close the group that the last worker left open."""
        for clock in self.clocks:
            await self.call(clock, "settle")

    async def save_servers(self, draft: Path) -> None:
        """Have all servers, and the companions that the run cannot lose, write their parts of a checkpoint."""
        for name in self._roster.saving:
            await self.call(name, "save", draft=str(draft))
        if self._roster.servers:
            await self.settle()
        for name in self._roster.servers:
            await self.call(name, "save", draft=str(draft))

    async def bye(self, name: str) -> None:
        """Have a process exit."""
        with suppress(RemoteError):  # it ended when all was done
            await self.call(name, "bye")

    async def _tell_clock(self, method: str, worker: str) -> None:
        await self._registered
        await self._tell(self.clock, method, name=worker)

    async def _tell(self, name: str, method: str, /, **fields: Any) -> None:
        with suppress(RemoteError):
            await self.call(name, method, **fields)
