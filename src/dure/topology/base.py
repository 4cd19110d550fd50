"""What a topology is in a run: which nodes there are, what servers hold, and what a worker has of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from dure.core.deployment import SERVER, WORKER, Deployment, NodeId, NodeSpec, WhenLost
from dure.job.overlap import cut

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import networkx as nx
    import torch

    from dure.codec.base import Codec
    from dure.codec.coder import SliceLayout
    from dure.core.meter import Meter
    from dure.core.node import Group, Node, Service
    from dure.core.ranges import Ranges
    from dure.job.gradients import GradientEngine
    from dure.job.groups import Rates
    from dure.job.job import Job
    from dure.job.optimizer import GroupRange, OptimizerSpec
    from dure.job.replica import Replica
    from dure.topology.correction import Correction


class RunPlan(Protocol):
    """What a topology uses of the run that it is deployed in."""

    @property
    def job(self) -> Job: ...

    @property
    def workers(self) -> int: ...

    @property
    def absent(self) -> frozenset[int]:
        """The ranks that join later."""
        ...

    @property
    def seed(self) -> int: ...

    @property
    def timing_only(self) -> bool:
        """Whether sizes are moved without values."""
        ...

    @property
    def virtual(self) -> bool:
        """Whether all nodes live in this process."""
        ...

    @property
    def replica(self) -> Replica: ...

    @property
    def initial(self) -> Any:
        """Initial parameters, flat; a `Ghost` in a timing-only run."""
        ...

    @property
    def rates(self) -> Rates: ...

    @property
    def codec(self) -> Codec | None:
        """The codec of updates; None where they travel as they are."""
        ...

    @property
    def layouts(self) -> Sequence[SliceLayout]:
        """The layout of each shard's slice, where updates are encoded."""
        ...

    @property
    def server_optimizer(self) -> OptimizerSpec:
        """The optimizer of the servers."""
        ...

    @property
    def corrections(self) -> Sequence[Correction]:
        """What servers do to stale gradients."""
        ...

    @property
    def ordered(self) -> bool:
        """Whether the method asks its servers for an order of updates."""
        ...

    @property
    def coordinated(self) -> bool:
        """Whether a coordinator at server 0 leads the method."""
        ...

    @property
    def vectors(self) -> Sequence[str]:
        """What the method keeps beside the model in shared memory."""
        ...

    def server_segments(self, ranges: Ranges) -> list[GroupRange]:
        """The parameter groups of a shard that holds `ranges`."""
        ...

    def draw_samplers(self) -> list[Any]:
        """The sampler of each worker, at its first batch."""
        ...

    def shared_memory(self, nbytes: int) -> SystemMemory:
        """Memory that other processes of this machine can map."""
        ...

    def mapped_memory(self, path: str) -> SystemMemory:
        """Memory that another process of this machine owns."""
        ...


class SystemMemory(Protocol):
    """Memory that processes of one machine share."""

    @property
    def bytes(self) -> torch.Tensor: ...

    @property
    def path(self) -> str: ...

    def hold(self, first: int, count: int = 1) -> AbstractContextManager[None]:
        """Hold locks of this memory, by number."""
        ...


class TopologyWorker(Protocol):
    """What a topology sets up at a worker."""

    node: Node
    rank: int
    clock: int
    joined_at: int
    sessions: Any
    optimizer: Any
    params: torch.Tensor


class Choice(Protocol):
    """A topology as a value of a strategy; `deployed_as` names its class in a run, "module:class"."""

    deployed_as: ClassVar[str]


def deployed(choice: Choice, plan: RunPlan) -> Topology:
    """The topology that a strategy names, in one run."""
    module, _, name = choice.deployed_as.partition(":")
    found: Topology = getattr(import_module(module), name)(choice, plan)
    return found


class Topology:
    """A topology in one run; the base has no servers, and workers that know nothing of each other.

    `needs_everybody`: every operation needs every worker, as collectives do. `uses_engine`: collectives are those of
    `torch.distributed`. `clocked`: server 0 hosts a clock, and each worker has a `ServerSession`. `one_machine`: all
    nodes share a machine's memory. `in_place`: workers write to memory that others read, so that a worker which hangs
    cannot be left behind. `graph` has the neighbors of each worker, where only neighbors meet.
    """

    needs_everybody = False
    uses_engine = False
    clocked = False
    one_machine = False
    in_place = False
    colocated = False
    servers = 0
    graph: nx.Graph | None = None

    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan

    def check(self) -> None:
        """Raise `UsageError` or `StrategyError` for what cannot be deployed, before anything starts."""

    def deploy(self) -> Deployment:
        """The nodes of the run: servers first, as workers call them."""
        worker_lost = WhenLost.END if self.needs_everybody else WhenLost.GO_ON
        workers = [NodeId(WORKER, rank) for rank in range(self.plan.workers)]
        servers = [NodeId(SERVER, number) for number in range(self.servers)]
        first = workers[0] if self.one_machine else None
        beside = {
            server: first or (workers[server.rank % len(workers)] if self.colocated else None) for server in servers
        }
        return Deployment(
            (
                *(NodeSpec(each, first, worker_lost) for each in workers),
                *(NodeSpec(each, beside[each], self.server_lost) for each in servers),
            )
        )

    @property
    def server_lost(self) -> WhenLost:
        """What the loss of a server means, where there are checkpoints."""
        alone = self.clocked and not (self.plan.ordered or self.plan.coordinated or self.one_machine)
        return WhenLost.RESTART_ALONE if alone else WhenLost.ROLL_BACK

    @property
    def ranges(self) -> list[Ranges]:
        """The flat ranges that each server holds."""
        return []

    @property
    def slices(self) -> list[tuple[int, float]]:
        """What of a gradient is summed together while the rest is computed (`VirtualRuntime.slices`)."""
        if not self.uses_engine:
            return []
        replica = self.plan.replica
        return [(stop - start, start / replica.numel) for start, stop in cut(replica, without=self.apart)]

    @property
    def apart(self) -> Sequence[int]:
        """The parameters, by number, whose gradients servers get."""
        return ()

    def group(self, node: Node, meter: Meter) -> Group | None:
        """The group of all workers; None where they are no group."""
        return None

    def shard(self, node: Node, number: int, *, log: bool = False) -> Any:
        """What server `number` holds, as a service. `log` keeps what it has applied."""
        raise NotImplementedError

    def connect(self, worker: TopologyWorker, group: Group | None) -> None:
        """Give a worker what it has of this topology, beside its sessions with servers and group."""

    def attach(self, worker: TopologyWorker, shards: Sequence[Service]) -> None:
        """Connect a worker to what lies in this process: `shards` of the servers."""

    async def map(self, worker: TopologyWorker) -> Sequence[torch.Tensor]:
        """Map what another process of this machine owns for the worker; the tensors that gradients read in place."""
        return ()

    def configure(self, engine: GradientEngine) -> None:
        """Have gradients handed over as this topology needs them."""

    def notes(self) -> Mapping[str, Any]:
        """What the summary of a run tells of this topology."""
        return {}
