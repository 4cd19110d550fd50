"""The server side of a method: the optimizer, the clock and the clients of its servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dure.core.deployment import SERVER, NodeId
from dure.core.node import Address
from dure.sync.base import server_rule_of, servers_have_own_rule
from dure.sync.corrected import compares, corrections, server_optimizer
from dure.topology.parameter_server.clock import EVICT_SECONDS, ClockService
from dure.topology.parameter_server.shard import clocked_at
from dure.topology.parameter_server.topology import ServerLayout

if TYPE_CHECKING:
    from dure.core.node import Node
    from dure.core.vectors import Ranges
    from dure.job.optimizer import OptimizerSpec
    from dure.topology.correction import Correction
    from dure.topology.parameter_server.admission import Policy

CLOCK = Address(str(NodeId(SERVER, 0)), "clock")
"""The clock of all servers."""


def shard_at(number: int) -> Address:
    """The address of the shard that a server holds."""
    return Address(str(NodeId(SERVER, number)), "shard")


@dataclass(frozen=True)
class ServerSide:
    """The part of the method `sync` that `count` servers carry out for `workers`, in runs and in loops of the user."""

    sync: Any
    workers: int
    count: int

    @cached_property
    def shards(self) -> tuple[Address, ...]:
        """The address of each shard."""
        return tuple(map(shard_at, range(self.count)))

    @property
    def policy(self) -> Policy | None:
        """A new admission policy of the method; None where servers apply updates on arrival, without a clock."""
        return server_rule_of(self.sync).policy

    @property
    def ordered(self) -> bool:
        """Whether the clock decides the order of updates."""
        policy = self.policy
        return policy is not None and policy.ordered

    @property
    def group(self) -> int:
        """The updates of a group."""
        return server_rule_of(self.sync).averaged(self.workers)

    @cached_property
    def own_rule(self) -> bool:
        """Whether servers step by no rate of the job, as those of BMUF and EASGD."""
        return servers_have_own_rule(self.sync)

    @property
    def corrections(self) -> Sequence[Correction]:
        """The corrections of stale gradients at the shards."""
        return corrections(self.sync)

    @property
    def max_delay(self) -> int | None:
        """The largest staleness of an update that the shards apply on arrival; None: any."""
        return server_rule_of(self.sync).max_delay

    def optimizer(self, optimizer: OptimizerSpec) -> OptimizerSpec:
        """The optimizer of the shards, given the job's. Raises `StrategyError` where a remedy does not suit it."""
        return server_optimizer(self.sync, optimizer, self.workers)

    def clock(self, node: Node, *, present: Sequence[int], evict_seconds: float = EVICT_SECONDS) -> ClockService:
        """The clock on `node`; `present` workers take part from the start. Without a policy it only tracks workers."""
        rule = server_rule_of(self.sync)
        return ClockService(
            node, rule.policy, self.shards, workers=present, reduce=rule.reduce, evict_seconds=evict_seconds
        )

    def as_reached(self, ranges: Sequence[Ranges], *, clocked: bool = True, **encoding: Any) -> ServerLayout:
        """The servers as all their clients know them. With `clocked`, shard and clock may be asked in one call.

        `encoding` are the fields of `ServerLayout` that say in what form tensors travel.
        """
        policy = self.policy
        return ServerLayout(
            self.shards,
            ranges,
            clock=CLOCK,
            ordered=policy is not None and policy.ordered,
            may_refuse=policy is not None and policy.may_refuse,
            look_back=compares(self.sync),
            clocked=clocked_at(self.shards, policy) if clocked else None,
            **encoding,
        )
