"""The ranks of a collective as one of them sees them: their places, messages between them, and the loss of a rank.

A message leaves once its receiver has asked for it, and the question takes as long as a header: a rank asks ahead for
messages that it expects. The first rank that notices a loss reports it to the others, and every wait at every rank ends
with the same error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dure.core.deployment import rank_of_worker
from dure.core.node import Address, Apply, Call, Operation, Reply, nothing
from dure.core.protocol import COUNT, WORKERS, RemoteService, remote
from dure.errors import PeerLost, Refused, RemoteError

if TYPE_CHECKING:
    import torch

    from dure.core.node import Node

SERVICE = "collective"
"""Name of the service `GroupFailure` of a node."""


class GroupFailure(RemoteService):
    """The loss of one of `ranks`, which each of them reports to the others."""

    def __init__(self, node: Node, ranks: Sequence[int]) -> None:
        self.noticed: Operation[None] = node.promise("a rank of the group to be lost")
        self._node = node
        self._ranks = tuple(ranks)
        self._reason = ""

    def of(self, rank: int, why: str = "") -> None:
        """Take `rank` for lost: end every wait, here and at the others."""
        if self.noticed.done:
            return
        self._reason = f"worker {rank} is gone{f' ({why})' if why else ''}, and a collective needs every rank"
        self.noticed.resolve()
        for other in self._ranks:
            if other not in (rank, self._node.rank):
                # Not awaited: a rank that this call does not reach is lost as well.
                self._node.call(Address(f"worker {other}", SERVICE), "gone", rank=rank)

    def check(self) -> None:
        """Raise `PeerLost` if a rank is lost."""
        if self.noticed.done:
            raise PeerLost(
                f"{self._reason}. Use a method over a parameter server (ps), or resume from the last checkpoint."
            )

    # ---- the service

    @remote(WORKERS, rank=COUNT)
    def _gone(self, call: Call) -> Reply:
        """End every wait: a rank of the group is gone."""
        if call.fields["rank"] not in self._ranks:
            raise Refused(self.unknown(call))
        self.of(call.fields["rank"])
        return Reply()

    def unknown(self, call: Call) -> str:
        return f"{call.caller} may only tell which of {self._ranks} is gone."

    def lost(self, node: str) -> None:
        """Fail the group if `node`, which is lost, is one of its workers'."""
        rank = rank_of_worker(node)
        if rank in self._ranks:
            self.of(rank)


@dataclass(frozen=True)
class Ranks:
    """A line of `ranks`, seen from the rank on `node`: each is known by its place, and `here` is the own place."""

    node: Node
    ranks: tuple[int, ...]
    loss: GroupFailure

    @cached_property
    def here(self) -> int:
        return self.ranks.index(self.node.rank)

    def __len__(self) -> int:
        return len(self.ranks)

    def among(self, places: Sequence[int]) -> Ranks:
        """The line of the ranks at `places`, of which this rank is one."""
        return Ranks(self.node, tuple(self.ranks[place] for place in places), self.loss)

    def send(self, place: int, part: torch.Tensor) -> Operation[None]:
        """Start to send `part`, which must not change until this has ended."""
        return self.node.send(f"worker {self.ranks[place]}", part)

    def recv(self, place: int, into: torch.Tensor) -> Operation[torch.Tensor]:
        """Ask for the next message from `place` that has not been asked for."""
        asked = self.node.recv(f"worker {self.ranks[place]}", into)
        asked.when_done(nothing)  # a loss may fail it before it is awaited
        return asked

    async def end(self, operation: Operation[Any], place: int) -> None:
        """Wait for a message to or from `place`. Raises `PeerLost` if any rank of the group is lost."""
        # The rank at `place` may itself wait for a lost one: then this message never comes, though both ends run.
        if not operation.done:
            await self.node.first(operation, self.loss.noticed)
        self.loss.check()
        try:
            operation.result()
        except RemoteError as error:
            self.loss.of(self.ranks[place], str(error).rstrip("."))
            self.loss.check()

    async def add(self, total: torch.Tensor, part: torch.Tensor) -> None:
        """Add `part` to `total`, in place."""
        await self.node.compute(Apply(lambda: total.add_(part), total.nbytes))
