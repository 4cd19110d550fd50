"""One server of a run, on whatever node hosts it: built, restored, served and saved in the same way."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dure.core.deployment import SERVER, NodeId
from dure.core.node import Address, Service
from dure.core.node_view import NodeView
from dure.core.state import State
from dure.run.checkpoint import fitting
from dure.topology.parameter_server.clock import EVICT_SECONDS
from dure.topology.parameter_server.coordinator import Coordinator, JointAsks, Limits, Portions, ShardOrders
from dure.topology.parameter_server.shard import serve_clock

if TYPE_CHECKING:
    from dure.core.node import Node
    from dure.run.checkpoint import Parts
    from dure.run.setup import Setup
    from dure.topology.parameter_server.clock import ClockService

ORDERS = "orders"
"""The service of a server to a coordinator over all parts of the model."""


@dataclass(slots=True)
class HostedServer:
    """A server on `node`: its shard and, on server 0 of a run that has them, the clock and the coordinator.

    `number` counts the servers of the run. The clock is saved under the name `clock_part`. `others` are services under
    the node's name in the run, where the server has another among those of its part of the model.
    """

    node: Node
    shard: Any
    clock: ClockService | None = None
    coordinator: Coordinator | None = None
    number: int = -1
    clock_part: str = "clock"
    others: Mapping[str, Service] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.number < 0:
            self.number = self.node.rank

    def serve(self) -> None:
        """Register the services at the node."""
        self.node.serve("shard", self.shard)
        if self.clock is not None:
            serve_clock(self.node, self.clock, self.shard)
        if self.coordinator is not None and not self.others:
            self.node.serve("coordinator", self.coordinator)
        for name, service in self.others.items():
            assert isinstance(self.node, NodeView)
            self.node.real.serve(name, service)

    @property
    def name(self) -> str:
        """The name of the node in the run."""
        return str(NodeId(SERVER, self.number))

    def lead(self, sync: Any, seconds: float) -> None:
        """Start the coordinator's part of the method, if there is one, at `seconds` of the run."""
        if self.coordinator is not None:
            self.node.spawn(self.coordinator.lead(sync.coordinate, seconds), "the coordinator")

    def restore(self, parts: Parts) -> None:
        """Continue from the parts of a checkpoint. Raises `CheckpointError` where one does not fit."""
        name = f"shard-{self.number}"
        with fitting(name):
            self.shard.restore(parts[name])
        with fitting(self.clock_part):
            if self.clock is not None:
                self.clock.restore(parts[self.clock_part].plain)
        with fitting("coordinator"):
            if self.coordinator is not None:
                self.coordinator.restore(parts["coordinator"].plain)

    def parts(self) -> dict[str, State]:
        """The parts of a checkpoint that hold this server's state, by name."""
        found = {f"shard-{self.number}": self.shard.state()}
        if self.clock is not None:
            found[self.clock_part] = State({}, self.clock.state())
        if self.coordinator is not None:
            found["coordinator"] = State({}, self.coordinator.state())
        return found

    async def settled(self) -> None:
        """Wait until the clock and the coordinator have no update or work under way."""
        if self.clock is not None:
            await self.clock.settled()
        if self.coordinator is not None:
            await self.coordinator.settled()


def build_server(
    run: Setup,
    node: Node,
    *,
    absent: Collection[int] | None = None,
    evict_seconds: float = EVICT_SECONDS,
    log: bool = False,
) -> HostedServer:
    """Build the server of `node`'s rank. `absent` replaces the ranks that the set-up expects to join later.

    A worker without progress for `evict_seconds` is evicted. `log` keeps what the shard has applied.

    In a pipeline it is one of the servers of a stage. A pipeline cannot go on without a worker, so none is evicted.
    """
    number, setup, clock_part = node.rank, run.of_server(node.rank), "clock"
    if run.stages is not None:
        place = run.place_of_server(number)
        node, clock_part, evict_seconds = run.stages.view(node, place), f"clock-{place}", math.inf
    shard = setup.topology.shard(node, node.rank, log=log)
    server = HostedServer(node, shard, number=number, clock_part=clock_part)
    if node.rank == 0 and setup.topology.clocked:
        later = setup.absent if absent is None else absent
        present = [rank for rank in range(setup.workers) if rank not in later]
        server.clock = setup.server_side.clock(node, present=present, evict_seconds=evict_seconds)
        if setup.coordinated and number == 0:
            server.coordinator = _coordinator(run, server.clock, evict_seconds)
    if setup.coordinated and isinstance(node, NodeView):
        server.others = _joint_services(run, server, node.real)
    return server


def _coordinator(run: Setup, clock: ClockService, evict_seconds: float) -> Coordinator:
    setup, node, shards = run.of_server(0), None, None
    if isinstance(clock.node, NodeView):
        node, shards = clock.node.real, [Address(name, ORDERS) for name in run.deployment.names(SERVER)]
    portions = Portions(setup.workers, setup.sync.push_every)
    limits = Limits(setup.steps * setup.workers, setup.config.seconds or math.inf, evict_seconds)
    timing_only = setup.config.timing_only
    return Coordinator(clock, setup.batches, portions, limits=limits, timing_only=timing_only, node=node, shards=shards)


def _joint_services(run: Setup, server: HostedServer, node: Node) -> dict[str, Service]:
    """The services of a server to a coordinator over all parts of the model, and of that coordinator."""
    found: dict[str, Service] = {ORDERS: ShardOrders(server.shard)}
    if server.coordinator is not None:
        found["coordinator"] = JointAsks(server.coordinator, node, run.parts)
    return found
