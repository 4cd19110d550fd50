"""Calls of the clock to its shards, whose answers it checks later."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from dure.core.node import Address, Node, Operation, Reply
from dure.errors import PeerLost


class ShardCalls:
    """Sends each call to all `shards` in order, without waiting for the answers.

    Where `shards_return`, a lost shard is no error: it is started again from a snapshot and receives its calls again.
    """

    def __init__(self, node: Node, shards: Sequence[Address]) -> None:
        self.shards_return = False
        self._node = node
        self._shards = shards
        self._outstanding: deque[Operation[Reply]] = deque()

    def send(self, method: str, **fields: Any) -> None:
        """Call `method` of every shard."""
        for shard in self._shards:
            self._outstanding.append(self._node.call(shard, method, **fields))

    def check_answered(self) -> None:
        """Raise the error of a call that has failed, among those answered in order."""
        while self._outstanding and self._outstanding[0].done:
            self._check(self._outstanding.popleft())

    async def settled(self) -> None:
        """Wait until the shards have carried out all calls."""
        while self._outstanding:
            call = self._outstanding.popleft()
            with suppress(PeerLost):
                await call
            self._check(call)

    def _check(self, call: Operation[Reply]) -> None:
        try:
            call.result()
        except PeerLost:
            if not self.shards_return:
                raise
