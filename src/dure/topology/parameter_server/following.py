"""A worker's pulls where shards answer with verdicts (`verdicts`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dure.core.ranges import pieces
from dure.topology.parameter_server.verdicts import Follower, apply_verdicts
from dure.topology.replica import Pulled

if TYPE_CHECKING:
    import torch

    from dure.core.node import Operation, Reply
    from dure.topology.parameter_server.calls import RepeatedCalls
    from dure.topology.parameter_server.layout import ServerLayout


class Following:
    """The copies of all shards' slices at a worker, which each step brings to the servers' version by verdicts."""

    def __init__(self, followers: Sequence[Follower], calls: RepeatedCalls, servers: ServerLayout) -> None:
        self.followers = followers
        self._calls = calls
        self._servers = servers

    def has(self, shard: int) -> dict[str, Any]:
        """Fields by which a shard answers with a verdict."""
        return {"has": self.followers[shard].version, "at_most": True}

    def message(self, shard: int) -> tuple[torch.Tensor]:
        """Memory that a shard's verdict is received into."""
        return (self.followers[shard].message,)

    async def pull(self, into: torch.Tensor, version: int | None) -> Pulled:
        """As `ServerClient.pull`, by the verdicts that lead to `version`."""
        call, shards, timeout = self._calls.node.call, self._servers.shards, self._calls.timeout

        def start(shard: int) -> Operation[Reply]:
            place = self.message(shard)
            return call(shards[shard], "follow", into=place, timeout=timeout, version=version, **self.has(shard))

        return await self.apply(await self._calls.every(start), into, version)

    async def apply(self, replies: Sequence[Reply], into: torch.Tensor, version: int | None) -> Pulled:
        """Apply the verdicts of all shards, pull slices that no verdict leads to, and write the model to `into`."""
        answers = [(follower, reply.fields) for follower, reply in zip(self.followers, replies, strict=True)]
        await apply_verdicts(self._calls.node, [(follower, fields) for follower, fields in answers if fields["nbytes"]])
        versions = [fields["version"] for _, fields in answers]
        for shard, (follower, fields) in enumerate(answers):
            if fields["nbytes"] is None:
                versions[shard] = await self._catch_up(shard, into, version)
            else:
                follower.write(into)
        return Pulled(into, versions)

    async def _catch_up(self, shard: int, into: torch.Tensor, version: int | None) -> int:
        """Pull a shard's values and, while they are its newest, the state of its optimizer; their version."""
        follower, address = self.followers[shard], self._servers.shards[shard]
        calls, call, timeout = self._calls, self._calls.node.call, self._calls.timeout
        follower.version = None
        place, vectors = pieces(into, self._servers.ranges[shard]), list(follower.rule.vectors.values())
        reply = await calls.one(lambda: call(address, "pull", into=place, timeout=timeout, version=version))
        found: int = reply.fields["version"]
        state = await calls.one(
            lambda: call(address, "optimizer", into=vectors, at_most=True, timeout=timeout, version=found)
        )
        if state.fields["steps"] is not None:
            follower.start_at(found, into, state.fields["steps"])
        return found

    def restart(self) -> None:
        """Forget all versions: the next pulls bring values and optimizer state."""
        for follower in self.followers:
            follower.version = None
