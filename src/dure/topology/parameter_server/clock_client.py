"""A worker's calls to the clock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from dure.core.node import EndOfWork
from dure.errors import CallTimeout, Refused, Superseded

if TYPE_CHECKING:
    from dure.core.node import Address, Operation, Reply
    from dure.topology.parameter_server.calls import RepeatedCalls, Sender

PROGRESS_SECONDS = 1.0
"""How often a worker that pushes seldom sends a heartbeat."""


class Joined(NamedTuple):
    """The state in which a newcomer enters."""

    version: int
    clock: int
    incarnation: int


class ClockClient:
    """A worker's calls to the clock at `address`: it joins, asks to start a step, reports its updates and leaves.

    `slowest` is the slowest clock at the last admission. `stats` are those that came with the last group's updates.
    """

    def __init__(self, calls: RepeatedCalls, sender: Sender, address: Address | None) -> None:
        self.stats: list[Mapping[str, float]] = []
        self.slowest = 0
        self._calls = calls
        self._sender = sender
        self._clock = address
        self._called = -math.inf

    async def join(self) -> Joined:
        """Enter, at the slowest clock and under a new incarnation; updates are numbered from 1 again."""
        sender = self._sender
        fields = (await self._call("join", worker=sender.worker)).fields
        sender.incarnation, sender.seq = fields["incarnation"], 0
        self.stats, self._called = fields.get("notes", []), self._calls.node.now()
        return Joined(fields["version"], fields["clock"], sender.incarnation)

    async def leave(self, *, finished: bool = True) -> None:
        """Leave the clock, so that no worker waits for this one; its pushed updates count.

        `finished`: it has done its work.
        """
        if self._clock is not None:
            sender = self._sender
            await self._call("leave", worker=sender.worker, incarnation=sender.incarnation, finished=finished)

    async def ask(self) -> int:
        """Wait until the next step may start; the version that it starts on. Raises `EndOfWork` if none will."""
        return await self._until_admitted("ask")

    async def report_and_ask(self) -> int:
        """Report that the last update is staged, and `ask`, in one call."""
        return await self._until_admitted("next", group=None, seq=self._sender.seq)

    async def _until_admitted(self, method: str, **fields: Any) -> int:
        """The version of the next step. The call is made again as often as it takes."""
        address, sender, call = self._address(method), self._sender, self._calls.node.call
        while True:
            try:
                reply = await call(address, method, worker=sender.worker, incarnation=sender.incarnation, **fields)
            except CallTimeout:
                continue
            if "over" in reply.fields:
                raise EndOfWork
            return self.admitted(reply)

    def admitted(self, reply: Reply) -> int:
        """Take what the clock has answered to an admitted worker; the version of its next step."""
        fields = reply.fields
        version: int = fields["version"]
        self.slowest = fields["slowest"]
        self.stats, self._called = fields.get("notes", []), self._calls.node.now()
        return version

    async def offer(self, base: Sequence[int] | None = None) -> int:
        """Ask whether an update computed on `base` will count; its group. Raises `Superseded` if not."""
        oldest, sender = min(base) if base else 0, self._sender
        reply = await self._call("offer", worker=sender.worker, incarnation=sender.incarnation, base=oldest)
        group: int | None = reply.fields["group"]
        if group is None:
            raise Superseded(reply.fields["reason"])
        return group

    async def staged(self, group: int | None, note: Mapping[str, float] | None) -> None:
        """Report that all shards have staged the last update, which belongs to `group`."""
        noted = {} if note is None else {"note": note}
        await self._call("staged", group=group, **self._sender.last, **noted)

    async def arrive(self, note: Mapping[str, float]) -> None:
        """Report that this worker has done its part of what a group ends, without an update."""
        self._sender.seq += 1
        await self._call("staged", group=None, note=note, **self._sender.last)

    def watch(self) -> Operation[Reply]:
        """An operation that ends when the present computation is in vain; `version` says on which version."""
        sender = self._sender
        return self._calls.node.call(
            self._address("watch"), "watch", worker=sender.worker, incarnation=sender.incarnation
        )

    def heartbeat(self) -> None:
        """Report progress, at most once in `PROGRESS_SECONDS`, while nothing is pushed."""
        now = self._calls.node.now()
        if self._clock is not None and now >= self._called + PROGRESS_SECONDS:
            self._called = now
            sender = self._sender
            self._calls.node.call(self._clock, "progress", worker=sender.worker, incarnation=sender.incarnation)

    def _address(self, method: str) -> Address:
        if self._clock is None:
            raise Refused(f"{method}: these servers have no clock.")
        return self._clock

    async def _call(self, method: str, **fields: Any) -> Reply:
        calls, address = self._calls, self._address(method)
        call = partial(self._calls.node.call, address, method, timeout=calls.timeout, **fields)
        try:
            return await call()
        except CallTimeout as late:
            return await calls.again(call, late)
