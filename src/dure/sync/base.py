"""The interface of a synchronization method: `Sync`, its `Traits`, and its `ServerRule`.

A method is a frozen dataclass: its fields are the parameters, its `work` is the paper's loop at one worker. `work`
uses one object, its `Worker`, and no socket, clock or device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

from dure.errors import StrategyError
from dure.topology.offers import offering

if TYPE_CHECKING:
    from dure.job.optimizer import OptimizerSpec
    from dure.sync.worker import Worker
    from dure.topology.parameter_server.admission import Policy


@dataclass(frozen=True, slots=True)
class Reasons:
    """The reasons of a method, with which refusals end.

    - `topology` completes "X does not run over Y: "; `collective` is added where Y offers a group. `objections` has the
      reasons against needs of the method under these parameters.
    - `codec`: why a codec cannot encode its messages.
    - `stages`: why it does not run over the stages of a pipeline, at all or under these parameters.
    - `loop`: why `dure.attach` cannot run it.
    - `rates` completes "X has ": why it cannot follow parameter groups and schedules.
    """

    topology: str = ""
    collective: str = ""
    objections: Mapping[str, str] = field(default_factory=dict)
    codec: str = ""
    stages: str = ""
    loop: str = ""
    rates: str = ""


@dataclass(frozen=True, slots=True)
class Messages:
    """The messages of a method that a codec may encode: those `over` the needs that are named.

    `changes`: the messages are changes of the model, not gradients. `votes`: they may be signs for a vote.
    """

    over: tuple[str, ...] = ()
    changes: bool = False
    votes: bool = False


UNDECLARED = 3
"""The vectors that a method without a declaration counts as keeping at a worker: as many as BMUF."""


@dataclass(frozen=True, slots=True)
class Traits:
    """The properties of a method that strategies, topologies and runs depend on.

    - `needs`: what a topology must offer (`topology.offers`). One of the needs suffices; the first is preferred.
    - `reasons`: with which refusals end. `messages`: those that a codec may encode.
    - `lockstep`: all workers have the same clock at a step boundary. A checkpoint is taken when each worker reaches the
      scheduled clock; without lockstep, when the first worker reaches it. Over collectives all methods are in lockstep.
    - `delivers`: the result. `"server"`: the parameters of the servers; `"replica"`: the parameters of one worker (all
      are equal); `"mean"`: the mean of the replicas; any other name: the vector that each worker keeps under it
      (`Worker.keep`; all are equal). Over servers the result is always that of the servers.
    - `agreed`: the name under which a worker keeps the common model, if its own parameters differ from it. None: no
      common model exists at any step, as where parts of the model are sent at different times.
    - `alone`: each worker ends at its own time, over collectives too.
    - `staged`: the method takes one gradient after another and decides on none, so it may run over each stage of a
      pipeline, unless `reasons.stages` says why not under these parameters.
    - `regroups`: `work` may begin again wherever a collective has failed, with what a restart restores: nothing has
      changed since the last one that succeeded, or the change is made again. A group then goes on without a worker that
      fails. Another that joins gets the whole state of one of them, its own samples apart.
    - `stale_gradients`: servers apply gradients of older versions, so corrections may be joined.
    - `sparse`: the method takes sparse gradients, flat and coalesced.
    - `keeps`: names of the vectors of the model's length that a worker keeps beside its parameters and the state of its
      optimizer (`Worker.keep`), by the need that the topology meets; "codec": those beside them where a codec encodes;
      "server": those beside the model in shared memory, or at each server of a coordinator. None: not declared, which
      counts as `UNDECLARED` vectors at a worker.
    - `fewest`: the least number of workers.
    - `sampling`: replaces the job's split of the data. `chooses_samples`: workers compute gradients of samples that the
      method chooses.
    - `local_optimizer` replaces the job's optimizer, unless the run names one.
    """

    needs: tuple[str, ...]
    reasons: Reasons = field(default_factory=Reasons)
    messages: Messages = field(default_factory=Messages)
    lockstep: bool = False
    delivers: str = "server"
    agreed: str | None = ""
    alone: bool = False
    staged: bool = False
    regroups: bool = False
    stale_gradients: bool = False
    sparse: bool = False
    keeps: Mapping[str, tuple[str, ...]] | None = None
    fewest: int = 1
    sampling: Any = None
    chooses_samples: bool = False
    local_optimizer: OptimizerSpec | None = None

    def __post_init__(self) -> None:
        if isinstance(self.needs, str) or not self.needs:
            raise ValueError(
                f'needs must be a tuple of names, got {self.needs!r}. Use ("group",) for a group of workers.'
            )

    @property
    def topologies(self) -> tuple[str, ...]:
        """The topologies of the catalogue that the method runs over; the first is the default."""
        return offering(self.needs)

    @property
    def vectors(self) -> tuple[str, ...]:
        """The names of the vectors beside the model in shared memory, or at each server of a coordinator."""
        return () if self.keeps is None else self.keeps.get("server", ())

    @property
    def coordinated(self) -> bool:
        """Whether the method has `coordinate(lead)`, which server 0 runs, and workers evaluate its portions.

        Several workers may hold a copy of the model and evaluate a portion together, if each parameter has one holder.
        """
        return "coordinator" in self.needs

    def kept_over(self, offers: Collection[str], *, encoded: bool) -> tuple[str, ...]:
        """The names of the vectors that a worker keeps over a topology with these offers; `encoded`: with a codec."""
        if self.keeps is None:
            return tuple(f"undeclared {number}" for number in range(1, UNDECLARED + 1))
        need = next((need for need in self.needs if need in offers), "")
        return self.keeps.get(need, ()) + (self.keeps.get("codec", ()) if encoded else ())

    def objection(self, offers: Collection[str]) -> str:
        """The reason against a topology with these offers, which has a need of the method; empty if it suits."""
        against = [self.reasons.objections.get(need, "") for need in self.needs if need in offers]
        return next(iter(against), "") if all(against) else ""


@dataclass(frozen=True, slots=True)
class ServerRule:
    """The servers' treatment of the updates of a method.

    `policy` admits updates and orders them in groups; without one each update is applied on arrival. `reduce` makes one
    update of a group: the `"mean"`, weighted by batch size, or the `"sum"`. `optimizer` applies the result. `quorum`
    gives the number of updates in a group for a number of workers; without it a group has one update of each worker. Of
    updates that are applied on arrival, a shard refuses those whose staleness is above `max_delay`.
    """

    optimizer: OptimizerSpec
    policy: Policy | None = None
    reduce: Literal["mean", "sum"] = "mean"
    quorum: Callable[[int], int] | None = None
    max_delay: int | None = None

    def averaged(self, workers: int) -> int:
        """Return the number of gradients whose mean is one update."""
        if self.reduce == "sum":
            return 1
        return workers if self.quorum is None else self.quorum(workers)


@runtime_checkable
class Served(Protocol):
    """A method that runs over servers or shared memory."""

    def server_rule(self, optimizer: OptimizerSpec) -> ServerRule:
        """Return what servers do with an update, given the job's optimizer."""
        ...


@runtime_checkable
class Periodic(Protocol):
    """A method whose workers synchronize every `period` steps."""

    period: int


@runtime_checkable
class OfEpochs(Protocol):
    """A method whose period may be an epoch of the job."""

    def with_epoch(self, steps: int) -> Sync:
        """The method for a job whose epoch has so many steps of each worker."""
        ...


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
            f"{type(method).__name__} has no traits: give its class traits = dure.Traits(needs=(...)), with the offers "
            "of a topology that it needs."
        )
    return found


def server_rule_of(method: Any, optimizer: OptimizerSpec | None = None) -> ServerRule:
    """Return what servers do with the updates of a method, given the job's optimizer (none: any would do)."""
    from dure.job.optimizer import OptimizerSpec  # imports torch, which the command line does not need to read traits

    given = optimizer or OptimizerSpec()
    return method.server_rule(given) if isinstance(method, Served) else ServerRule(given)


def servers_have_own_rule(method: Any) -> bool:
    """Whether the servers of a method use no learning rate of the job (BMUF, EASGD)."""
    from dure.job.optimizer import OptimizerSpec

    one, other = (server_rule_of(method, OptimizerSpec(lr=lr)).optimizer for lr in (0.25, 0.5))
    return one == other


class Sync(Protocol):
    """A synchronization method. It may also be `Served`, `Adapted` or `Periodic`."""

    traits: ClassVar[Traits]

    async def work(self, worker: Worker) -> None:
        """The method at one worker; ends when `EndOfWork` is thrown into a pending gradient."""
        ...
