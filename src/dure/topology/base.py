"""A topology in a run: its nodes, the parts of the model that servers hold, and the sessions of a worker."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from dure.codec.coder import SliceLayout
from dure.core.deployment import SERVER, WORKER, Deployment, NodeId, NodeSpec, WhenLost
from dure.core.spec_text import nearest
from dure.core.state import State
from dure.core.vectors import pieces, size
from dure.errors import StrategyError, UsageError
from dure.job.optimizer import restrict
from dure.job.overlap import cut
from dure.topology.offers import OFFERS

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import networkx as nx

    from dure.codec.base import Codec
    from dure.core.meter import Meter
    from dure.core.node import Group, Node, Service
    from dure.core.vectors import Range, Ranges
    from dure.job.gradient_engine import GradientEngine
    from dure.job.initial_model import InitialModel
    from dure.job.job import Job
    from dure.job.optimizer import GroupRange, OptimizerSpec
    from dure.job.replica import Replica
    from dure.topology.correction import Correction


class SystemMemory(Protocol):
    """Memory that processes of one machine share."""

    @property
    def bytes(self) -> torch.Tensor: ...

    @property
    def path(self) -> str: ...

    def hold(self, first: int, count: int = 1) -> AbstractContextManager[None]:
        """Hold locks of this memory, by number."""
        ...


@dataclass(frozen=True, slots=True)
class MethodNeeds:
    """The properties of a method that its topology uses.

    `ordered`: the servers' clock decides the order of updates; `group` of them make a version, and `stale` ones are
    gradients of older versions. `coordinated`: a coordinator at server 0 leads the method. `delivers`: the name of the
    model that workers deliver ("mean": the mean of all workers' models). `vectors`: what the method keeps beside the
    model in shared memory, or at servers. `corrections` of stale gradients at servers, which refuse those of a
    staleness above `max_delay`. The servers' optimizer is `server_optimizer` of the job's; it may raise
    `StrategyError`. With `own_server_rule` it does not depend on the job's.
    """

    ordered: bool
    group: int
    stale: bool
    coordinated: bool
    delivers: str
    vectors: Sequence[str]
    corrections: Sequence[Correction]
    max_delay: int | None
    server_optimizer: Callable[[OptimizerSpec], OptimizerSpec]
    own_server_rule: bool


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The properties of a run that its topology uses.

    `absent` ranks join later. `machines` has the machine of each worker. A `timing_only` run moves sizes without
    values. In a `virtual` run all nodes live in this process. `reduced_by_engine` has the algorithms of collectives
    that are the engine's. Without a `codec` updates travel as they are. `memory` is shared with other processes of this
    machine, `mapped_memory` is owned by another process.
    """

    job: Job
    model: InitialModel
    workers: int
    machines: Sequence[int]
    absent: frozenset[int]
    seed: int
    timing_only: bool
    virtual: bool
    reduced_by_engine: Collection[str]
    codec: Codec | None
    method: MethodNeeds
    draw_samplers: Callable[[], list[Any]]
    memory: Callable[[int], SystemMemory]
    mapped_memory: Callable[[str], SystemMemory]

    @property
    def replica(self) -> Replica:
        """A replica with the run's initial values."""
        return self.model.replica

    @property
    def server_optimizer(self) -> OptimizerSpec:
        """The optimizer of the servers. Raises `StrategyError` where a remedy does not suit the job's optimizer."""
        return self.method.server_optimizer(self.job.optimizer)

    def server_segments(self, ranges: Ranges) -> list[GroupRange]:
        """The parameter groups of a shard that holds `ranges`."""
        if self.method.own_server_rule:
            return []
        return restrict(self.model.rates.seen_by(self.method.server_optimizer), ranges)


class TopologyWorker(Protocol):
    """The attributes of a worker that a topology reads or sets up."""

    node: Node
    rank: int
    clock: int
    joined_at: int
    sessions: Any
    optimizer: Any
    params: torch.Tensor


class Choice(Protocol):
    """A topology as a value of a strategy: a frozen dataclass of its parameters.

    Both are class variables.
    """

    @property
    def offers(self) -> Collection[str]:
        """Names of what methods may need (`topology.offers`)."""
        ...

    @property
    def deployed_as(self) -> str | type[Topology]:
        """Its class in a run, or "module:class", which is imported when a run needs it."""
        ...


def topology_of(choice: Choice) -> type[Topology]:
    """The class of the topology that a strategy names."""
    if isinstance(choice.deployed_as, type):
        return choice.deployed_as
    module, _, name = choice.deployed_as.partition(":")
    found: type[Topology] = getattr(import_module(module), name)
    return found


def deployed(choice: Choice, plan: RunPlan) -> Topology:
    """The topology that a strategy names, in one run. Raises `StrategyError` if it is clocked and has no server."""
    topology = topology_of(choice)(choice, plan)
    if topology.clocked and topology.servers < 1:
        raise StrategyError(
            f"{type(topology).__name__} is `clocked`, and server 0 hosts the clock: `servers` must be at least 1, got "
            f"{topology.servers}."
        )
    return topology


class Session:
    """A worker's part of a topology of a user's own, for methods: `worker.session(offer)`.

    The topology puts it into `worker.sessions.own` under the word that it offers, when it connects the worker.
    """

    async def settled(self) -> None:
        """Wait until no operation of this session is under way: a checkpoint or the end is next."""

    def state(self) -> State:
        """The state that a checkpoint keeps."""
        return State()

    def restore(self, state: State) -> None:
        """Set the session to the state of a checkpoint."""


class Topology:
    """A topology in one run; the base has no servers, and its workers are not connected.

    `needs_everybody`: every operation needs every worker, as collectives do. `uses_engine`: collectives are those of
    `torch.distributed`. `clocked`: server 0 hosts a clock, and each worker has a `ServerSession`. `one_machine`: all
    nodes share a machine's memory. `in_place`: workers write to memory that others read, so that a worker which hangs
    cannot be left behind. `colocated`: servers run on the workers' machines. `graph` has the neighbors of each worker,
    where only neighbors meet. `no_loop` is the reason why a loop of the user's cannot run over the topology.
    """

    needs_everybody = False
    uses_engine = False
    clocked = False
    one_machine = False
    in_place = False
    colocated = False
    servers = 0
    graph: nx.Graph | None = None
    no_loop: ClassVar[str] = ""

    def __init__(self, choice: Any, plan: RunPlan) -> None:
        self.choice = choice
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
        """The consequence of the loss of a server, where there are checkpoints."""
        method = self.plan.method
        alone = self.clocked and not (method.ordered or method.coordinated or self.one_machine)
        return WhenLost.RESTART_ALONE if alone else WhenLost.ROLL_BACK

    @property
    def ranges(self) -> list[Ranges]:
        """The flat ranges that each server holds."""
        return []

    @cached_property
    def layouts(self) -> list[SliceLayout]:
        """The layout of each shard's slice, where updates are encoded."""
        if self.plan.codec is None:
            return []
        return [SliceLayout.of(self.plan.replica.layers, ranges) for ranges in self.ranges]

    def variables(self, number: int) -> list[int]:
        """The elements of each variable that server `number` holds: a parameter, or a part of one."""
        layers, ranges = self.plan.replica.layers, self.ranges[number] if self.ranges else []
        found = (min(stop, each.stop) - max(start, each.start) for start, stop in ranges for each in layers)
        return [elements for elements in found if elements > 0]

    # ---- memory; a topology of a user's own that declares none counts as here

    @property
    def worker_vectors(self) -> float:
        """The vectors of the model's length that a worker keeps for this topology beside its own parameters."""
        return 1.0

    @property
    def server_vectors(self) -> float:
        """The vectors of the length of its slice that a server keeps, its values among them."""
        return 2.0

    def held(self, number: int) -> int:
        """The parameters that server `number` holds."""
        return size(self.ranges[number]) if self.ranges else self.plan.replica.numel

    @property
    def slice_ranges(self) -> list[Range]:
        """The slices of a gradient that are summed while the rest is computed, in the order of backward."""
        return cut(self.plan.replica, without=self.apart) if self.uses_engine else []

    @property
    def slices(self) -> list[tuple[int, float]]:
        """The elements of each slice, and the share of the gradient that is missing when the slice is complete."""
        return [(stop - start, start / self.plan.replica.numel) for start, stop in self.slice_ranges]

    @property
    def apart(self) -> Sequence[int]:
        """The parameters, by number, whose gradients servers get."""
        return ()

    def group(self, node: Node, meter: Meter) -> Group | None:
        """The group of all workers; None in a topology without one."""
        return None

    def shard(self, node: Node, number: int, *, log: bool = False) -> Any:
        """The service of server `number`, which holds its part of the model. `log` keeps what it has applied."""
        raise NotImplementedError(f"{type(self).__name__} has no servers")

    def connect(self, worker: TopologyWorker, group: Group | None) -> None:
        """Set up the sessions of a worker that this topology adds to those with servers and group."""

    def attach(self, worker: TopologyWorker, shards: Sequence[Service]) -> None:
        """Connect a worker to the servers' `shards`, where they are in its own process."""

    async def map(self, worker: TopologyWorker) -> Sequence[torch.Tensor]:
        """Map memory of another process of this machine; returns the tensors that gradients read in place."""
        return ()

    def restarted(self, shard: Any, incarnation: int) -> None:
        """Prepare a restored shard of a server that runs for the second time or later."""

    def counted(self, shard: Any) -> dict[str, int]:
        """The updates that a shard in this process has applied and refused."""
        return {"applied": shard.applied, "refused": shard.refused}

    def result(self, shards: Sequence[Any], models: Sequence[torch.Tensor]) -> torch.Tensor:
        """The parameters that the method delivers, where all nodes are in this process.

        `shards` of all servers hold them, or the `models` that workers deliver, in rank order.
        """
        if not self.clocked:
            return torch.stack(list(models)).mean(dim=0) if self.plan.method.delivers == "mean" else models[0]
        values = self.plan.replica.params.detach().clone()
        for shard, ranges in zip(shards, self.ranges, strict=True):
            parts = pieces(values, ranges)
            for part, held in zip(parts, shard.values.split([len(part) for part in parts]), strict=True):
                part.copy_(held)
        return values

    def configure(self, engine: GradientEngine) -> None:
        """Set up `engine` to hand over gradients in the parts that this topology needs."""

    def notes(self) -> Mapping[str, Any]:
        """The entries of this topology in the summary of a run."""
        return {}


# ---- a topology of a user's own

DEFINES: Mapping[str, tuple[str, ...]] = {
    "group": ("group",),
    "servers": ("shard",),
    "coordinator": ("shard",),
    "memory": ("shard", "attach", "map"),
    "codec": (),
    "stages": (),
}
"""The functions of `Topology` that an offer needs. Every other offer needs `connect`, which gives it to a worker."""

FLAGS: Mapping[str, str] = {"group": "needs_everybody", "servers": "clocked", "memory": "clocked"}
"""The attribute of `Topology` that is true where something is offered."""


def check_own(choice: Choice, name: str) -> None:
    """Raise `StrategyError` for a topology of a user's own whose class in a run does not define what it offers."""
    if isinstance(choice.offers, str) or not all(isinstance(offer, str) for offer in choice.offers):
        raise StrategyError(f'{name}: offers must be a tuple of names, got {choice.offers!r}. Write ("group",).')
    kind = _own_class(choice, name)
    implied = {"mean gradient"} if "group" in choice.offers else set()
    for offer in sorted(set(choice.offers) - implied):
        for function in DEFINES.get(offer, ("connect",)):
            if getattr(kind, function) is getattr(Topology, function):
                near = "" if offer in OFFERS else nearest(offer, OFFERS)
                raise StrategyError(
                    f"{name} offers {offer}, and {kind.__name__} has no `{function}` of its own. Define it, or leave "
                    f"{offer} out of `offers`.{near}"
                )
        flag = FLAGS.get(offer)
        if flag is not None and not getattr(kind, flag):
            raise StrategyError(f"{name} offers {offer}, so {kind.__name__} must have `{flag} = True`.")


def _own_class(choice: Choice, name: str) -> type[Topology]:
    try:
        kind = topology_of(choice)
    except (ImportError, AttributeError, ValueError) as error:
        raise StrategyError(
            f"{name}: deployed_as={choice.deployed_as!r} cannot be imported ({error}). Give the class itself, a "
            "subclass of dure.Topology."
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Topology)):
        raise StrategyError(f"{name}: deployed_as must be a subclass of dure.Topology, got {kind!r}.")
    return kind


SLOTS: Mapping[str, str] = {"group": "group", "servers": "server", "peers": "peer"}
"""The session of a worker for each offer; memory is mapped later."""


def check_sessions(choice: Choice, sessions: Any) -> None:
    """Raise `UsageError` if a worker, once connected, has no session for something that its topology offers."""
    for offer in choice.offers:
        given = sessions.own.get(offer) if offer not in OFFERS else getattr(sessions, SLOTS.get(offer, "own"))
        if given is None:
            where = f"worker.sessions.{SLOTS[offer]}" if offer in SLOTS else f'worker.sessions.own["{offer}"]'
            way = "return one from `group`" if offer == "group" else f"set {where} in `connect`"
            raise UsageError(
                f"{type(choice).__name__} offers {offer}, and a worker that it has connected has none. Its class in a "
                f"run must {way}."
            )
