"""What a method sees at one worker: its replica, its data, its server or its group.

The same `Worker` runs in virtual time and on processes; it asks its `Node` for everything that takes time.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch

from dure.codec.coder import restore, states
from dure.core.finite import all_finite
from dure.core.node import EndOfWork, Ghost, Operation, Suspend, nothing
from dure.errors import CallTimeout, DivergedError, Evicted, Quarantined, Superseded, UsageError
from dure.job.gradient_source import DataSource, GradientSource, LocalOptimizer
from dure.topology.collective.agreement import Agreement, going_on
from dure.topology.collective.compressed import CompressedGroup

if TYPE_CHECKING:
    from dure.core.meter import Meter
    from dure.core.node import Group, Node, Reply
    from dure.job.gradient import Gradient
    from dure.job.optimizer import FlatOptimizer
    from dure.topology.gossip.peer import Peer
    from dure.topology.hybrid.rows import RowClient
    from dure.topology.parameter_server.batch.client import PortionClient
    from dure.topology.parameter_server.client import Pulled, ServerClient
    from dure.topology.shared_memory.segment import Access


MOST_REFUSED = 3
"""Gradients in a row that hold NaN or infinity, after which a worker is quarantined."""

log = logging.getLogger("dure")


Note = Mapping[str, float]
"""What a worker says of itself where workers meet."""


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
    they are together, since they must end at the same step: every `period` steps, or where `Worker.met` says. Not so
    where the method has each end `alone`.
    """

    steps: int | None
    seconds: float | None = None
    suspend: Callable[[Worker], bool] | None = None
    waiting: bool = False
    period: int = 1
    alone: bool = False


@dataclass(slots=True)
class Worker:
    """One worker of a run, as its method sees it.

    `params` is the flat vector of its replica's parameters, the method's to read and to write except while a
    gradient is pending. `clock` counts the mini-batches done, from `entered` on: a newcomer begins where others
    are. What must survive a restart is `params`, `clock`, the optimizer, what `keep` returns and `kept_plain` (values
    that JSON has); a local variable of the method does not.

    `lr` is the rate of the present step in place of the optimizer's, or one rate per parameter group; where there are
    `rates`, it is their value at the step's clock. It travels with updates unless the servers have a rate of their own
    (`pushes_rates`).

    `loss` is that of the last mini-batch. `met` is the clock at which all workers were last together, where that is no
    matter of the method's `period`. `heard` is what the members of the last group said with their updates (`push`).
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
    server: ServerClient | None = None
    group: Group | None = None
    peer: Peer | None = None
    shared: Access | None = None
    work_queue: PortionClient | None = None
    rows: RowClient | None = None
    total_weight: float = 1.0
    buffers: torch.Tensor | None = None
    merge_buffers: Callable[[Sequence[torch.Tensor]], torch.Tensor] = _first
    on_step: Callable[[Worker, Gradient], None] | None = None
    on_abort: Callable[[Worker], None] | None = None
    on_boundary: Callable[[Worker], None] | None = None
    clock: int = 0
    entered: int = 0
    given: int = 0
    lr: float | Sequence[float] | None = None
    rates: Callable[[int], float | Sequence[float]] | None = None
    pushes_rates: bool = True
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    kept_plain: dict[str, Any] = field(default_factory=dict)
    loss: float = 0.0
    met: int | None = None
    heard: list[Note] = field(default_factory=list)
    pausing: bool = False
    refused: int = 0
    refused_in_a_row: int = 0
    faulty: Sequence[int] = ()
    _spare: torch.Tensor | None = None
    _lent: tuple[Pulled, int] | None = None
    _admitted: int | None = None
    _pulled: Pulled | None = None
    _begun: bool = False
    _watch: Operation[Reply] | None = None
    _beside: dict[str, Operation[Any]] = field(default_factory=dict)
    asking: bool = False

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
        if self.source.can_stop and await self._is_aborted(computing):
            self.meter.add("compute", started, self.node.now(), "aborted")
            self.clock += 1
            self.given += 1
            if self.on_abort is not None:
                self.on_abort(self)
            return None
        gradient = await computing
        self.meter.add("compute", started, self.node.now())
        return self._done(gradient)

    async def _is_aborted(self, computing: Operation[Gradient]) -> bool:
        """Wait for `computing`, or for word that it is in vain, and cancel it."""
        assert self.server is not None
        while not computing.done:
            watch = self._watch = self._watch or self.server.watch()
            await self.node.first(computing, watch)
            if watch.done and not computing.done:
                self._watch = None
                if _version_in(watch) in (self._admitted, None):
                    computing.cancel()
                    watch.result()  # raises `Evicted` if that is why
                    return True
        return False

    async def mean_gradient(self) -> torch.Tensor:
        """As `gradient`, averaged over the group's workers, weighted by their batch sizes."""
        await self._stop_at_boundary()
        if self.rows is not None:
            return await self._mean_beside_rows(self.rows)
        if self.refused_in_a_row and not self.encodes:
            return self._done(await self._examined_mean(), shared=True)
        return self._done(await self.source.mean_gradient(self), shared=True)

    async def _examined_mean(self) -> Gradient:
        """As the source's mean gradient, after a step that was refused: find the ranks whose parts are not finite."""
        assert self.group is not None
        gradient = (await self.source.gradient(self)).scaled(self.share)
        sound = isinstance(gradient.values, Ghost) or all_finite(gradient.values)
        said = await self.group.all_gather(torch.tensor([float(not sound)], dtype=torch.float64))
        gradient.faulty = [rank for rank, each in zip(self.group.ranks, said, strict=True) if each.item()]
        return gradient.with_values(await self.group.all_reduce(gradient.values))

    async def _mean_beside_rows(self, rows: RowClient) -> torch.Tensor:
        """As `mean_gradient`, of what servers do not hold; they get their part, and make their step by it."""
        node, version, started = self.node, self.clock, self.node.now()
        work = cast(DataSource, self.source).next(self)
        assert work.inputs is not None
        await rows.read(work.inputs, self.params, version)
        read = node.now()
        self.meter.add("communicate", started, read, "read")
        if rows.plan.ring:
            assert self.group is not None
            gradient = await self.group.mean_gradient(work, self.share)
        else:
            gradient = (await node.compute(work)).scaled(self.share)
            self.meter.add("compute", read, node.now())
        self._check(gradient)
        self._check_parts(gradient)
        started = node.now()
        await rows.push(gradient.apart, version, self.lr)
        self.meter.add("communicate", started, node.now(), "push")
        gradient.checked = True
        return self._done(gradient)

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
            if self.peer is not None:
                await self.peer.settled()
            while self._beside:
                await self._beside.popitem()[1]
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
        if self.group is None or self.boundary.alone:
            return late
        if self.clock % self.boundary.period if self.met is None else self.clock != self.met:
            return False
        agreement = Agreement(self.group, torch.device("cpu") if isinstance(self.params, Ghost) else self.params.device)
        return not going_on(await agreement.start("end" if late else "step"))

    def _done(self, gradient: Gradient, *, shared: bool = False) -> torch.Tensor:
        """The values of a gradient whose step counts, `shared` by the group or this worker's own."""
        self._check(gradient)
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

    def _check_parts(self, gradient: Gradient) -> None:
        """Refuse a gradient of which servers get a part: what the ranks have summed cannot be skipped alone."""
        apart = () if gradient.apart is None else (gradient.apart.whole, *(rows for _, rows in gradient.apart.rows))
        if not all(all_finite(part.reshape(-1)) for part in (gradient.values, *apart)):
            raise Quarantined(
                f"the gradient of worker {self.rank} in step {self.clock} holds NaN or infinity, and hybrid skips no "
                f"step. Try a learning rate below {self.optimizer.spec.lr:g}, and look at the data of this step."
            )

    def _check(self, gradient: Gradient) -> None:
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
        if isinstance(self.params, Ghost) or self._is_skipped(gradient):
            return
        self.optimizer.apply(self.params, gradient, self.params, lr=self.lr)

    def _is_skipped(self, update: torch.Tensor) -> bool:
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

    def keep(self, name: str) -> torch.Tensor:
        """Declared state: a tensor like `params`, zeros at first, that survives a restart."""
        if name not in self.kept:
            self.kept[name] = self.params.clone().zero_()
        return self.kept[name]

    def delivering(self, what: str) -> torch.Tensor:
        """What a method that `delivers` this has for its result here: kept under that name, or the parameters."""
        values = self.kept.get(what, self.params)
        return values if self.shared is None else values.clone()  # what others write to cannot be sent

    # ---- coming and going

    async def join(self, *, newcomer: bool, period: int = 1) -> None:
        """Enter the servers' clock, each tick of which is `period` mini-batches; a newcomer, where the slowest is.

        That is where the others have met, if they say at which `clock`. In gossip it is where a neighbor is.
        """
        if self.peer is not None and newcomer:
            self.clock = self.entered = self.given = await self.peer.join() or 0
        if self.server is None:
            return
        joined = await self.server.join()
        if newcomer:
            self.heard = self.server.heard
            if self.boundary.alone and not self.heard:
                return  # nobody has met yet: its own run begins, or goes on, as it is
            met = min((note["clock"] for note in self.heard), default=joined.clock * period)
            self.clock = self.entered = self.given = int(met)
            if self.shared is None:
                self.adopt(await self.pull())

    async def rejoin(self, period: int = 1) -> None:
        """Come back after an eviction: as a newcomer, whose steps so far stay counted."""
        done = self.clock - self.entered
        self.asking = False
        self._admitted = self._watch = None
        self._beside.clear()
        await self.join(newcomer=True, period=period)
        self.entered = self.clock - done

    async def leave(self) -> None:
        """Have nobody wait for this worker any more."""
        if self.server is not None:
            await self.server.leave()
        if self.peer is not None:
            await self.peer.leave()

    # ---- over a server

    async def admission(self) -> int:
        """Wait until the clock lets this worker start its next step; the version that it starts on."""
        assert self.server is not None
        self._begin_to_wait()
        started = self.node.now()
        try:
            version = await self.server.ask()
        finally:
            self.asking = False
        self._admitted = version if self.server.servers.ordered else None
        self.heard = self.server.heard
        self.meter.add("wait", started, self.node.now())
        return version

    def _begin_to_wait(self) -> None:
        """Waiting for admission is a boundary too, where workers need not be at the same clock."""
        boundary = self.boundary
        if boundary.waiting and self.suspends():
            raise Suspend
        self.asking = boundary.waiting

    async def proceed(self, *, to_write: bool = False) -> int:
        """Wait until the clock lets this worker start its next step, and go on from the version that it starts on.

        As `admission` and then `refresh` or, for a method that goes on `to_write` to its parameters, `adopt(await
        pull())`; in one call where one server has the clock too.
        """
        assert self.server is not None
        if self.server.servers.clocked is None:
            version = await self.admission()
            if to_write:
                self.adopt(await self.pull())
            else:
                await self.refresh()
            return version
        self._begin_to_wait()
        started = self.node.now()
        room = self._room() if to_write else self._room_unless_lent()
        try:
            pulled = await self.server.proceed(room)
        finally:
            self.asking = False
        admitted = started + self.server.held
        self.meter.add("wait", started, admitted)
        self.meter.add("communicate", admitted, self.node.now(), "pull")
        return self._go_on_from(pulled)

    def _go_on_from(self, pulled: Pulled) -> int:
        """Adopt what an admission has brought; its version."""
        assert self.server is not None
        self.heard = self.server.heard
        version = pulled.versions[0]  # all shards have the one that was asked for
        self._admitted = version
        self.adopt(pulled)
        return version

    @property
    def slowest(self) -> int:
        """The slowest clock at the last admission: all updates of earlier clocks are in the version that it named."""
        assert self.server is not None
        return self.server.slowest

    @property
    def progress(self) -> float:
        """How much of the run is over for this worker, from 0 to 1, by its steps or its seconds."""
        steps, seconds = self.boundary.steps, self.boundary.seconds
        if steps is None and seconds is None:
            raise UsageError("this loop does not say when it ends, so no share of it can be told: leave that out.")
        return max(self.clock / steps if steps else 0.0, self.node.now() / seconds if seconds else 0.0)

    @property
    def versions(self) -> list[int] | None:
        """The version of each shard that was pulled last; None before the first pull."""
        return None if self._pulled is None else self._pulled.versions

    @property
    def steps_left(self) -> float:
        """Mini-batches that this worker has yet to do; infinite where its steps do not end the run."""
        steps = self.boundary.steps
        return math.inf if steps is None else steps - self.clock

    async def announce(self) -> None:
        """Tell the clock that this worker has done what the others wait for."""
        assert self.server is not None
        await self.server.offer()

    def follow(self, clock: int) -> None:
        """Go on at `clock`, where everybody is; the steps between were the others'."""
        skipped, self.clock = clock - self.clock, clock
        self.entered += skipped
        self.given += skipped

    def give(self) -> int:
        """Number of gradients in the update that this worker sends now: those since its last update."""
        gradients, self.given = self.clock - self.given, self.clock
        return gradients

    async def pull(self) -> Pulled:
        """The server's parameters: the version of the last admission, or the newest where none is asked for."""
        assert self.server is not None
        started = self.node.now()
        pulled = await self._pull(self.server)
        self.meter.add("communicate", started, self.node.now(), "pull")
        return pulled

    async def _pull(self, server: ServerClient) -> Pulled:
        return await server.pull(self._room(), version=self._admitted, to_work=True)

    def _room(self) -> torch.Tensor:
        """Where parameters can be received while the present ones are still in use."""
        room, self._spare = self._spare, None
        return self.params.clone() if room is None else room

    def _room_unless_lent(self) -> torch.Tensor | None:
        """Where parameters can be received; None where the server lends its own."""
        assert self.server is not None
        return None if self.server.lends else self._room()

    async def refresh(self) -> None:
        """Go on from what the server has, as `adopt(await pull())` does, for a method that never writes to `params`.

        They may be the server's own, lent without being copied.
        """
        assert self.server is not None
        if not self.server.lends:
            self.adopt(await self.pull())
            return
        started = self.node.now()
        borrowed = await self.server.borrow(self._admitted, to_work=True)
        self.meter.add("communicate", started, self.node.now(), "pull")
        self.adopt(borrowed)

    async def exchange(self, update: torch.Tensor) -> None:
        """Push `update`, and go on from what the server has once this worker may start its next step.

        As `push` and then `proceed` or, where no order is asked for, `refresh`, in fewer calls
        (`ServerClient.exchange`); for a method that never writes to `params`.
        """
        assert self.server is not None
        servers, boundary = self.server.servers, self.boundary
        stops_waiting = boundary.waiting and boundary.suspend is not None  # which a push must not be cut off by
        if servers.ordered and stops_waiting:
            await self.push(update)
            await self.proceed()
            return
        started = self.node.now()
        room = self._room_unless_lent()
        pulled = await self.server.exchange(update, room, weight=self.source.batch_size, **self._stamp(update))
        self._meter_exchange(started)
        if servers.ordered:
            self._go_on_from(pulled)
        else:
            self.adopt(pulled)

    def _meter_exchange(self, started: float) -> None:
        """As long there as back: how long the server `held` this worker is all that is known."""
        assert self.server is not None
        ended, held = self.node.now(), self.server.held
        there = started + (ended - started - held) / 2
        self.meter.add("communicate", started, there, "push")
        self.meter.add("wait", there, there + held)
        self.meter.add("communicate", there + held, ended, "pull")

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

    def _give_back(self, borrowed: Pulled, writes: int) -> None:
        self._lent = None
        if _writes(borrowed.values) != writes:
            raise UsageError(
                f"a method wrote to the parameters that worker {self.rank} had from refresh(), which may be the "
                "server's own. Write worker.adopt(await worker.pull()) in its place."
            )
        borrowed.release()

    def ask_held(self) -> list[Operation[Reply]]:
        """Ask the servers how many gradients are in the version that this worker works on, if it has pulled any."""
        assert self.server is not None
        return [] if self._pulled is None else self.server.gradients_at(self._pulled.versions)

    def look_at(self, pulled: Pulled) -> torch.Tensor:
        """What was pulled, the method's to write to until it pulls again, in place of adopting it."""
        self._pulled, self._spare = pulled, pulled.values
        return pulled.values

    async def push(
        self,
        update: torch.Tensor,
        *,
        weight: float | None = None,
        exponent: float = 0.0,
        note: Note | None = None,
        base: Sequence[int] | None = None,
    ) -> bool:
        """Give `update` to the server; returns once it is acknowledged. False if it comes too late to count.

        `weight`, times e to the `exponent`, is its share in a weighted mean, the batch size if left out. A `note` is
        told to all who are admitted on what the group of this update makes (`heard`); it says at which `clock` this
        worker is. `base` are the versions that `update` was computed on, `versions` if left out.
        """
        assert self.server is not None
        started = self.node.now()
        share = self.source.batch_size if weight is None else weight
        stamp = self._stamp(update, base)
        try:
            await self.server.push(update, weight=share, exponent=exponent, note=note, **stamp)
            return True
        except Superseded:
            return False
        finally:
            self.meter.add("communicate", started, self.node.now(), "push")

    def _stamp(self, update: torch.Tensor, base: Sequence[int] | None = None) -> dict[str, Any]:
        """The fields that travel with `update`. It is `void` if it holds nothing but skipped steps."""
        return {
            "base": self.versions if base is None else base,
            "lr": self.lr if self.pushes_rates else None,
            "gradients": self.give(),
            "void": self._is_skipped(update),
        }

    async def pull_async(self) -> None:
        """Start a pull and go on; `finished("pull")` has it."""
        assert self.server is not None
        await self._begin("pull", self._pull(self.server))

    async def push_beside(self, update: torch.Tensor) -> None:
        """As `push`, but go on at once. One is on its way at a time; `update` is lent until the next."""
        assert self.server is not None
        await self.finished("push")
        work = self.server.push(update, weight=self.source.batch_size, **self._stamp(update))
        await self._begin("push", work)

    async def finished(self, what: str) -> Any:
        """Wait for the "pull" or "push" that goes on beside; its value, or None if there is none."""
        operation = self._beside.pop(what, None)
        if operation is None:
            return None
        started = self.node.now()
        value = await operation
        self.meter.add("communicate", started, self.node.now(), what)
        return value

    async def _begin(self, what: str, work: Coroutine[Operation[Any], None, Any]) -> None:
        """Have `work` go on beside the method, until a checkpoint at the latest."""
        task = self._beside[what] = self.node.spawn(work, f"{what} of {self.node.name}")
        task.when_done(nothing)  # its error is raised in who waits for it
        await self.node.sleep(0.0)  # it gets its turn before a computation holds up the node

    def heartbeat(self) -> None:
        """Let nobody who waits take this worker for dead, though it works for long without a push."""
        if self.server is not None:
            self.server.heartbeat()

    # ---- over shared memory

    async def read(self, *, alone: bool = False) -> None:
        """Go on from the shared parameters: where they lie, changing, in a real run; as they are now in virtual time.

        `alone`: a copy that nobody has half written, taken while nobody else reads or writes alone.
        """
        from dure.topology.parameter_server.client import Pulled

        assert self.shared is not None
        started = self.node.now()
        if self._spare is None:
            self._spare = self.params.clone()
        values, version = await self.shared.read(self._spare, alone=alone)
        if values is self._spare:
            self._spare = None if self.params is self.shared.segment.values else self.params
        self.params = values
        self._pulled = Pulled(values, [version])
        self.meter.add("communicate", started, self.node.now(), "read")

    async def add(self, update: torch.Tensor, *, alone: bool = False) -> None:
        """One step of the shared parameters against `update`, by the local optimizer's rule, its state our own."""
        assert self.shared is not None
        assert self._pulled is not None
        started = self.node.now()
        spec = self.optimizer.spec
        lr = spec.lr if self.lr is None else self.lr
        gradients = self.give()
        if self._is_skipped(update):
            return
        more: dict[str, Any] = {"seen": self._pulled.versions[0], "alone": alone, "gradients": gradients}
        if isinstance(lr, (int, float)) and spec.name == "sgd" and not (spec.momentum or spec.weight_decay):
            await self.shared.add(update, -lr, **more)
        else:
            await self.shared.add(self._increment(update, lr), 1.0, **more)
        self.meter.add("communicate", started, self.node.now(), "add")

    def _increment(self, update: torch.Tensor, lr: float | Sequence[float]) -> torch.Tensor:
        """What the local optimizer adds to the parameters."""
        if isinstance(update, Ghost):
            return update
        return cast("FlatOptimizer", self.optimizer).increment(self.params, update.to_dense(), lr)

    async def contribute(self, total: torch.Tensor, weight: float) -> None:
        """Give a weighted sum to the mean over all workers that the end of this phase makes."""
        assert self.shared is not None
        assert self.server is not None
        started = self.node.now()
        await self.shared.contribute(total, weight, incarnation=self.server.incarnation)
        self.meter.add("communicate", started, self.node.now(), "contribute")

    async def arrive(self) -> None:
        """Tell the clock that this worker's part of a phase is done; it was no update of the server's."""
        assert self.server is not None
        await self.server.arrive({"clock": float(self.clock)})

    # ---- over collectives

    @property
    def share(self) -> float:
        """This worker's part of the group's batch."""
        return self.source.batch_size / self.total_weight

    async def mean_params(self) -> None:
        """Replace `params` by their mean over the group, weighted by batch size; merge the replica's buffers."""
        started = self.node.now()
        self.params.copy_(await self.mean(self.params))
        await self.mean_buffers()
        self.meter.add("communicate", started, self.node.now(), "all_reduce")

    @property
    def encodes(self) -> bool:
        """Whether a codec encodes what travels over this worker's group."""
        return isinstance(self.group, CompressedGroup)

    def mean(
        self, values: torch.Tensor, share: float | None = None, *, since: torch.Tensor | None = None
    ) -> Operation[torch.Tensor]:
        """Start on the mean of `values` over the group, weighted by batch size or `share`; `values` stay as they are.

        They may be looked at, and changed, while others are still on their way. Where a codec `encodes`, it does how
        they have changed `since`, which all have alike; without that, nothing.
        """
        assert self.group is not None
        share = self.share if share is None else share
        if since is not None and isinstance(self.group, CompressedGroup):
            return self.group.mean_change(values, since, share)
        return self.group.all_reduce(values * share)

    async def mean_buffers(self) -> None:
        """Merge the replicas' buffers, if the model has any."""
        if self.buffers is not None:
            assert self.group is not None
            self.buffers = self.merge_buffers(await self.group.all_gather(self.buffers))

    async def tell(self, note: Note) -> None:
        """Let every member of the group hear `note`; then `heard` has everybody's, in rank order."""
        assert self.group is not None
        started = self.node.now()
        device = torch.device("cpu") if isinstance(self.params, Ghost) else self.params.device
        said = torch.tensor(list(note.values()), dtype=torch.float64, device=device)
        rows = await self.group.all_gather(said)
        self.heard = [dict(zip(note, row.tolist(), strict=True)) for row in rows]
        self.meter.add("wait", started, self.node.now())

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
            "entered": self.entered,
            "given": self.given,
            "refused": [self.refused, self.refused_in_a_row],
            "source": self.source.state(),
            "versions": self.versions,
        }
        coded = {} if self.server is None else states(self.server.coders)
        if isinstance(self.group, CompressedGroup):
            coded, plain["rounds"] = self.group.state()
        tensors |= {f"coded.{name}": value for name, value in coded.items()}
        plain["optimizer"] = counts
        plain["kept"] = self.kept_plain
        plain["lr"] = self.lr
        plain["client"] = self.server.state() if self.server is not None else None
        plain["peer"] = self.peer.state() if self.peer is not None else None
        return {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, Ghost)}, plain

    def restore(self, tensors: Mapping[str, torch.Tensor], plain: Mapping[str, Any]) -> None:
        from dure.topology.parameter_server.client import Pulled

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
        self.clock, self.entered, self.given = (int(plain[name]) for name in ("clock", "entered", "given"))
        self.refused, self.refused_in_a_row = plain.get("refused", (0, 0))
        self.lr = plain.get("lr")  # of gradients that are not pushed yet
        if self.server is not None:
            self.server.restore(plain["client"])
        if self.peer is not None:
            self.peer.restore(plain["peer"])
        coded = {name[6:]: value for name, value in tensors.items() if name.startswith("coded.")}
        if isinstance(self.group, CompressedGroup):
            self.group.restore(coded, plain["rounds"])
        elif self.server is not None:
            restore(self.server.coders, coded)
        if plain["versions"] is not None:
            self._pulled = Pulled(self.params, list(plain["versions"]))


def _version_in(watch: Operation[Reply]) -> int | None:
    """What a watch that has ended says is over; None for everything, -1 for nothing."""
    try:
        version: int = watch.result().fields["version"]
    except CallTimeout:
        return -1
    except Evicted:
        return None
    return version
