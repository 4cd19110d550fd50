"""Parameter servers in one run."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from dure.core.node import Ghost
from dure.core.vectors import size
from dure.topology.base import RunPlan, Topology, TopologyWorker
from dure.topology.parameter_server.layout import held_by
from dure.topology.parameter_server.shard import Shard
from dure.topology.parameter_server.staging import Corrections

if TYPE_CHECKING:
    from dure.core.node import Group, Node
    from dure.core.vectors import Ranges
    from dure.topology.parameter_server.choice import ParameterServer


class ServerTopology(Topology):
    """Servers hold the model in shards, and server 0 the clock."""

    clocked = True

    def __init__(self, choice: ParameterServer, plan: RunPlan) -> None:
        super().__init__(choice, plan)
        self.servers = choice.shards
        self.colocated = choice.colocated

    def check(self) -> None:
        _ = self.ranges

    @cached_property
    def ranges(self) -> list[Ranges]:
        replica = self.plan.replica
        return held_by(self.choice, replica.layers, replica.numel)

    def shard(self, node: Node, number: int, *, log: bool = False) -> Shard:
        plan, ranges, initial = self.plan, self.ranges[number], self.plan.model.params
        if isinstance(initial, Ghost):
            values: Any = Ghost(size(ranges), plan.replica.params.element_size())
        else:
            values = torch.cat([initial[start:stop] for start, stop in ranges]) if ranges else initial[:0].clone()
        more: dict[str, Any] = {
            "log": log,
            "corrections": Corrections.of(plan.method.corrections),
            "max_delay": plan.method.max_delay,
        }
        if plan.codec is not None:
            more |= {"coder": plan.codec.coder(self.layouts[number]), "vote": plan.codec.vote()}
        segments = plan.server_segments(ranges)
        return Shard(node, values, plan.server_optimizer, ranges=ranges, segments=segments, **more)

    def restarted(self, shard: Shard, incarnation: int) -> None:
        shard.start_generation(incarnation)

    def connect(self, worker: TopologyWorker, group: Group | None) -> None:
        plan = self.plan
        if plan.codec is not None and plan.codec.vote() is not None:
            held = [plan.server_segments(ranges) for ranges in self.ranges]
            worker.sessions.server.client.follow(worker.params, plan.server_optimizer, held)
