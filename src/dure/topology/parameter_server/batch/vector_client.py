"""Calls of a worker to the named vectors on the shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from dure.core.node import Operation, Reply
    from dure.topology.parameter_server.client import ServerClient


class VectorClient:
    """Stages sums at the shards and fetches vectors from them, by the numbers and repeated calls of `server`."""

    def __init__(self, server: ServerClient) -> None:
        self.sender = server.sender
        self._node = server.node
        self._calls = server.calls
        self._servers = server.servers

    async def stage(self, update: torch.Tensor) -> int:
        """Stage `update` at the shards for a coordinator's commands (`vectors`), and return its number there.

        Raises `Refused` if a shard refuses the update (NaN, a past incarnation). Other shards may have staged it then.
        """
        self.sender.seq += 1
        parts, shards = self._servers.parts(update), self._servers.shards
        call, mine, timeout = self._node.call, self.sender.last, self._calls.timeout

        def start(shard: int) -> Operation[Reply]:
            return call(shards[shard], "stage", *parts[shard], timeout=timeout, **mine)

        await self._calls.every(start)
        return self.sender.seq

    async def fetch(self, into: torch.Tensor, name: str) -> None:
        """Receive the shards' vector called `name` (`vectors`) into `into`. Raises `Refused` if no vector has it."""
        parts, shards, timing_only = self._servers.parts(into), self._servers.shards, self._servers.timing_only

        def start(shard: int) -> Operation[Reply]:
            destination = () if timing_only else parts[shard]
            return self._node.call(shards[shard], "fetch", into=destination, timeout=self._calls.timeout, name=name)

        await self._calls.every(start)
