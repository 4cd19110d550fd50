"""What a method of synchronisation is, and what it sees of the world.

A `Sync` is a frozen dataclass: its fields are the method's parameters, its `work` is the paper's loop at
one worker. It sees one thing, its `Worker`, and knows neither sockets nor clocks nor devices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from dure.job.optimizer import OptimizerSpec
    from dure.sync.worker import Worker
    from dure.topology.parameter_server.policies import Policy


class Sync(Protocol):
    """When replicas agree.

    `topologies` names what the method runs over, its default first. A `lockstep` method keeps all workers at
    the same clock, so a checkpoint is taken when each reaches the scheduled clock; for the others it is taken
    when the first does; over collectives all are in lockstep. `delivers` says what the method's result is: the
    `"server"`'s parameters, one `"replica"`'s (all are equal), the `"mean"` of the replicas', or what every worker
    keeps under that name (`Worker.keep`; all are equal). Over servers it is always the server's.
    """

    topologies: ClassVar[tuple[str, ...]]
    lockstep: ClassVar[bool]
    delivers: ClassVar[str]

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
    #   agreed: ClassVar[str]                 what a worker keeps the common model under, if it goes on from another
    #   streams: bool                         parts of the model travel at different times: there is no common one
    #   alone: ClassVar[bool]                 over collectives too, each worker ends in its own time
    #   objection(topology: str) -> str       why these parameters do not go over this topology; "" where they do
    #   sparse: ClassVar[bool]                sparse gradients are taken as they are, flat and coalesced
    #   stale_gradients: ClassVar[bool]       its servers apply gradients of older versions: remedies may join it
    #   encodes: ClassVar[tuple[str, ...]]    over these topologies, what it sends may be encoded by a codec
    #   uncoded: str                          why over the others it is not
    #   changes: ClassVar[bool]               what is encoded is how far a model has gone, and no gradient
    #   tallies: ClassVar[bool]               what it sends may be signs that are voted on, all of a step together
    #   quorum(workers: int) -> int           how many updates make a group
    #   fewest: int                           workers that it needs at least
    #   vectors: ClassVar[tuple[str, ...]]    what lies beside the model in shared memory
    #   coordinate(lead: Coordinator)         server 0 leads it, and hands out portions: `batch`, `push_every`
    #   no_loop: str                          why `dure.attach` cannot run it; "" where it can
    #   local_optimizer(OptimizerSpec) -> OptimizerSpec   what it has in place of the job's, unless one is asked for

    @property
    def reduce(self) -> str:
        """How the members of a group become one update: "mean" (weighted by batch size) or "sum"."""
        ...
