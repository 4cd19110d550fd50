"""Calls of a worker to its servers, repeated until they are answered."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from dure.errors import CallTimeout, PeerLost, RemoteError

if TYPE_CHECKING:
    from dure.core.node import Node, Operation, Reply

AGAIN_SECONDS = 0.1
"""How long to wait before a server that is gone is called again."""


class Sender:
    """The numbers that an update is known by: its worker, the worker's incarnation, and its place in that (`seq`)."""

    __slots__ = ("incarnation", "seq", "worker")

    def __init__(self, worker: int, incarnation: int) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.seq = 0

    @property
    def last(self) -> dict[str, Any]:
        """Fields that name the last update."""
        return {"worker": self.worker, "incarnation": self.incarnation, "seq": self.seq}


class RepeatedCalls:
    """Calls to one server, or to each of the `shards`; a call that is not answered in `timeout` seconds is repeated.

    It is made up to `attempts` times. A server that is gone is called again for `return_seconds`.
    """

    def __init__(self, node: Node, shards: int, timeout: float | None, attempts: int) -> None:
        self.node = node
        self.shards = shards
        self.timeout = timeout
        self.attempts = attempts
        self.return_seconds = 0.0

    async def one(self, start: Callable[[], Operation[Reply]]) -> Reply:
        """The reply to a call, which `start` makes."""
        try:
            return await start()
        except (CallTimeout, PeerLost) as failed:
            return await self.again(start, failed)

    async def every(self, start: Callable[[int], Operation[Reply]]) -> list[Reply]:
        """The replies of all shards, called at once; the first error is raised when all calls have ended."""
        if self.shards == 1:
            return [await self.one(partial(start, 0))]
        operations = [start(shard) for shard in range(self.shards)]
        replies = []
        error: RemoteError | None = None
        for shard, operation in enumerate(operations):
            try:
                try:
                    reply = await operation
                except (CallTimeout, PeerLost) as failed:
                    reply = await self.again(partial(start, shard), failed)
            except RemoteError as final:
                error = error or final
            else:
                replies.append(reply)
        if error is not None:
            raise error
        return replies

    async def again(self, start: Callable[[], Operation[Reply]], failed: CallTimeout | PeerLost) -> Reply:
        """The reply to a call whose first attempt has `failed`; raises the error of the last attempt."""
        left, until = self.attempts - 1, math.inf
        while True:
            if isinstance(failed, PeerLost):
                until = min(until, self.node.now() + self.return_seconds)
                if not self.return_seconds or self.node.now() >= until:
                    raise failed
                await self.node.sleep(AGAIN_SECONDS)
            elif not left:
                raise failed
            else:
                left -= 1
            try:
                return await start()
            except (CallTimeout, PeerLost) as still:
                failed = still
