"""A parameter server: shards that hold the model, a clock that admits, and the client that a worker uses.

Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014; the servers of Dean et
al., "Large Scale Distributed Deep Networks", NeurIPS 2012. The messages of an update that asks for order:

    worker                    shards 0..S-1                     clock
      ask ----------------------------------------------------->  may it start?
      <-------------------------------------------- version v --
      pull v ------------------> its slice at v
      push (seq, base) --------> staged, not applied
      staged (seq) -------------------------------------------->  closes its group, sooner or later
                                 <--- close (group, members) --
                                 applied in the clock's order

Where a method asks for the next step at once, `staged` and `ask` are one call, `next`; with one shard all is one call
(`ClockedShard`). The bytes go to the shards only; the clock's messages are tiny. A worker that fails between its pushes
to two shards has not called `staged`, so its update is in no group, on any shard. Updates without order (Downpour) are
applied where and when they arrive: then shards may disagree about the last updates of a worker that failed.

A shard is made of its versions (`versions`), the updates that arrive (`staging`), the step from updates to the next
version (`apply`) and named vectors for a coordinator (`vectors`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING

from dure.core.node import Address, Call, CodecWork, Ghost, Node, Reply, TensorSpec, taking
from dure.core.protocol import (
    CLOCK,
    COUNT,
    DRIVER,
    OWN,
    TEXT,
    TRUTH,
    WORKERS,
    RemoteService,
    carrying,
    listed,
    maybe,
    nullable,
    remote,
)
from dure.core.state import State
from dure.errors import WorkOver
from dure.job.optimizer import FlatOptimizer, GroupRange, OptimizerSpec
from dure.topology.fields import CLOSED, COMMAND, HAS, LEFT, LIFE, PUSHED, WORD
from dure.topology.parameter_server.apply import Rule, Updater
from dure.topology.parameter_server.staging import StagingArea
from dure.topology.parameter_server.vectors import Vectors
from dure.topology.parameter_server.versions import GENERATION, Versions

if TYPE_CHECKING:
    import torch

    from dure.codec.base import Vote
    from dure.codec.coder import Coder
    from dure.core.node import Service
    from dure.core.vectors import Ranges
    from dure.topology.parameter_server.admission import Policy
    from dure.topology.parameter_server.clock import ClockService
    from dure.topology.parameter_server.staging import Corrections


class Shard(RemoteService):
    """One server's slice of the model: a service.

    `values` is the slice at version 0 (copied). `ranges` are the ranges of the flat parameters that it holds; a
    tensor travels as one piece per range. `segments` are parameter groups in the slice's own coordinates
    (`job.optimizer.restrict`). In a timing-only run `values` is a `Ghost`: the shard moves sizes and versions, and
    computes nothing.

    `log` keeps (worker, incarnation, seq) of everything applied, for `status`. `corrections` change each gradient
    before it is applied (`topology.correction`). With a `coder`, an update is pushed as its message. With a `vote`,
    members of a group are put to the vote in place of `reduce`: `follow` gives a worker at version `has` the message of
    the vote that leads from there (`vote_results`). An update on arrival whose staleness here is above `max_delay` is
    refused: it is acknowledged, and not applied.

    `members` are `[[worker, seq], ...]` in rank order, combined in that order by `reduce`: "mean" (weighted by
    `weight`, the batch sizes) or "sum". Groups are applied in the order of their `version`, the one they make.
    A version stays until a `close` names it in `drop`. `lr` is a rate, or one per parameter group. An update is made of
    `gradients` mini-batches; the shard counts those in its values.
    A shard that has lost what it applied since a snapshot goes on from there in a new generation (`start_generation`),
    so that no version ever stands for two things.
    """

    called = "a shard"

    def __init__(
        self,
        node: Node,
        values: torch.Tensor,
        spec: OptimizerSpec,
        *,
        ranges: Ranges | None = None,
        segments: Sequence[GroupRange] = (),
        log: bool = False,
        corrections: Corrections | None = None,
        coder: Coder | None = None,
        vote: Vote | None = None,
        max_delay: int | None = None,
    ) -> None:
        self.node = node
        sizes = [values.numel()] if ranges is None else [stop - start for start, stop in ranges]
        timing_only = isinstance(values, Ghost)
        optimizer = None
        if not timing_only:
            optimizer = FlatOptimizer(spec, values.numel(), values.dtype, segments=segments, device=values.device)
        rule = Rule(optimizer, corrections, coder, vote, max_delay)
        self.versions = Versions(node, values, sizes)
        self.staging = StagingArea(self.versions, corrections, coder)
        self.updater = Updater(rule, self.versions, self.staging, values.nbytes, log=log)
        self.vectors = Vectors(self.versions, self.staging, self.updater, values.nbytes)
        self.corrections = corrections
        dtype = "float32" if timing_only else str(values.dtype).removeprefix("torch.")
        self._slice = tuple(TensorSpec(dtype, elements) for elements in sizes)
        self._pushed = self._slice if coder is None else (TensorSpec("uint8", coder.most_bytes, at_most=True),)

    # ---- calls of workers, the clock and the driver

    @remote(WORKERS, **PUSHED)
    @carrying(lambda shard: shard._pushed)
    def push(self, call: Call) -> Reply | Awaitable[Reply]:
        """The version, once the update is staged or applied; with `pull`, without order, the slice too.

        An `exponent` of e multiplies the weight. A `void` update, of zeros, makes no step by itself.
        """
        coder = self.updater.rule.coder
        return self._push_slice(call) if coder is None else self._push_message(coder, call)

    @remote(CLOCK, **CLOSED)
    def _close(self, call: Call) -> Reply | Awaitable[Reply]:
        """The version, once the group is applied."""
        return self.updater.close(call)

    @remote(
        DRIVER,
        WORKERS,
        version=maybe(nullable(COUNT)),
        counted=maybe(TRUTH),
        worker=maybe(OWN),
        incarnation=maybe(COUNT),
    )
    def pull(self, call: Call) -> Reply | Awaitable[Reply]:
        """Version and slice, once there; `counted`: and the gradients in it. With a `worker`, that one works on it."""
        return self._pull_to_work(call) if self.updater.rule.looks_back else self.versions.pull(call)

    @remote(WORKERS, version=COUNT)
    def _held(self, call: Call) -> Reply:
        """The gradients in a version."""
        return self.versions.held(call)

    @remote(WORKERS, version=nullable(COUNT), has=nullable(COUNT))
    def follow(self, call: Call) -> Reply | Awaitable[Reply]:
        """Version, rate and message of the vote that leads there, if any."""
        return self.updater.vote_results.follow(call)

    @remote(WORKERS, version=COUNT)
    def _optimizer(self, call: Call) -> Awaitable[Reply]:
        """Steps and vectors of the optimizer, if that version is the newest."""
        return self.updater.optimizer_state(call)

    @remote(WORKERS, **LIFE, seq=COUNT)
    def _withdraw(self, call: Call) -> Reply:
        """Stage an update no longer."""
        return self.staging.withdraw(call)

    @remote(CLOCK, **LEFT)
    def _leave(self, call: Call) -> Reply:
        """Stage only the updates in `keep`, of a worker that is gone."""
        return self.staging.leave(call)

    @remote(DRIVER, WORKERS)
    def _status(self, call: Call) -> Reply:
        """The counters."""
        log = self.updater.log
        return Reply(
            {
                "version": self.version % GENERATION,
                "epoch": self.version // GENERATION,
                "applied": self.applied,
                "refused": self.refused,
                "gradients": self.gradients,
                "staleness": {str(behind): count for behind, count in sorted(self.staleness.items())},
                "last": {str(worker): seq for worker, seq in sorted(self.staging.sequences.last().items())},
                "staged": len(self.staging),
                "buffers": self.versions.pool.made,
                "log": None if log is None else [list(entry) for entry in log],
            }
        )

    @remote(CLOCK, commands=listed(COMMAND))
    def order(self, call: Call) -> Awaitable[Reply]:
        """Carry out commands on named vectors; `dots`, in the order of the commands."""
        return self.vectors.order(call)

    @remote(WORKERS, **LIFE, seq=COUNT)
    @carrying(lambda shard: shard._slice)
    def _stage(self, call: Call) -> Reply:
        """Keep a slice here for a command to use."""
        return self.vectors.stage(call)

    @remote(WORKERS, name=TEXT)
    def _fetch(self, call: Call) -> Reply:
        """The vector of that name."""
        return self.vectors.fetch(call)

    # ---- what a run reads

    @property
    def version(self) -> int:
        """Groups (or, without order, updates) applied."""
        return self.versions.current.version

    @property
    def values(self) -> torch.Tensor:
        """The slice at `version`; not to be written to."""
        return self.versions.current.tensor

    @property
    def applied(self) -> int:
        """Updates applied."""
        return self.updater.applied

    @property
    def refused(self) -> int:
        """Updates refused."""
        return self.staging.refused

    @property
    def gradients(self) -> int:
        """Mini-batches in the slice at `version`."""
        return self.updater.gradients

    @property
    def staleness(self) -> Mapping[int, int]:
        """Updates applied, by their staleness."""
        return self.updater.staleness

    # ---- pushes

    async def _push_message(self, coder: Coder, call: Call) -> Reply:
        """As `_push_slice`, with a message in place of the slice. Decoding takes a turn, as all work of a shard."""
        await self.updater.in_turn(taking(CodecWork("decode", coder.numel)))
        answer = self._push_slice(self.staging.decoded(call))
        return answer if isinstance(answer, Reply) else await answer

    def _push_slice(self, call: Call) -> Reply | Awaitable[Reply]:
        if call.fields["ordered"]:
            self.staging.stage(call)
            return Reply({"version": self.versions.current.version})
        if self.staging.is_new(call.fields, call.tensors):
            return self._apply_on_arrival(call)
        return self._acknowledge_in_turn(call)

    async def _apply_on_arrival(self, call: Call) -> Reply:
        # An update in one piece is applied from where it was received, and its caller waits for that; one in several
        # pieces is made one first, and corrections change the gradient in place, which must not be the caller's memory.
        fields, corrections, turns = call.fields, self.corrections, self.updater.turns
        copied = None if len(call.tensors) == 1 and corrections is None else self.staging.copy(call.tensors)
        if corrections is not None:
            corrections.pushed(fields["worker"], fields["seq"], fields.get("base"))
        if turns.busy:
            await turns.wait(self.node)
        turns.busy = True
        try:
            gradient = call.tensors[0] if copied is None else copied.tensor
            await self.node.compute(self.updater.on_arrival(fields, gradient))
        finally:
            turns.end()
        if copied is not None:
            copied.release()
        return self._acknowledged(call)

    async def _acknowledge_in_turn(self, call: Call) -> Reply:
        """Acknowledge a repeated update behind those in the queue: it may be among them, and must be applied first."""
        turns = self.updater.turns
        if turns.busy:
            await turns.wait(self.node)
        turns.busy = True
        turns.end()
        return self._acknowledged(call)

    def _acknowledged(self, call: Call) -> Reply:
        """The answer to an applied update: the version, and the newest slice if the call asks for it."""
        current = self.versions.current
        if not call.fields.get("pull"):
            return Reply({"version": current.version})
        answer = current.lease()
        if self.corrections is not None and self.corrections.compares:
            self._remember(self.corrections, call, answer)
        return answer

    # ---- pulls, where corrections look back

    def _pull_to_work(self, call: Call) -> Reply | Awaitable[Reply]:
        """Answer a pull, and remember the version if a worker is to compute its next gradient on it."""
        answer, corrections = self.versions.pull(call), self.corrections
        if "worker" not in call.fields or corrections is None:
            return answer
        if not isinstance(answer, Reply):
            return self._remember_later(corrections, call, answer)
        self._remember(corrections, call, answer)
        return answer

    async def _remember_later(self, corrections: Corrections, call: Call, answer: Awaitable[Reply]) -> Reply:
        reply = await answer
        self._remember(corrections, call, reply)
        return reply

    def _remember(self, corrections: Corrections, call: Call, reply: Reply) -> None:
        buffer = self.versions.find(reply.fields["version"])
        if buffer is not None:
            corrections.pulled(call.fields["worker"], call.fields["incarnation"], buffer)

    # ---- checkpoints

    def state(self, keep: Sequence[int] | None = None) -> State:
        """The state that a checkpoint keeps, while no update is being applied. The tensors are no copies.

        The versions before the newest are those in `keep`, or all.
        """
        kept = self.versions.kept(keep)
        state = self.versions.state(kept) | self.staging.state() | self.updater.state()
        state |= self.vectors.state().under("vector", "vectors")
        if self.corrections is not None:
            state |= self.corrections.state(saved=(self.version, *kept))
        return state

    def restore(self, state: State) -> None:
        """Continue from `state`, on a fresh shard."""
        for part in (self.versions, self.staging, self.updater):
            part.restore(state)
        self.versions.current.gradients = self.gradients
        self.vectors.restore(state.part("vector", "vectors"))
        if self.corrections is not None:
            self.corrections.restore(state, self.versions.holding(state.tensors))

    def start_generation(self, lives: int) -> None:
        """Go on after `restore` while the workers go on too: number versions anew, and forget what workers have read.

        `lives` counts the restarts of this shard in its run.
        """
        self.versions.start_generation(lives)
        if self.corrections is not None:
            self.corrections.forget_readers()


NAME = "clocked shard"
"""The name of the service `ClockedShard` at its node."""


def clocked_at(shards: Sequence[Address], policy: Policy | None) -> Address | None:
    """The address of shard and clock as one service; None if there are several shards, or no order."""
    return Address(shards[0].node, NAME) if len(shards) == 1 and policy is not None and policy.ordered else None


def serve_clock(node: Node, clock: ClockService, shard: Service) -> None:
    """Host the clock on the first server, and the `ClockedShard` with its shard."""
    node.serve("clock", clock)
    if isinstance(shard, Shard):
        node.serve(NAME, ClockedShard(shard, clock))


class ClockedShard(RemoteService):
    """The only shard of a model and the clock beside it, as one service: a step asks both in one call.

        worker                        the server
          exchange (seq, base) ------>  staged; its group closes, sooner or later
                                        held until the worker may start its next step, on version v
          <----------- version v --  its slice at v, once applied

    Where the fields say which version the worker `has`, the reply's tensor is a shard's reply to `follow`.

    Nothing comes between an update's staging and its report to the clock. Where `ask` says that the work is over,
    `WorkOver` is raised.
    """

    called = "a clocked shard"

    def __init__(self, shard: Shard, clock: ClockService) -> None:
        self._shard = shard
        self._clock = clock
        self._now = clock.node.now

    @remote(WORKERS, **PUSHED, **WORD)
    @carrying(lambda service: service._shard.expects("push"))
    async def _push(self, call: Call) -> Reply:
        """A shard's `push` and a clock's `staged`: the version, once counted."""
        # The clock hears of the update only once the shard has it: what is refused here is in no group.
        staging = self._shard.push(call)
        reply = staging if isinstance(staging, Reply) else await staging
        call.release()  # before a wait that others end: their updates need the memory that this one came in
        self._clock.staged(call)
        return reply

    @remote(WORKERS, **LIFE, **HAS)
    async def _proceed(self, call: Call) -> Reply:
        """A clock's `ask`, with the slice at that version, and the seconds `held`."""
        fields, asked = call.fields, self._now()
        asking = self._clock.ask(call)
        admitted = (asking if isinstance(asking, Reply) else await asking).fields
        if "over" in admitted:
            raise WorkOver(f"no step is left for worker {fields['worker']}: too few workers are left to go on.")
        held = self._now() - asked
        # Admitted on a version whose `close` is in its turn at this shard: the pull waits until it is applied.
        asked_for = Call(call.caller, call.method, {**fields, "version": admitted["version"]}, ())
        pulling = self._shard.follow(asked_for) if "has" in fields else self._shard.pull(asked_for)
        pulled = pulling if isinstance(pulling, Reply) else await pulling
        return Reply({**admitted, **pulled.fields, "held": held}, pulled.tensors, pulled.release)

    @remote(WORKERS, **PUSHED, **WORD)
    @carrying(lambda service: service._shard.expects("push"))
    async def _exchange(self, call: Call) -> Reply:
        """As `proceed`, after a `push`."""
        await self._push(call)
        return await self._proceed(call)
