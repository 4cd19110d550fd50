"""What a method sees at one worker: its replica, its data, its server or its group.

The same `Worker` runs in virtual time and on processes; it asks its `Node` for everything that takes time.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from dure.codec.coder import restore, states
from dure.core.finite import all_finite
from dure.core.node import EndOfWork, Ghost, Operation, Suspend, nothing
from dure.errors import DivergedError, Quarantined, UsageError
from dure.job.gradient_source import DataSource, GradientSource, LocalOptimizer
from dure.topology.collective.compressed import CompressedGroup
from dure.topology.replica import Pulled, Stats

if TYPE_CHECKING:
    from dure.core.meter import Meter
    from dure.core.node import Group, Node
    from dure.job.gradient import Gradient
    from dure.topology.collective.session import GroupSession
    from dure.topology.gossip.peer import Peer
    from dure.topology.hybrid.session import RowSession
    from dure.topology.parameter_server.batch.client import PortionClient
    from dure.topology.parameter_server.session import ServerSession
    from dure.topology.shared_memory.session import MemorySession


MOST_REFUSED = 3
"""Gradients in a row that hold NaN or infinity, after which a worker is quarantined."""

log = logging.getLogger("dure")

Session = TypeVar("Session")


def _first(snapshots: Sequence[torch.Tensor]) -> torch.Tensor:
    return snapshots[0]


def _writes(tensor: torch.Tensor) -> int:
    """How often a tensor's memory has been written to, as PyTorch counts."""
    return 0 if isinstance(tensor, Ghost) else tensor._version


@dataclass(slots=True)
class Boundary:
    """What decides at a step boundary whether a worker goes on.

    `steps` and `seconds` end the work; `suspend` says whether a checkpoint is due. Waiting for admission is a
    boundary too where workers need not be at the same clock (`waiting`). Workers of a group look at the time where
    they are together, since they must end at the same step: every `period` steps, or where `Worker.last_sync` says.
    Not so where the method has each end `alone`.
    """

    steps: int | None
    seconds: float | None = None
    suspend: Callable[[Worker], bool] | None = None
    waiting: bool = False
    period: int = 1
    alone: bool = False


@dataclass(slots=True)
class Sessions:
    """What a worker has of its topology; None for what that is not made of.

    `work_queue` hands out portions of a batch (L-BFGS), `rows` mean gradients of which servers hold a part (hybrid).
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
        """Wait until nothing is under way beside the method."""
        if self.peer is not None:
            await self.peer.settled()
        if self.server is not None:
            await self.server.settled()


@dataclass(slots=True)
class Worker:
    """One worker of a run, as its method sees it.

    `params` is the flat vector of its replica's parameters, the method's to read and to write except while a
    gradient is pending. `clock` counts the mini-batches done, from `joined_at` on: a newcomer begins where others
    are. What must survive a restart is `params`, `clock`, the optimizer, what `keep` returns and `kept_plain` (values
    that JSON has); a local variable of the method does not.

    `lr` is the rate of the present step in place of the optimizer's, or one rate per parameter group; where there are
    `rates`, it is their value at the step's clock. It travels with updates unless the servers have a rate of their own
    (`pushes_rates`).

    `loss` is that of the last mini-batch. `last_sync` is the clock of the last synchronization, for methods without a
    fixed `period`. `stats` are the figures that the members of the last group gave with their updates (`push`).
    `given` is the clock up to which this worker's gradients are in what it has given to others. `on_boundary` is called
    at every step boundary after which the work goes on: then the model holds this worker's gradients up to its clock.
    `pausing`: the step is skipped, and an update of zeros makes no server step.

    A gradient that holds NaN or infinity is refused: the method gets zeros in its place, in a step that is skipped.
    `refused` counts them, `refused_in_a_row` those since the last finite one, and `faulty` are the ranks whose part of
    the group's mean was to blame for the last, as far as is known.
    """

    node: Node
    rank: int
    world_size: int
    params: torch.Tensor
    optimizer: LocalOptimizer
    source: GradientSource
    meter: Meter
    boundary: Boundary
    sessions: Sessions = field(default_factory=lambda: Sessions())
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
    refused: int = 0
    refused_in_a_row: int = 0
    faulty: Sequence[int] = ()
    _spare: torch.Tensor | None = None
    _lent: tuple[Pulled, int] | None = None
    _pulled: Pulled | None = None
    _begun: bool = False
    asking: bool = False

    # ---- over its topology

    @property
    def server(self) -> ServerSession:
        """Pulls and pushes, where the run has servers or a clock; `over_servers` says whether."""
        return _present(self.sessions.server, "servers")

    @property
    def group(self) -> GroupSession:
        """Means over all workers, where they are a group."""
        return _present(self.sessions.group, "a group of workers")

    @property
    def peer(self) -> Peer:
        """Averaging with neighbors, where the run gossips."""
        return _present(self.sessions.peer, "neighbors")

    @property
    def memory(self) -> MemorySession:
        """Reads and writes of the model, where it lies in shared memory."""
        return _present(self.sessions.memory, "shared memory")

    @property
    def work_queue(self) -> PortionClient:
        """Portions of a batch, where a coordinator hands them out."""
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
        """This worker's part of all workers' batch."""
        return self.source.batch_size / self.total_weight

    # ---- gradients

    async def begin_step(self) -> None:
        """Stand at the step boundary, where the work may end or be suspended; what follows is part of the next step.

        A gradient begins its step itself. A method that has something to do before calls this first.
        """
        await self._stop_at_boundary()
        self._begun = True

    def suspends(self) -> bool:
        """Whether this worker is to stop here for a checkpoint."""
        suspend = self.boundary.suspend
        return suspend is not None and suspend(self)

    async def gradient(self) -> torch.Tensor:
        """The mean gradient of this worker's next mini-batch at `params`; flat, the caller's own."""
        await self._stop_at_boundary()
        started = self.node.now()
        gradient = await self.source.gradient(self)
        self.meter.add("compute", started, self.node.now())
        return self._done(gradient)

    async def gradient_unless_aborted(self) -> torch.Tensor | None:
        """As `gradient`; None as soon as the clock says that the version that it is computed on is over.

        Then the mini-batch is used up, and counts as a step. Where a gradient can't be stopped half-way, on processes,
        it is finished, and refused when it is offered (`push`).
        """
        await self._stop_at_boundary()
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
        """As `gradient`, averaged over the group's workers, weighted by their batch sizes."""
        await self._stop_at_boundary()
        if self.sessions.rows is not None:
            return self._done(await self.sessions.rows.mean_gradient(cast(DataSource, self.source).next(self)))
        if self.refused_in_a_row and not self.group.encodes:
            return self._done(await self._examined_mean(), shared=True)
        return self._done(await self.source.mean_gradient(self), shared=True)

    async def _examined_mean(self) -> Gradient:
        """As the source's mean gradient, after a step that was refused: find the ranks whose parts are not finite."""
        gradient = (await self.source.gradient(self)).scaled(self.share)
        sound = isinstance(gradient.values, Ghost) or all_finite(gradient.values)
        gradient.faulty = await self.group.ranks_at_fault(sound)
        return gradient.with_values(await self.group.members.all_reduce(gradient.values))

    @property
    def samples(self) -> int:
        """How many samples all workers have together."""
        return cast(DataSource, self.source).samples

    @property
    def epoch(self) -> float:
        """Passes over this worker's samples so far."""
        return cast(DataSource, self.source).epoch

    async def gradient_again(self, values: torch.Tensor) -> torch.Tensor:
        """The gradient of the last mini-batch at `values`, with the same draws: no step of its own."""
        return await self._aside(cast(DataSource, self.source).gradient_again(self, values))

    async def gradient_at(self, values: torch.Tensor, indices: torch.Tensor, *, draw: int) -> torch.Tensor:
        """The mean gradient at `values` over the samples `indices`, whoever's they are: no step either."""
        return await self._aside(cast(DataSource, self.source).gradient_at(self, values, indices, draw=draw))

    async def evaluate(self, indices: torch.Tensor, *, draw: int) -> Gradient:
        """The mean gradient at `params` over the samples `indices`, as a step of this worker.

        Whoever hands out the work says when it ends. A loss that is no number is for the caller to deal with.
        """
        started = self.node.now()
        gradient = await cast(DataSource, self.source).gradient_at(self, self.params, indices, draw=draw)
        self.meter.add("compute", started, self.node.now())
        self._count(gradient)
        return gradient

    async def _aside(self, computing: Operation[Gradient]) -> torch.Tensor:
        started = self.node.now()
        gradient = await computing
        self.meter.add("compute", started, self.node.now())
        return gradient.values

    async def stop_if_due(self) -> None:
        """Stand at a step boundary before work that is no step: what follows is done whole."""
        await self._stop_at_boundary()

    async def _stop_at_boundary(self) -> None:
        if self._begun:
            self._begun = False
            return
        boundary = self.boundary
        if self.suspends():
            await self.sessions.settled()
            raise Suspend
        if boundary.steps is not None and self.clock >= boundary.steps:
            raise EndOfWork
        if boundary.seconds is not None and await self._is_late(boundary.seconds):
            raise EndOfWork
        if self.on_boundary is not None:
            self.on_boundary(self)
        if self.rates is not None:
            self.lr = self.rates(self.clock)

    async def _is_late(self, seconds: float) -> bool:
        """Whether the time is up; for all members of a group, once it is for one."""
        late = self.node.now() >= seconds
        if self.sessions.group is None or self.boundary.alone:
            return late
        if self.clock % self.boundary.period if self.last_sync is None else self.clock != self.last_sync:
            return False
        return not await self.group.all_go_on(late)

    def _done(self, gradient: Gradient, *, shared: bool = False) -> torch.Tensor:
        """The values of a gradient whose step counts, `shared` by the group or this worker's own."""
        self.check_loss(gradient)
        self._count(gradient)
        values = gradient.values
        if not gradient.faulty and (gradient.checked or isinstance(values, Ghost) or all_finite(values)):
            if self.refused_in_a_row:
                self.refused_in_a_row, self.pausing = 0, False
            return values
        self._refuse(gradient.faulty, shared=shared)
        (values.values() if values.is_sparse else values).zero_()
        return values

    def _refuse(self, faulty: Sequence[int], *, shared: bool) -> None:
        """Skip the step that has just been counted. Raises `Quarantined` where it is not the first in a row."""
        self.given += 1  # it is in no update
        self.refused += 1
        self.refused_in_a_row += 1
        self.pausing = True
        self.faulty = faulty
        ranks = faulty if shared else [self.rank]
        whose = ", ".join(f"worker {rank}" for rank in ranks) or "a worker"
        if self.refused_in_a_row >= MOST_REFUSED:
            raise Quarantined(
                f"the gradients of {whose} hold NaN or infinity in {self.refused_in_a_row} steps in a row, the last of "
                f"them step {self.clock - 1}. Try a learning rate below {self.optimizer.spec.lr:g}, and look at the "
                "data of these steps."
            )
        if self.rank in (ranks or [0]):
            log.warning("the gradient of %s in step %d holds NaN or infinity: skipped.", whose, self.clock - 1)

    def check_loss(self, gradient: Gradient) -> None:
        """Raise `DivergedError` for a loss that is no number."""
        if not math.isfinite(gradient.loss):
            raise DivergedError(
                f"the loss became {gradient.loss} at worker {self.rank}, step {self.clock}: "
                f"the training diverged. Try a learning rate below {self.optimizer.spec.lr:g}."
            )

    def _count(self, gradient: Gradient) -> None:
        """A step is done."""
        self.clock += 1
        self.loss = gradient.loss
        if gradient.buffers is not None:
            self.buffers = gradient.buffers
        if self.on_step is not None:
            self.on_step(self, gradient)

    # ---- the replica

    def step(self, gradient: torch.Tensor) -> None:
        """One step of the local optimizer, in place."""
        if isinstance(self.params, Ghost) or self.is_skipped(gradient):
            return
        self.optimizer.apply(self.params, gradient, self.params, lr=self.lr)

    def is_skipped(self, update: torch.Tensor) -> bool:
        """Whether an update holds nothing but steps that are skipped."""
        return self.pausing and not bool((update.values() if update.is_sparse else update).any())

    def settle(self, home: torch.Tensor) -> None:
        """Have the parameters lie in `home`, the memory that a module uses."""
        if self.params is home:
            return
        home.copy_(self.params)
        if self._lent is None:
            self._spare = self.params
        else:
            self._give_back(*self._lent)
        self.params = home

    @property
    def versions(self) -> list[int] | None:
        """The version of each shard that was adopted last; None before the first."""
        return None if self._pulled is None else self._pulled.versions

    def room(self) -> torch.Tensor:
        """Memory for parameters that are received while the present ones are in use."""
        room, self._spare = self._spare, None
        return self.params.clone() if room is None else room

    def adopt(self, pulled: Pulled) -> None:
        """Go on from what was pulled."""
        if self._lent is None:
            self._spare = self.params
        else:
            self._give_back(*self._lent)
        self.params = pulled.values
        self._pulled = pulled
        if pulled.release is not nothing:
            self._lent = (pulled, _writes(pulled.values))

    def look_at(self, pulled: Pulled) -> torch.Tensor:
        """What was pulled, the method's to write to until it pulls again, in place of adopting it."""
        self._pulled, self._spare = pulled, pulled.values
        return pulled.values

    def work_at(self, values: torch.Tensor, version: int, free: torch.Tensor | None) -> None:
        """Go on from parameters in shared memory, or a copy of them; `free` has room for the next copy."""
        self.params, self._spare = values, free
        self._pulled = Pulled(values, [version])

    def _give_back(self, borrowed: Pulled, writes: int) -> None:
        self._lent = None
        if _writes(borrowed.values) != writes:
            raise UsageError(
                f"a method wrote to the parameters that worker {self.rank} had from pull(lend=True), which may be the "
                "server's own. Write worker.server.pull() in its place."
            )
        borrowed.release()

    def keep(self, name: str) -> torch.Tensor:
        """Declared state: a tensor like `params`, zeros at first, that survives a restart."""
        if name not in self.kept:
            self.kept[name] = self.params.clone().zero_()
        return self.kept[name]

    def delivering(self, what: str) -> torch.Tensor:
        """What a method that `delivers` this has for its result here: kept under that name, or the parameters."""
        values = self.kept.get(what, self.params)
        return values if self.sessions.memory is None else values.clone()  # what others write to cannot be sent

    # ---- coming and going

    async def join(self, *, newcomer: bool, period: int = 1) -> None:
        """Enter the servers' clock, each tick of which is `period` mini-batches; a newcomer, where the slowest is.

        That is where the others have met, if they say at which `clock`. In gossip it is where a neighbor is.
        """
        if self.sessions.peer is not None and newcomer:
            self.clock = self.joined_at = self.given = await self.sessions.peer.join() or 0
        server = self.sessions.server
        if server is None:
            return
        joined = await server.join()
        if newcomer:
            self.stats = server.client.clock.stats
            if self.boundary.alone and not self.stats:
                return  # nobody has met yet: its own run begins, or goes on, as it is
            met = min((each["clock"] for each in self.stats), default=joined.clock * period)
            self.clock = self.joined_at = self.given = int(met)
            if self.sessions.memory is None:
                await server.pull()

    async def rejoin(self, period: int = 1) -> None:
        """Come back after an eviction: as a newcomer, whose steps so far stay counted."""
        done = self.clock - self.joined_at
        self.asking = False
        await self.join(newcomer=True, period=period)
        self.joined_at = self.clock - done

    async def leave(self) -> None:
        """Leave the servers' clock and the neighbors, so that nothing waits for this worker."""
        if self.sessions.server is not None:
            await self.sessions.server.leave()
        if self.sessions.peer is not None:
            await self.sessions.peer.leave()

    def heartbeat(self) -> None:
        """Send a heartbeat, so that a long time without a push is not taken for a failure."""
        if self.sessions.server is not None:
            self.sessions.server.heartbeat()

    @property
    def stops_waiting(self) -> bool:
        """Whether a checkpoint may cut off a wait for admission."""
        return self.boundary.waiting and self.boundary.suspend is not None

    def wait_for_admission(self) -> None:
        """Begin to wait, which is a boundary too where workers need not be at the same clock."""
        if self.boundary.waiting and self.suspends():
            raise Suspend
        self.asking = self.boundary.waiting

    # ---- how far the run is

    @property
    def progress(self) -> float:
        """How much of the run is over for this worker, from 0 to 1, by its steps or its seconds."""
        steps, seconds = self.boundary.steps, self.boundary.seconds
        if steps is None and seconds is None:
            raise UsageError("this loop does not say when it ends, so no share of it can be told: leave that out.")
        return max(self.clock / steps if steps else 0.0, self.node.now() / seconds if seconds else 0.0)

    @property
    def steps_left(self) -> float:
        """Mini-batches that this worker has yet to do; infinite where its steps do not end the run."""
        steps = self.boundary.steps
        return math.inf if steps is None else steps - self.clock

    def set_clock(self, clock: int) -> None:
        """Go on at `clock`, where all workers are; the steps between were those of others."""
        skipped, self.clock = clock - self.clock, clock
        self.joined_at += skipped
        self.given += skipped

    def give(self) -> int:
        """Number of gradients in the update that this worker sends now: those since its last update."""
        gradients, self.given = self.clock - self.given, self.clock
        return gradients

    def stamp(self, update: torch.Tensor, base: Sequence[int] | None = None) -> dict[str, Any]:
        """The fields that travel with `update`. It is `void` if it holds nothing but skipped steps."""
        return {
            "base": self.versions if base is None else base,
            "lr": self.lr if self.pushes_rates else None,
            "gradients": self.give(),
            "void": self.is_skipped(update),
        }

    # ---- checkpoints

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Everything declared: tensors by name, and plain values."""
        tensors = {"params": self.params, **{f"kept.{name}": kept for name, kept in self.kept.items()}}
        if self.buffers is not None:
            tensors["buffers"] = self.buffers
        optimizer, counts = self.optimizer.state()
        tensors |= {f"optimizer.{name}": value for name, value in optimizer.items()}
        plain = {
            "clock": self.clock,
            "entered": self.joined_at,
            "given": self.given,
            "refused": [self.refused, self.refused_in_a_row],
            "source": self.source.state(),
            "versions": self.versions,
        }
        server, group, peer = self.sessions.server, self.sessions.members, self.sessions.peer
        coded = {} if server is None else states(server.client.coders)
        if isinstance(group, CompressedGroup):
            coded, plain["rounds"] = group.state()
        tensors |= {f"coded.{name}": value for name, value in coded.items()}
        plain["optimizer"] = counts
        plain["kept"] = self.kept_plain
        plain["lr"] = self.lr
        plain["client"] = server.client.state() if server is not None else None
        plain["peer"] = peer.state() if peer is not None else None
        return {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, Ghost)}, plain

    def restore(self, tensors: Mapping[str, torch.Tensor], plain: Mapping[str, Any]) -> None:
        if not isinstance(self.params, Ghost):
            if tensors["params"].shape != self.params.shape:
                raise ValueError(f"{tensors['params'].numel()} parameters in place of {self.params.numel()}")
            self.params = tensors["params"].clone()
        self.buffers = tensors["buffers"].clone() if "buffers" in tensors else None
        self.kept_plain = copy.deepcopy(plain["kept"])
        self.kept = {name[5:]: value.clone() for name, value in tensors.items() if name.startswith("kept.")}
        own = {name[10:]: value.clone() for name, value in tensors.items() if name.startswith("optimizer.")}
        self.optimizer.restore(own, plain["optimizer"])
        self.source.restore(plain["source"])
        self.clock, self.joined_at, self.given = (int(plain[name]) for name in ("clock", "entered", "given"))
        self.refused, self.refused_in_a_row = plain.get("refused", (0, 0))
        self.lr = plain.get("lr")  # of gradients that are not pushed yet
        server, group, peer = self.sessions.server, self.sessions.members, self.sessions.peer
        if server is not None:
            server.client.restore(plain["client"])
        if peer is not None:
            peer.restore(plain["peer"])
        coded = {name[6:]: value for name, value in tensors.items() if name.startswith("coded.")}
        if isinstance(group, CompressedGroup):
            group.restore(coded, plain["rounds"])
        elif server is not None:
            restore(server.client.coders, coded)
        if plain["versions"] is not None:
            self._pulled = Pulled(self.params, list(plain["versions"]))


def _present(session: Session | None, what: str) -> Session:
    if session is None:
        raise UsageError(f"a method asked for {what}, which this run does not have: its topology is another.")
    return session
