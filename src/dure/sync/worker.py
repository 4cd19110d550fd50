"""The worker, as a method sees it: its replica, its gradients, its clock, and the session of its topology.

The same `Worker` runs in virtual time and on processes; it asks its `Node` for everything that takes time. Beside it:
`refusals` (gradients that are not finite), `storage` (memory of parameters that are pulled), `membership` (entry and
leave) and `saved` (the state in a checkpoint).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from dure.core.node import EndOfWork, Ghost, Operation, Suspend
from dure.errors import DivergedError, UsageError
from dure.job.gradient_source import DataSource, GradientSource, LocalOptimizer
from dure.sync.refusals import Refusals, examined_mean, is_sound
from dure.sync.storage import Storage
from dure.topology.replica import Pulled, Stats

if TYPE_CHECKING:
    from dure.core.meter import Meter
    from dure.core.node import Group, Node
    from dure.job.gradient import Gradient
    from dure.topology.collective.topology import GroupSession
    from dure.topology.gossip.topology import Peer
    from dure.topology.hybrid.topology import RowSession
    from dure.topology.parameter_server.portion_client import PortionClient
    from dure.topology.parameter_server.session import ServerSession
    from dure.topology.shared_memory.topology import MemorySession

Session = TypeVar("Session")


def _first(snapshots: Sequence[torch.Tensor]) -> torch.Tensor:
    return snapshots[0]


@dataclass(slots=True)
class Sessions:
    """The sessions of a worker with its topology; None where the topology has no such part.

    `work_queue` hands out portions of a batch (L-BFGS). `rows` computes mean gradients with servers that hold a part of
    the model (hybrid).
    """

    server: ServerSession | None = None
    group: GroupSession | None = None
    peer: Peer | None = None
    memory: MemorySession | None = None
    work_queue: PortionClient | None = None
    rows: RowSession | None = None

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


@dataclass(slots=True)
class Boundary:
    """Decides at a step boundary whether a worker goes on.

    The work ends after `steps` mini-batches or `seconds`. `suspend` says whether a checkpoint is due. If workers need
    not be at the same clock for a checkpoint (`waiting`), a wait for admission is a boundary too.

    `checkpoint` gives the clock of the next checkpoint.

    Workers of a group must end at the same step, so they compare their times where they synchronize: every `period`
    steps, or at the clock `Worker.last_sync`. If the method lets each worker end `alone`, they do not compare.
    """

    steps: int | None
    seconds: float | None = None
    suspend: Callable[[Worker], bool] | None = None
    waiting: bool = False
    period: int = 1
    alone: bool = False
    checkpoint: Callable[[], int] | None = None

    def drained_at(self) -> int:
        """The clock at which a pipeline is drained: the end of the work or the next checkpoint."""
        assert self.steps is not None
        return self.steps if self.checkpoint is None else min(self.steps, self.checkpoint())

    async def stop(self, worker: Worker) -> None:
        """Raise `Suspend` or `EndOfWork` if the work stops here; otherwise begin the step."""
        if worker.step_begun:
            worker.step_begun = False
            return
        if worker.suspends():
            await worker.sessions.settled()
            await worker.source.settled()
            raise Suspend
        if self.steps is not None and worker.clock >= self.steps:
            await worker.source.settled()
            raise EndOfWork
        if self.seconds is not None and await self._is_late(worker, self.seconds):
            raise EndOfWork
        if worker.on_boundary is not None:
            worker.on_boundary(worker)
        if worker.rates is not None:
            worker.lr = worker.rates(worker.clock)

    async def _is_late(self, worker: Worker, seconds: float) -> bool:
        """Whether the time is over. In a group it is over for all members once it is for one."""
        late = worker.node.now() >= seconds
        if worker.sessions.group is None or self.alone:
            return late
        last = worker.last_sync
        if worker.clock % self.period if last is None else worker.clock != last:
            return False
        return not await worker.group.all_go_on(late)


@dataclass(slots=True)
class Worker:
    """One worker of a run, as its method sees it.

    `params` is the flat vector of its replica's parameters. A method may read and write it, except while a gradient is
    pending. `clock` counts the mini-batches done, from `joined_at` on: a new worker begins at the clock of the others.
    A restart restores `params`, `clock`, the optimizer, what `keep` returns and `kept_plain` (values that JSON has),
    but no local variable of the method.

    `lr` replaces the optimizer's rate in the present step; it may be one rate per parameter group. `rates` gives it for
    each clock. It travels with updates unless the servers have their own rate (`pushes_rates`).

    `loss` is the loss of the last mini-batch. `last_sync` is the clock of the last synchronization, for methods without
    a fixed `period`. `stats` are the figures that the members of the last group sent with their updates (`push`).
    `given` is the clock up to which gradients of this worker are in its updates. `on_boundary` is called at each step
    boundary after which the work goes on: the model then has this worker's gradients up to its clock.

    `number` counts the workers of the run. `rank` counts those that hold the same part of the model: it differs from
    `number` in a pipeline only.

    A gradient that holds NaN or infinity is refused: the method gets zeros in its place. `pausing`: the present step is
    skipped, and an update of zeros makes no step of a server. `step_begun`: `begin_step` has passed the boundary of the
    next gradient.
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
    on_step: Callable[[Worker, Gradient], None] | None = None
    on_abort: Callable[[Worker], None] | None = None
    on_boundary: Callable[[Worker], None] | None = None
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

    # ---- over its topology

    @property
    def server(self) -> ServerSession:
        """The session with servers or a clock: pulls and pushes. `over_servers`: whether the run has one."""
        return _present(self.sessions.server, "servers")

    @property
    def group(self) -> GroupSession:
        """The session with the group of all workers: means."""
        return _present(self.sessions.group, "a group of workers")

    @property
    def peer(self) -> Peer:
        """The session with the neighbors in gossip: averagings."""
        return _present(self.sessions.peer, "neighbors")

    @property
    def memory(self) -> MemorySession:
        """The session with the model in shared memory: reads and writes."""
        return _present(self.sessions.memory, "shared memory")

    @property
    def work_queue(self) -> PortionClient:
        """The session with a coordinator: portions of a batch."""
        return _present(self.sessions.work_queue, "a coordinator")

    @property
    def over_servers(self) -> bool:
        """Whether the run has servers."""
        return self.sessions.server is not None

    @property
    def batch_size(self) -> int:
        """Samples of a mini-batch."""
        return self.source.batch_size

    @property
    def share(self) -> float:
        """The share of this worker in the batch of all workers."""
        return self.source.batch_size / self.total_weight

    # ---- gradients

    async def begin_step(self) -> None:
        """Pass the step boundary, where the work may end or be suspended, and begin the next step.

        `gradient` passes the boundary itself. A method that does something before its gradient calls this first.
        """
        await self.boundary.stop(self)
        self.step_begun = True

    async def stop_if_due(self) -> None:
        """Pass a boundary before work that is no step: the work may end or be suspended here, but not within it."""
        await self.boundary.stop(self)

    def suspends(self) -> bool:
        """Whether a checkpoint is due here."""
        suspend = self.boundary.suspend
        return suspend is not None and suspend(self)

    async def gradient(self) -> torch.Tensor:
        """Compute the mean gradient of the next mini-batch at `params`: flat, and the caller may write to it."""
        await self.boundary.stop(self)
        started = self.node.now()
        gradient = await self.source.gradient(self)
        if self.source.whole:
            self.meter.add("compute", started, self.node.now())
        return self._done(gradient)

    async def gradient_unless_aborted(self) -> torch.Tensor | None:
        """Compute a gradient as `gradient` does; None if the clock closes the version that it is computed on.

        The mini-batch then counts as a step. A process cannot stop a gradient: it finishes the gradient, and its push
        is refused.
        """
        await self.boundary.stop(self)
        started = self.node.now()
        computing = self.source.gradient(self)
        if self.source.can_stop and await self.server.aborted(computing):
            self.meter.add("compute", started, self.node.now(), "aborted")
            self.clock += 1
            self.given += 1
            if self.on_abort is not None:
                self.on_abort(self)
            return None
        gradient = await computing
        self.meter.add("compute", started, self.node.now())
        return self._done(gradient)

    async def mean_gradient(self) -> torch.Tensor:
        """Compute a gradient as `gradient` does, and average it over the group, weighted by batch sizes."""
        await self.boundary.stop(self)
        if self.sessions.rows is not None:
            return self._done(await self.sessions.rows.mean_gradient(cast(DataSource, self.source).next(self)))
        if self.refusals.in_a_row and not self.group.encodes:
            return self._done(
                await examined_mean(await self.source.gradient(self), self.share, self.group), shared=True
            )
        return self._done(await self.source.mean_gradient(self), shared=True)

    @property
    def drained_at(self) -> int:
        """The clock at which a pipeline of this worker is drained."""
        return self.boundary.drained_at()

    @property
    def samples(self) -> int:
        """The number of samples of all workers together."""
        return cast(DataSource, self.source).samples

    @property
    def epoch(self) -> float:
        """Passes over this worker's samples so far."""
        return cast(DataSource, self.source).epoch

    async def gradient_again(self, values: torch.Tensor) -> torch.Tensor:
        """Compute the gradient of the last mini-batch at `values`, with the same random draws. It is no step."""
        return await self._aside(cast(DataSource, self.source).gradient_again(self, values))

    async def gradient_at(self, values: torch.Tensor, indices: torch.Tensor, *, draw: int) -> torch.Tensor:
        """Compute the mean gradient at `values` over the samples `indices` of the whole data. It is no step."""
        return await self._aside(cast(DataSource, self.source).gradient_at(self, values, indices, draw=draw))

    async def evaluate(self, indices: torch.Tensor, *, draw: int) -> Gradient:
        """Compute the mean gradient at `params` over the samples `indices`, as a step of this worker.

        The coordinator decides when the work ends. The caller checks the loss.
        """
        started = self.node.now()
        gradient = await cast(DataSource, self.source).gradient_at(self, self.params, indices, draw=draw)
        if self.source.whole:
            self.meter.add("compute", started, self.node.now())
        self._count(gradient)
        return gradient

    async def _aside(self, computing: Operation[Gradient]) -> torch.Tensor:
        started = self.node.now()
        gradient = await computing
        self.meter.add("compute", started, self.node.now())
        return gradient.values

    def _done(self, gradient: Gradient, *, shared: bool = False) -> torch.Tensor:
        """Count the step of a gradient, which may be `shared` by the group; return its values."""
        self.check_loss(gradient)
        self._count(gradient)
        if is_sound(gradient):
            if self.refusals.in_a_row:
                self.refusals.in_a_row, self.pausing = 0, False
            return gradient.values
        if not self.source.whole:
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

    def _count(self, gradient: Gradient) -> None:
        """Count a step that is done."""
        self.clock += 1
        self.loss = gradient.loss
        if gradient.buffers is not None:
            self.buffers = gradient.buffers
        if self.on_step is not None:
            self.on_step(self, gradient)

    # ---- the replica

    def step(self, gradient: torch.Tensor) -> None:
        """Make one step of the local optimizer, in place."""
        if isinstance(self.params, Ghost) or self.is_skipped(gradient):
            return
        self.optimizer.apply(self.params, gradient, self.params, lr=self.lr)

    def is_skipped(self, update: torch.Tensor) -> bool:
        """Whether an update has skipped steps only."""
        return self.pausing and not bool((update.values() if update.is_sparse else update).any())

    def settle(self, home: torch.Tensor) -> None:
        """Copy the parameters to `home`, the memory that a module uses, and go on there."""
        self.storage.settle(self, home)

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

    def look_at(self, pulled: Pulled) -> torch.Tensor:
        """Return pulled parameters without adopting them. The method may write to them until it pulls again."""
        self.storage.pulled, self.storage.spare = pulled, pulled.values
        return pulled.values

    def work_at(self, values: torch.Tensor, version: int, free: torch.Tensor | None) -> None:
        """Go on with parameters in shared memory, or a copy of them; `free` has room for the next copy."""
        self.params, self.storage.spare = values, free
        self.storage.pulled = Pulled(values, [version])

    def keep(self, name: str) -> torch.Tensor:
        """Return the declared state of that name: a tensor like `params`, zeros at first, which a restart restores."""
        if name not in self.kept:
            self.kept[name] = self.params.clone().zero_()
        return self.kept[name]

    def delivering(self, what: str) -> torch.Tensor:
        """Return what a method `delivers` at this worker: the vector kept under that name, or else its model."""
        values = self.kept[what] if what in self.kept else self.source.model(self)
        return values if self.sessions.memory is None else values.clone()  # memory that others write to cannot be sent

    # ---- its place among the workers

    def heartbeat(self) -> None:
        """Send a heartbeat, so that a long time without a push is not taken for a failure."""
        if self.sessions.server is not None:
            self.sessions.server.heartbeat()

    @property
    def stops_waiting(self) -> bool:
        """Whether a checkpoint may cut off a wait for admission."""
        return self.boundary.waiting and self.boundary.suspend is not None

    def wait_for_admission(self) -> None:
        """Begin to wait for admission. Raises `Suspend` if that is a boundary and a checkpoint is due."""
        if self.boundary.waiting and self.suspends():
            raise Suspend
        self.asking = self.boundary.waiting

    # ---- how far the run is

    @property
    def progress(self) -> float:
        """The completed share of the run at this worker, from 0 to 1, by its steps or its seconds."""
        steps, seconds = self.boundary.steps, self.boundary.seconds
        if steps is None and seconds is None:
            raise UsageError("this loop does not say when it ends, so no share of it can be told: leave that out.")
        return max(self.clock / steps if steps else 0.0, self.node.now() / seconds if seconds else 0.0)

    @property
    def steps_left(self) -> float:
        """The number of mini-batches left for this worker; infinite if its steps do not end the run."""
        steps = self.boundary.steps
        return math.inf if steps is None else steps - self.clock

    def set_clock(self, clock: int) -> None:
        """Set the clock to that of all workers, which is ahead if other workers made steps without this one."""
        skipped, self.clock = clock - self.clock, clock
        self.joined_at += skipped
        self.given += skipped

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


def _present(session: Session | None, what: str) -> Session:
    if session is None:
        raise UsageError(f"a method asked for {what}, which this run does not have: its topology is another.")
    return session
