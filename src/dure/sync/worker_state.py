"""The state of a worker that its run, its sessions with a topology and its source of gradients keep and read.

The same state serves virtual time and processes; it asks its `Node` for everything that takes time. Methods see it
through `worker.Worker`. Beside it: `Sessions` with the topology, the `Boundary` between steps, `Refusals` of gradients
that are not finite, and the `Storage` of parameters that are pulled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch

from dure.core.node import EndOfWork, Ghost, Suspend, nothing
from dure.core.text import log
from dure.core.vectors import all_finite
from dure.errors import DivergedError, Quarantined, UsageError
from dure.job.gradient import DataSource, GradientSource, LocalOptimizer
from dure.topology.replica import Pulled, Stats

if TYPE_CHECKING:
    from dure.core.meter import Meter
    from dure.core.node import Group, Node
    from dure.job.gradient import Gradient
    from dure.topology.collective.sharded import ShardedSession
    from dure.topology.collective.topology import GroupSession
    from dure.topology.gossip.topology import Peer
    from dure.topology.hybrid.topology import RowSession
    from dure.topology.parameter_server.portion_client import PortionClient
    from dure.topology.parameter_server.session import ServerSession
    from dure.topology.replica import WorkerReplica
    from dure.topology.shared_memory.topology import MemorySession

Session = TypeVar("Session")

MOST_REFUSED = 3
"""Refused gradients in a row after which a worker is quarantined."""


def _first(snapshots: Sequence[torch.Tensor]) -> torch.Tensor:
    return snapshots[0]


@dataclass(slots=True)
class Sessions:
    """The sessions of a worker with its topology; None where the topology has no such part.

    `sharded` is the `group` of a worker that holds a shard. `work_queue` hands out portions of a batch (L-BFGS).
    `rows` computes mean gradients with servers that hold a part of the model (hybrid). `own` has the sessions of a
    user's topology, by the words that it offers.
    """

    server: ServerSession | None = None
    group: GroupSession | None = None
    sharded: ShardedSession | None = None
    peer: Peer | None = None
    memory: MemorySession | None = None
    work_queue: PortionClient | None = None
    rows: RowSession | None = None
    own: dict[str, Any] = field(default_factory=dict)

    @property
    def members(self) -> Group | None:
        """The group itself."""
        return None if self.group is None else self.group.members

    async def settled(self) -> None:
        """Wait until no averaging, pull or push is under way beside the method."""
        if self.peer is not None:
            await self.peer.settled()
        if self.server is not None:
            await self.server.settled()
        for session in self.own.values():
            await session.settled()


class LeasedWork(Protocol):
    """The mini-batches of a run that its workers lease one after another. `step` is that of the next one in the run."""

    @property
    def step(self) -> int: ...

    async def is_left(self) -> bool:
        """Whether another mini-batch is left for this worker; its source then draws that one."""
        ...

    def drop(self) -> None:
        """Leave the rest of the lease: others have it."""
        ...


@dataclass(slots=True)
class Boundary:
    """Decides at a step boundary whether a worker goes on.

    The work ends after `steps` mini-batches or `seconds`. `suspend` says whether a checkpoint is due. If workers need
    not be at the same clock for a checkpoint (`waiting`), a wait for admission is a boundary too.

    `checkpoint` gives the clock of the next checkpoint. `leased` is the work of a worker of an elastic run: it ends
    once no mini-batch is left, whatever the clock. A worker that is `retiring` leaves at its next boundary.

    Workers of a group must end at the same step, so they compare their times where they synchronize: every `period`
    steps, or at the clock `WorkerState.last_sync`. If the method lets each worker end `alone`, they do not compare.
    """

    steps: int | None
    seconds: float | None = None
    suspend: Callable[[WorkerState], bool] | None = None
    waiting: bool = False
    period: int = 1
    alone: bool = False
    checkpoint: Callable[[], int] | None = None
    leased: LeasedWork | None = None
    retiring: bool = False

    def step(self, clock: int) -> int:
        """The step of the run at the `clock` of a worker, by which rates change."""
        return clock if self.leased is None else self.leased.step

    def drained_at(self) -> int:
        """The clock at which a pipeline is drained: the end of the work or the next checkpoint."""
        assert self.steps is not None
        return self.steps if self.checkpoint is None else min(self.steps, self.checkpoint())

    async def stop(self, worker: WorkerState) -> None:
        """Raise `Suspend` or `EndOfWork` if the work stops here; otherwise begin the step."""
        if worker.step_begun:
            worker.step_begun = False
            return
        if worker.sessions.sharded is not None:
            await worker.sessions.sharded.gathered()
        # A checkpoint comes before the end of the work: a run that is resumed at its last step ends there.
        if worker.suspends():
            # What is under way beside the method is no declared state, so it must arrive before the state is saved.
            await worker.sessions.settled()
            await worker.source.settled()
            raise Suspend
        if self.leased is None:
            ended = self.steps is not None and worker.clock >= self.steps
        else:
            ended = not self.retiring and not await self.leased.is_left()
        if ended or self.retiring:
            await worker.source.settled()
            raise EndOfWork
        if self.seconds is not None and await self._is_late(worker, self.seconds):
            raise EndOfWork
        if worker.on_boundary is not None:
            worker.on_boundary(worker)
        if worker.rates is not None:
            worker.lr = worker.rates(self.step(worker.clock))

    async def _is_late(self, worker: WorkerState, seconds: float) -> bool:
        """Whether the time is over. In a group it is over for all members once it is for one."""
        late = worker.node.now() >= seconds
        if worker.sessions.group is None or self.alone:
            return late
        last = worker.last_sync
        # Members exchange their times where all of them are at one clock; elsewhere the collective would hang.
        if worker.clock % self.period if last is None else worker.clock != last:
            return False
        return not await worker.group.all_go_on(late)


# ---- gradients that hold NaN or infinity


@dataclass(slots=True)
class Refusals:
    """The refused gradients of a worker: their number in `total`, and `in_a_row` since the last finite one.

    The steps of refused gradients are skipped, and too many in a row end the run.
    """

    total: int = 0
    in_a_row: int = 0

    def refuse(self, worker: WorkerReplica, gradient: Gradient, *, shared: bool) -> torch.Tensor:
        """Refuse a gradient whose step has been counted; return zeros in its place.

        `shared`: the gradient is the mean of a group. Raises `Quarantined` at the last of `MOST_REFUSED` in a row.
        """
        self.total += 1
        self.in_a_row += 1
        self._report(worker, gradient.faulty if shared else [worker.rank])
        values = gradient.values
        (values.values() if values.is_sparse else values).zero_()
        return values

    def _report(self, worker: WorkerReplica, ranks: Sequence[int]) -> None:
        """Log or raise that the gradients of `ranks` (none: not known which) are not finite."""
        step = worker.clock - 1
        whose = ", ".join(f"worker {rank}" for rank in ranks) or "a worker"
        if self.in_a_row >= MOST_REFUSED:
            raise Quarantined(
                f"the gradients of {whose} hold NaN or infinity in {self.in_a_row} steps in a row, the last of "
                f"them step {step}. Try a learning rate below {worker.optimizer.spec.lr:g}, and look at the "
                "data of these steps."
            )
        if worker.rank in (ranks or [0]):
            log.warning("the gradient of %s in step %d holds NaN or infinity: skipped.", whose, step)


def is_sound(gradient: Gradient) -> bool:
    """Whether all values of a gradient, and of its parts at other ranks, are finite."""
    values = gradient.values
    return not gradient.faulty and (gradient.checked or isinstance(values, Ghost) or all_finite(values))


async def examined_mean(gradient: Gradient, share: float, group: GroupSession) -> Gradient:
    """Return the sum of all members' gradients times their shares, with the ranks whose gradients are not finite.

    It costs one more message than `GroupSession.mean_gradient`, so it is used in the step after a refused gradient.
    """
    gradient = gradient.scaled(share)
    gradient.faulty = await group.ranks_at_fault(isinstance(gradient.values, Ghost) or all_finite(gradient.values))
    return gradient.with_values(await group.members.all_reduce(gradient.values))


# ---- the memory of parameters


@dataclass(slots=True)
class Storage:
    """The memory around `WorkerState.params`: what was pulled, what a server lends, and room for the next pull.

    `pulled` are the parameters that were adopted last, with their versions. `spare` is memory that is not in use.
    `lent` are parameters that may be the server's own, which the method must not write to; `writes` is how often their
    memory had been written to when they were lent. `home` is the memory of a module, which is never spare: a pull
    beside the gradient would write to it while the module computes.
    """

    pulled: Pulled | None = None
    spare: torch.Tensor | None = None
    lent: Pulled | None = None
    writes: int = 0
    home: torch.Tensor | None = None

    def room(self, worker: WorkerReplica) -> torch.Tensor:
        """Return memory for parameters that are received while the present ones are in use."""
        # Two vectors take turns: gradients are computed on one while the next pull arrives in the other.
        room, self.spare = self.spare, None
        return worker.params.clone() if room is None else room

    def adopt(self, worker: WorkerReplica, pulled: Pulled) -> None:
        """Replace the parameters by those that were pulled."""
        self._leave(worker)
        worker.params = pulled.values
        self.pulled = pulled
        if pulled.release is not nothing:  # the server writes to lent memory only after its release
            self.lent, self.writes = pulled, _writes(pulled.values)

    def look_at(self, pulled: Pulled) -> torch.Tensor:
        """Return pulled parameters without adopting them. The method may write to them until it pulls again."""
        self.pulled, self.spare = pulled, pulled.values
        return pulled.values

    def settle(self, worker: WorkerReplica, home: torch.Tensor) -> None:
        """Copy the parameters to `home`, the memory that a module uses, and go on there."""
        self.home = home
        if worker.params is home:
            return
        home.copy_(worker.params)
        self._leave(worker)
        worker.params = home

    def _leave(self, worker: WorkerReplica) -> None:
        """Keep the memory of the present parameters as spare, or give it back to the server that lent it."""
        lent = self.lent
        if lent is None:
            if worker.params is not self.home:
                self.spare = worker.params
            return
        self.lent = None
        # Nothing protects lent memory from writes, so the method's mistake is found here, before the server reads on.
        if _writes(lent.values) != self.writes:
            raise UsageError(
                f"a method wrote to the parameters that worker {worker.rank} had from pull(lend=True), which may be "
                "the server's own. Write worker.server.pull() in its place."
            )
        lent.release()


def _writes(tensor: torch.Tensor) -> int:
    """Return how often a tensor's memory has been written to, as PyTorch counts."""
    return 0 if isinstance(tensor, Ghost) else tensor._version


# ---- the state itself


@dataclass(slots=True)
class WorkerState:
    """All that a worker of a run has.

    `params` is the flat vector of its replica's parameters. `clock` counts the mini-batches done, from `joined_at` on:
    a new worker begins at the clock of the others. A checkpoint has `params`, `clock`, the optimizer, `kept` and
    `kept_plain` (`lifecycle.state`).

    `lr` replaces the optimizer's rate in the present step; it may be one rate per parameter group. `rates` gives it for
    each clock. It travels with updates unless the servers have their own rate (`pushes_rates`).

    `loss` is the loss of the last mini-batch. `last_sync` is the clock of the last synchronization, for methods without
    a fixed `period`. `stats` are the figures that the members of the last group sent with their updates (`push`).
    `given` is the clock up to which gradients of this worker are in its updates. `on_boundary` is called at each step
    boundary after which the work goes on: the model then has this worker's gradients up to its clock.

    `number` counts the workers of the run. `rank` counts those that hold the same part of the model: it differs from
    `number` in a pipeline only.

    A gradient that holds NaN or infinity is refused: the method gets zeros in its place. `pausing`: the present step is
    skipped, and an update of zeros makes no step of a server. `step_begun`: `Worker.begin_step` has passed the boundary
    of the next gradient. `asking`: the worker waits for admission, and a checkpoint may cut off that wait.
    """

    node: Node
    rank: int
    world_size: int
    params: torch.Tensor
    optimizer: LocalOptimizer
    source: GradientSource
    meter: Meter
    boundary: Boundary
    sessions: Sessions = field(default_factory=Sessions)
    total_weight: float = 1.0
    buffers: torch.Tensor | None = None
    merge_buffers: Callable[[Sequence[torch.Tensor]], torch.Tensor] = _first
    on_step: Callable[[WorkerState, Gradient], None] | None = None
    on_abort: Callable[[WorkerState], None] | None = None
    on_boundary: Callable[[WorkerState], None] | None = None
    clock: int = 0
    joined_at: int = 0
    given: int = 0
    lr: float | Sequence[float] | None = None
    rates: Callable[[int], float | Sequence[float]] | None = None
    pushes_rates: bool = True
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    kept_plain: dict[str, Any] = field(default_factory=dict)
    loss: float = 0.0
    last_sync: int | None = None
    stats: list[Stats] = field(default_factory=list)
    pausing: bool = False
    asking: bool = False
    step_begun: bool = False
    number: int = -1
    refusals: Refusals = field(default_factory=Refusals)
    storage: Storage = field(default_factory=Storage)

    def __post_init__(self) -> None:
        if self.number < 0:
            self.number = self.rank

    # ---- sessions with its topology

    @property
    def server(self) -> ServerSession:
        """The session with servers or a clock."""
        return _present(self.sessions.server, "servers")

    @property
    def group(self) -> GroupSession:
        """The session with the group of all workers."""
        return _present(self.sessions.group, "a group of workers")

    @property
    def shard(self) -> ShardedSession | None:
        """The session of a worker that holds a shard."""
        return self.sessions.sharded

    @property
    def peer(self) -> Peer:
        """The session with the neighbors in gossip."""
        return _present(self.sessions.peer, "neighbors")

    @property
    def memory(self) -> MemorySession:
        """The session with the model in shared memory."""
        return _present(self.sessions.memory, "shared memory")

    @property
    def work_queue(self) -> PortionClient:
        """The session with a coordinator: portions of a batch."""
        return _present(self.sessions.work_queue, "a coordinator")

    def session(self, offer: str) -> Any:
        """The session of a user's topology for an `offer` of its own."""
        return _present(self.sessions.own.get(offer), offer)

    @property
    def over_servers(self) -> bool:
        """Whether the run has servers."""
        return self.sessions.server is not None

    # ---- its data

    @property
    def data(self) -> DataSource:
        """The source, where it owns its data: methods that choose samples run with no other."""
        return cast(DataSource, self.source)

    @property
    def batch_size(self) -> int:
        """Samples of a mini-batch."""
        return self.source.batch_size

    @property
    def share(self) -> float:
        """The share of this worker in the batch of all workers."""
        return self.source.batch_size / self.total_weight

    # ---- steps

    def suspends(self) -> bool:
        """Whether a checkpoint is due here."""
        suspend = self.boundary.suspend
        return suspend is not None and suspend(self)

    @property
    def drained_at(self) -> int:
        """The clock at which a pipeline of this worker is drained."""
        return self.boundary.drained_at()

    @property
    def steps_left(self) -> float:
        """The number of mini-batches left for this worker; infinite if its steps do not end the run."""
        steps = self.boundary.steps
        return math.inf if steps is None else steps - self.clock

    def finish_step(self, gradient: Gradient, *, shared: bool = False) -> torch.Tensor:
        """Count the step of a gradient, which may be `shared` by the group; return its values."""
        self.check_loss(gradient)
        self.count_step(gradient)  # also of a refused gradient: workers of a group count alike
        if is_sound(gradient):
            if self.refusals.in_a_row:
                self.refusals.in_a_row, self.pausing = 0, False
            return gradient.values
        if not self.source.whole:
            # The other stages have made the step: zeros at one of them would leave parts of different models.
            raise DivergedError(
                f"a gradient of worker {self.number}, step {self.clock}, holds NaN or infinity: the training diverged. "
                f"Try a learning rate below {self.optimizer.spec.lr:g}."
            )
        self.given += 1  # the refused gradient is in no update
        self.pausing = True
        return self.refusals.refuse(self, gradient, shared=shared)

    def check_loss(self, gradient: Gradient) -> None:
        """Raise `DivergedError` for a loss that is NaN or infinite."""
        if not math.isfinite(gradient.loss):
            raise DivergedError(
                f"the loss became {gradient.loss} at worker {self.number}, step {self.clock}: "
                f"the training diverged. Try a learning rate below {self.optimizer.spec.lr:g}."
            )

    def count_step(self, gradient: Gradient) -> None:
        """Count a step that is done."""
        self.clock += 1
        self.loss = gradient.loss
        if gradient.buffers is not None:
            self.buffers = gradient.buffers
        if self.on_step is not None:
            self.on_step(self, gradient)

    def set_clock(self, clock: int) -> None:
        """Set the clock to that of all workers, which is ahead if other workers made steps without this one."""
        skipped, self.clock = clock - self.clock, clock
        self.joined_at += skipped
        self.given += skipped

    # ---- updates

    def is_skipped(self, update: torch.Tensor) -> bool:
        """Whether an update has skipped steps only."""
        return self.pausing and not bool((update.values() if update.is_sparse else update).any())

    def give(self) -> int:
        """Return the number of gradients in the update that this worker sends now: those since its last update."""
        gradients, self.given = self.clock - self.given, self.clock
        return gradients

    def stamp(self, update: torch.Tensor, base: Sequence[int] | None = None) -> dict[str, Any]:
        """Return the fields that travel with `update`. `void`: it has skipped steps only."""
        return {
            "base": self.versions if base is None else base,
            "lr": self.lr if self.pushes_rates else None,
            "gradients": self.give(),
            "void": self.is_skipped(update),
        }

    # ---- the memory of its parameters

    @property
    def versions(self) -> list[int] | None:
        """The version of each shard that was adopted last; None before the first."""
        pulled = self.storage.pulled
        return None if pulled is None else pulled.versions

    def room(self) -> torch.Tensor:
        """Return memory for parameters that are received while the present ones are in use."""
        return self.storage.room(self)

    def adopt(self, pulled: Pulled) -> None:
        """Replace the parameters by those that were pulled."""
        self.storage.adopt(self, pulled)

    def settle(self, home: torch.Tensor) -> None:
        """Copy the parameters to `home`, the memory that a module uses, and go on there."""
        self.storage.settle(self, home)

    def work_at(self, values: torch.Tensor, version: int, free: torch.Tensor | None) -> None:
        """Go on with parameters in shared memory, or a copy of them; `free` has room for the next copy."""
        # `values` may be the shared model itself, so they never become spare.
        self.params, self.storage.spare = values, free
        self.storage.pulled = Pulled(values, [version])

    def delivering(self, what: str) -> torch.Tensor:
        """Return what a method `delivers` at this worker: the vector kept under that name, or else its model."""
        values = self.kept[what] if what in self.kept else self.source.model(self)
        return values if self.sessions.memory is None else values.clone()  # memory that others write to cannot be sent

    # ---- waits for admission

    @property
    def stops_waiting(self) -> bool:
        """Whether a checkpoint may cut off a wait for admission."""
        return self.boundary.waiting and self.boundary.suspend is not None

    def wait_for_admission(self) -> None:
        """Begin to wait for admission. Raises `Suspend` if that is a boundary and a checkpoint is due."""
        # The slowest worker may have stopped for this checkpoint, and a wait for it would never end.
        if self.boundary.waiting and self.suspends():
            raise Suspend
        self.asking = self.boundary.waiting


def _present(session: Session | None, what: str) -> Session:
    if session is None:
        raise UsageError(
            f"a method asked for {what}, which the topology of this run does not offer. Name what the method needs in "
            "its dure.Traits(needs=...), and run it over a topology that offers it."
        )
    return session
