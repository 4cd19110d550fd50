"""What a method of synchronisation is, and what it sees of the world.

A `Sync` is a frozen dataclass: its fields are the method's parameters, its `work` is the paper's loop at
one worker. It sees one thing, its `Worker`, and knows neither sockets nor clocks nor devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from dure.errors import StrategyError

if TYPE_CHECKING:
    from dure.job.optimizer import OptimizerSpec
    from dure.sync.worker import Worker
    from dure.topology.parameter_server.policies import Policy


@dataclass(frozen=True, slots=True)
class Traits:
    """What is true of a method, whatever it runs on.

    `topologies` are those that it runs over, its default first; `topology_reason` completes "X does not run over Y: ",
    and `collective_reason` is a second reason where Y is a collective. A `lockstep` method keeps all workers at the
    same clock, so a checkpoint is taken when each reaches the scheduled clock; for the others it is taken when the
    first does; over collectives all are in lockstep. `delivers` is the method's result: the `"server"`'s parameters,
    one `"replica"`'s (all are equal), the `"mean"` of the replicas', or what every worker keeps under that name
    (`Worker.keep`; all are equal). Over servers it is always the server's.

    `agreed` is the name under which a worker keeps the common model, if it goes on from another. `streams`: parts of
    the model travel at different times, so there is no common one. `alone`: over collectives too, each worker ends in
    its own time. `sparse`: sparse gradients are taken as they are, flat and coalesced. `stale_gradients`: the servers
    apply gradients of older versions, so corrections may join. `encodes` are the topologies over which a codec may
    encode what is sent, `uncoded` the reason why over the others none may; `changes`: what is encoded is a change of
    the model, and no gradient; `tallies`: it may be signs that are voted on, all of a step together. `fewest` counts
    the workers that it needs. `vectors` lie beside the model in shared memory. `sampling` replaces the job's split.
    `no_loop` is the reason why `dure.attach` cannot run it.
    """

    topologies: tuple[str, ...]
    lockstep: bool = False
    delivers: str = "server"
    topology_reason: str = ""
    collective_reason: str = ""
    agreed: str = ""
    streams: bool = False
    alone: bool = False
    sparse: bool = False
    stale_gradients: bool = False
    encodes: tuple[str, ...] = ()
    uncoded: str = ""
    changes: bool = False
    tallies: bool = False
    fewest: int = 1
    vectors: tuple[str, ...] = ()
    sampling: Any = None
    no_loop: str = ""


@runtime_checkable
class Adapted(Protocol):
    """A method whose traits depend on its parameters."""

    def adapted(self) -> Traits:
        """The traits under these parameters."""
        ...


def traits_of(method: Any) -> Traits:
    """The traits of a method under its parameters. Raises `StrategyError` for a class without traits."""
    found = method.adapted() if isinstance(method, Adapted) else getattr(method, "traits", None)
    if not isinstance(found, Traits):
        raise StrategyError(
            f"{type(method).__name__} says nothing of itself: give its class traits = dure.Traits(topologies=(...)), "
            "with what it runs over."
        )
    return found


class Sync(Protocol):
    """When replicas agree."""

    traits: ClassVar[Traits]

    async def work(self, worker: Worker) -> None:
        """The method at one worker; ends when `EndOfWork` is thrown into a pending gradient."""
        ...

    # ---- over parameter servers

    def policy(self) -> Policy | None:
        """Who may go on and what counts; None when the method asks for no order (applied on arrival)."""
        ...

    def server_optimizer(self, optimizer: OptimizerSpec) -> OptimizerSpec:
        """What the shards do with an aggregate, given the job's optimizer."""
        ...

    # A method may also have, where it needs them:
    #   adapted() -> Traits                   the traits, where they depend on the parameters
    #   objection(topology: str) -> str       why these parameters do not go over this topology; "" where they do
    #   quorum(workers: int) -> int           how many updates make a group
    #   coordinate(lead: Coordinator)         server 0 leads it, and hands out portions: `batch`, `push_every`
    #   local_optimizer(OptimizerSpec) -> OptimizerSpec   what it has in place of the job's, unless one is asked for

    @property
    def reduce(self) -> str:
        """How the members of a group become one update: "mean" (weighted by batch size) or "sum"."""
        ...
