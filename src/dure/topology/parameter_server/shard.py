"""A parameter server: shards that hold the model, a clock that admits, and the client that a worker uses.

Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014; the servers of Dean et
al., "Large Scale Distributed Deep Networks", NeurIPS 2012. What goes where, for an update that asks for order:

    worker                    shards 0..S-1                     clock
      ask ----------------------------------------------------->  may it start?
      <-------------------------------------------- version v --
      pull v ------------------> its slice at v
      push (seq, base) --------> staged, not applied
      staged (seq) -------------------------------------------->  closes its group, sooner or later
                                 <--- close (group, members) --
                                 applied in the clock's order

Where a method asks for the next step at once, `staged` and `ask` are one call, `next`; with one shard all is one call
(`clocked_shard`). The bytes go to the shards only; the clock's messages are tiny. A worker that dies between two shards
has never said `staged`, so its update is in no group, on any shard. Updates without order (Downpour) are applied where
and when they arrive: then shards may disagree about the last ones of a worker that died.

An update is known by (worker, incarnation, seq): sent again it is acknowledged again and not applied again. One that
holds NaN or infinity, or is damaged, is refused; after three such in a row its sender is heard again only when it has
joined again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from dure.codec.exchange import tallying
from dure.core.node import Apply, Call, CodecWork, Ghost, Node, Operation, Reply, TensorSpec, nothing, taking
from dure.core.protocol import CLOCK, COUNT, DRIVER, OWN, TEXT, TRUTH, WORKERS, Method, listed, maybe, nullable
from dure.core.ranges import Ranges
from dure.core.sequence import SequenceTracker
from dure.errors import DamagedMessage, Evicted, Refused
from dure.job.optimizer import FlatOptimizer, GroupRange, OptimizerSpec
from dure.topology.fields import CLOSED, COMMAND, LEFT, LIFE, PUSHED
from dure.topology.parameter_server.batch.vectors import Vectors
from dure.topology.parameter_server.buffers import Buffer, Pool
from dure.topology.parameter_server.client import Joined, ServerClient, Servers
from dure.topology.parameter_server.clock import ClockService
from dure.topology.parameter_server.corrections import Corrections, Member
from dure.topology.parameter_server.verdicts import Verdict, Verdicts, optimizer_state
from dure.topology.replica import Pulled

if TYPE_CHECKING:
    from dure.codec.base import Vote
    from dure.codec.coder import Coder

__all__ = ["ClockService", "Joined", "Pulled", "ServerClient", "Servers", "Shard"]


GENERATION = 1 << 40
"""Versions of one life of a shard that applies on arrival; a version is its epoch times this, plus a count."""


MOST_REFUSED = 3
"""Updates of one life of a worker that are refused in a row before it must join again."""


class _Staged(NamedTuple):
    buffer: Buffer
    weight: float
    base: int | None
    lr: float | Sequence[float] | None
    incarnation: int
    exponent: float
    gradients: int
    void: bool = False


class Shard:
    """One server's slice of the model: a service.

    `values` is the slice at version 0 (copied). `ranges` are the ranges of the flat parameters that it holds; a
    tensor travels as one piece per range. `segments` are parameter groups in the slice's own coordinates
    (`optim.restrict`). `timing_only` (then `values` is a `Ghost`) moves sizes and versions and computes nothing.
    `log` keeps (worker, incarnation, seq) of everything applied, for `status`. `corrections` are what remedies do to
    each gradient before it counts (`corrections`); None where there are none. What is pushed is a message for `coder`,
    and a group's members are put to the `vote` in place of `reduce` where there is one: it stays with the shard. To a
    worker at version `has`, `follow` gives the message of the vote that leads from there (`verdicts`).

    | method   | fields                                                  | tensors | reply                         |
    |----------|---------------------------------------------------------|---------|-------------------------------|
    | `push`   | worker, incarnation, seq, base, weight, ordered,        | slice   | version; once staged or applied |
    |          | gradients, (lr),                                        |         |                               |
    |          | (exponent: of e, which multiplies the weight), pull: in |         |                               |
    |          | the same call, if not ordered; void: zeros that make no |         | and slice                     |
    |          | step by themselves                                      |         |                               |
    | `close`  | version, group, members, drop, reduce                   |         | version; once applied         |
    | `pull`   | (version), (worker, incarnation: it works on that),     |         | version and slice; once there |
    |          | (counted)                                               |         | (and gradients)               |
    | `held`   | version                                                 |         | gradients in that version     |
    | `follow` | version, has                                            |         | version, lr and message, if any |
    | `optimizer` | version                                              |         | steps and vectors, if newest  |
    | `withdraw` | worker, incarnation, seq                              |         | once no longer staged         |
    | `leave`  | worker, incarnation, keep                               |         | once only `keep` is staged    |
    | `status` |                                                         |         | counters                      |
    | `order`, `stage`, `fetch` | on its named vectors (`vectors.Vectors`) |       |                               |

    `members` are `[[worker, seq], ...]` in rank order, combined in that order by `reduce`: "mean" (weighted by
    `weight`, the batch sizes) or "sum". Groups are applied in the order of their `version`, the one they make.
    A version stays until a `close` names it in `drop`. `lr` is a rate, or one per parameter group. An update is made of
    `gradients` mini-batches; the shard counts those in its values.
    A shard that has lost what it applied since a snapshot goes on from there in a new generation (`start_generation`),
    so that no version ever stands for two things.
    """

    def __init__(
        self,
        node: Node,
        values: torch.Tensor,
        spec: OptimizerSpec,
        *,
        ranges: Ranges | None = None,
        segments: Sequence[GroupRange] = (),
        timing_only: bool = False,
        log: bool = False,
        corrections: Corrections | None = None,
        coder: Coder | None = None,
        vote: Vote | None = None,
    ) -> None:
        self.node = node
        self.timing_only = timing_only
        sizes = [values.numel()] if ranges is None else [stop - start for start, stop in ranges]
        self.pool = Pool(node, values, sizes)
        self.current = self.pool.take()
        self.optimizer: FlatOptimizer | None = None
        dtype = "float32" if timing_only else str(values.dtype).removeprefix("torch.")
        if not timing_only:
            self.current.tensor.copy_(values)
            self.optimizer = FlatOptimizer(spec, values.numel(), values.dtype, segments=segments)
        self.current.publish(0)
        self.corrections = corrections
        self.ledger = SequenceTracker()
        self.applied = 0
        self.refused = 0
        self.gradients = 0
        self.staleness: dict[int, int] = {}
        self.log: list[tuple[int, int, int]] | None = [] if log else None
        self._coder = coder
        self._vote = vote
        self._verdicts = Verdicts()
        self._specs = tuple(TensorSpec(dtype, elements) for elements in sizes)
        self._kept: dict[int, Buffer] = {}
        self._staged: dict[tuple[int, int], _Staged] = {}
        self._awaited: dict[int, list[Operation[Reply]]] = {}
        self._refused_in_a_row: dict[int, tuple[int, int]] = {}  # of each worker: in which life, and how many
        self._closing = 0
        self._returned = 0
        self._busy = False
        self._queue: deque[Operation[None]] = deque()
        looks_back = corrections is not None and corrections.compares
        self._apply_one = Apply(nothing, values.nbytes * (2 if looks_back else 1))
        self.methods = self._methods(coder, looks_back=looks_back)
        self.vectors = Vectors(self, values.nbytes)
        self.methods |= self.vectors.methods

    def _methods(
        self, coder: Coder | None, *, looks_back: bool
    ) -> dict[str, Callable[[Call], Reply | Awaitable[Reply]]]:
        """The handlers of the table above, by the name of the method."""
        return {
            "push": self._take if coder is None else partial(self._push_message, coder),
            "close": self._close,
            "pull": self._pull_to_work if looks_back else self._pull,
            "held": self._held,
            "follow": self._follow,
            "optimizer": self._optimizer_state,
            "withdraw": self._withdraw,
            "leave": self._leave,
            "status": self._status,
        }

    @property
    def version(self) -> int:
        """Groups (or, without order, updates) applied."""
        return self.current.version

    @property
    def values(self) -> torch.Tensor:
        """The slice at `version`; not to be written to."""
        return self.current.tensor

    @property
    def num_staged(self) -> int:
        """Updates that wait for their group to close."""
        return len(self._staged)

    protocol: ClassVar[Mapping[str, Method]] = {
        "push": Method(WORKERS, PUSHED),
        "close": Method(CLOCK, CLOSED),
        "pull": Method(
            (*DRIVER, *WORKERS),
            {
                "version": maybe(nullable(COUNT)),
                "counted": maybe(TRUTH),
                "worker": maybe(OWN),
                "incarnation": maybe(COUNT),
            },
        ),
        "held": Method(WORKERS, {"version": COUNT}),
        "follow": Method(WORKERS, {"version": nullable(COUNT), "has": nullable(COUNT)}),
        "optimizer": Method(WORKERS, {"version": COUNT}),
        "withdraw": Method(WORKERS, {**LIFE, "seq": COUNT}),
        "leave": Method(CLOCK, LEFT),
        "status": Method((*DRIVER, *WORKERS)),
        "order": Method(CLOCK, {"commands": listed(COMMAND)}),
        "stage": Method(WORKERS, {**LIFE, "seq": COUNT}),
        "fetch": Method(WORKERS, {"name": TEXT}),
    }

    def handle(self, call: Call) -> Reply | Awaitable[Reply]:
        method = self.methods.get(call.method)
        if method is None:
            raise Refused(f'a shard has no method "{call.method}"; it has {", ".join(self.methods)}.')
        return method(call)

    def expects(self, method: str) -> Sequence[TensorSpec]:
        if method == "push" and self._coder is not None:
            return (TensorSpec("uint8", self._coder.most_bytes, at_most=True),)
        return self._specs if method in ("push", "stage") else ()

    # ---- updates come in

    async def _push_message(self, coder: Coder, call: Call) -> Reply:
        """As `_take`, of what is decoded first: in turn, as all that keeps a shard busy."""
        await self.in_turn(taking(CodecWork("decode", coder.numel)))
        answer = self._take(self._decoded(coder, call))
        return answer if isinstance(answer, Reply) else await answer

    def _take(self, call: Call) -> Reply | Awaitable[Reply]:
        fields = call.fields
        if fields["ordered"]:
            return self._stage(call)
        if self._is_new(call, call.tensors):
            return self._apply_on_arrival(call)
        return self._acknowledge_in_turn(call)

    def _decoded(self, coder: Coder, call: Call) -> Call:
        """`call` with the update that its message stands for. Raises `Refused` for a damaged one."""
        values = torch.empty_like(self.values)
        try:
            coder.decode(call.tensors[0], values)
        except DamagedMessage as error:
            self._count_refused(call.fields)
            raise Refused(
                f"update {call.fields['seq']} of worker {call.fields['worker']} is damaged: {error}"
            ) from error
        return Call(call.caller, call.method, call.fields, torch.split(values, [spec.numel for spec in self._specs]))

    def _is_new(self, call: Call, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether an update has not been here before. Raises `Refused` for one that must not count."""
        fields = call.fields
        worker, seq = fields["worker"], fields["seq"]
        try:
            self._check(worker, seq, fields["weight"], tensors, fields.get("exponent", 0.0))
            new = self.ledger.first_time(worker, fields["incarnation"], seq)
        except Evicted:
            self.refused += 1
            raise
        except Refused:
            self._count_refused(fields)
            raise
        if self._refused_in_a_row:
            self._refused_in_a_row.pop(worker, None)
        return new

    def _count_refused(self, fields: Mapping[str, Any]) -> None:
        """Shut out who has sent nothing but rubbish lately, until it joins again."""
        self.refused += 1
        worker, incarnation = fields["worker"], fields["incarnation"]
        life, before = self._refused_in_a_row.get(worker, (incarnation, 0))
        in_a_row = before + 1 if life == incarnation else 1
        self._refused_in_a_row[worker] = incarnation, in_a_row
        if in_a_row == MOST_REFUSED:
            del self._refused_in_a_row[worker]
            self.ledger.fence(worker, incarnation + 1)

    def _stage(self, call: Call) -> Reply:
        """Keep an update until its group closes. It is checked where it has just been copied to: in the cache."""
        fields = call.fields
        worker, seq, base = fields["worker"], fields["seq"], fields.get("base")
        buffer = self._copy(call.tensors)
        stays = False
        try:
            stays = self._is_new(call, (buffer.tensor,))
        finally:
            if not stays:
                buffer.release()
        if not stays:
            return Reply({"version": self.version})
        exponent = fields.get("exponent", 0.0)
        self._staged[worker, seq] = _Staged(
            buffer,
            fields["weight"],
            base,
            fields.get("lr"),
            fields["incarnation"],
            exponent,
            fields.get("gradients", 1),
            bool(fields.get("void")),
        )
        if self.corrections is not None:
            self.corrections.pushed(worker, seq, base)
        return Reply({"version": self.version})

    def _check(
        self, worker: int, seq: int, weight: float, tensors: Sequence[torch.Tensor], exponent: float = 0.0
    ) -> None:
        """Refuse what would spoil the model."""
        if not (0 < weight < math.inf and math.isfinite(exponent)):
            times = f" times e to the {exponent}" if exponent else ""
            raise Refused(f"update {seq} of worker {worker} has weight {weight}{times}; a weight is a positive number.")
        if not (self.timing_only or all(map(_is_finite, tensors))):
            raise Refused(f"update {seq} of worker {worker} holds NaN or infinity: its training diverged.")

    def _copy(self, tensors: Sequence[torch.Tensor]) -> Buffer:
        buffer = self.pool.take()
        if not self.timing_only:
            for piece, tensor in zip(buffer.pieces, tensors, strict=True):
                piece.copy_(tensor)
        return buffer

    async def _acknowledge_in_turn(self, call: Call) -> Reply:
        """A repeated update may still stand in the queue; acknowledged means applied."""
        if self._busy:
            await self._turn()
        self._busy = True
        self._next()
        return self._acknowledged(call)

    def _acknowledged(self, call: Call) -> Reply:
        """The answer to an update that has been applied, with the slice as it is now if that was asked for."""
        if not call.fields.get("pull"):
            return Reply({"version": self.version})
        answer = self.current.lease()
        if self.corrections is not None and self.corrections.compares:
            self._remember(call, answer)
        return answer

    async def _apply_on_arrival(self, call: Call) -> Reply:
        fields, corrections = call.fields, self.corrections
        copied = None if len(call.tensors) == 1 and corrections is None else self._copy(call.tensors)
        if corrections is not None:
            corrections.pushed(fields["worker"], fields["seq"], fields.get("base"))
        if self._busy:
            await self._turn()
        self._busy = True
        try:
            gradient = call.tensors[0] if copied is None else copied.tensor
            correct = nothing
            if corrections is not None:
                correct = self._correcting([(fields["worker"], fields["seq"], fields.get("base"), gradient)])
            await self.node.compute(self._landing(fields, gradient, correct))
        finally:
            self._next()
        if copied is not None:
            copied.release()
        return self._acknowledged(call)

    def _landing(self, fields: Mapping[str, Any], gradient: torch.Tensor, correct: Callable[[], None]) -> Apply:
        """An update's step and its version, as one piece of work: in place where nobody reads what it is made from."""

        def land() -> None:
            optimizer, current = self.optimizer, self.current
            alone = optimizer is not None and current.holders == 1
            fresh = current if alone else self.pool.take()
            if fields.get("void"):
                _stay(current, fresh)
            elif optimizer is not None:
                correct()
                optimizer.apply(current.tensor, gradient, fresh.tensor, lr=fields.get("lr"))
            gradients = fields.get("gradients", 1)
            count = (fields["worker"], fields["incarnation"], fields["seq"], fields.get("base"), gradients)
            self._count(*count, void=bool(fields.get("void")))
            self._swap(fresh)

        return Apply(land, self._apply_one.nbytes)

    def _withdraw(self, call: Call) -> Reply:
        fields = call.fields
        self.ledger.check(fields["worker"], fields["incarnation"])
        self._forget((fields["worker"], fields["seq"]))
        return Reply()

    def _leave(self, call: Call) -> Reply:
        worker, keep = call.fields["worker"], set(call.fields["keep"])
        for key in [key for key in self._staged if key[0] == worker and key[1] not in keep]:
            self._forget(key)
        self.ledger.fence(worker, call.fields["incarnation"] + 1)
        if self.corrections is not None:
            self.corrections.leave(worker, call.fields["incarnation"])
        return Reply()

    def _forget(self, key: tuple[int, int]) -> None:
        staged = self._staged.pop(key, None)
        if staged is not None:
            staged.buffer.release()
            if self.corrections is not None:
                self.corrections.done(*key)

    # ---- groups are applied

    def _close(self, call: Call) -> Reply | Awaitable[Reply]:
        if call.fields["version"] <= self._closing:
            return Reply({"version": self.version})
        return self._close_in_turn(self._members(call.fields), call.fields)

    async def _close_in_turn(self, members: list[tuple[int, int, _Staged]], fields: Mapping[str, Any]) -> Reply:
        if self._busy:
            await self._turn()
        self._busy = True
        try:
            if self._vote is not None:
                await self.node.compute(taking(*tallying(self.values.numel(), len(members))))
            fresh = self.pool.take()
            correct = nothing
            if self.corrections is not None:
                updates = [(w, seq, each.base, each.buffer.tensor) for w, seq, each in members if not each.void]
                correct = self._correcting(updates)
            await self._apply_group(members, fields["reduce"], fresh, correct)
            for worker, seq, staged in members:
                self._count(worker, staged.incarnation, seq, staged.base, staged.gradients, void=staged.void)
                staged.buffer.release()
            self._swap(fresh, keep=True)
            for version in fields["drop"]:
                self._let_go(version)
        finally:
            self._next()
        return Reply({"version": self.version})

    def _members(self, fields: Mapping[str, Any]) -> list[tuple[int, int, _Staged]]:
        if fields["version"] != self._closing + 1:
            raise Refused(f"version {fields['version']} cannot follow {self._closing}: a group is missing.")
        missing = [member for member in fields["members"] if tuple(member) not in self._staged]
        if missing or not fields["members"]:
            raise Refused(f"group {fields['group']} cannot be applied: {missing or 'no update'} of it is staged here.")
        self._closing += 1
        return [(worker, seq, self._staged.pop((worker, seq))) for worker, seq in fields["members"]]

    def _apply_group(
        self, members: list[tuple[int, int, _Staged]], reduce: str, fresh: Buffer, correct: Callable[[], None]
    ) -> Operation[None]:
        """Start the step from the current version to `fresh` by what the members' updates, corrected, come to."""
        first = members[0][2]
        if all(staged.void for _, _, staged in members):
            return self.node.compute(Apply(partial(_stay, self.current, fresh), self._apply_one.nbytes))
        if len(members) == 1 and self._vote is None:
            return self.node.compute(self._step(first.buffer.tensor, fresh, first.lr, prepare=correct))
        total = self.pool.take()

        def prepare() -> None:
            correct()
            if self._vote is None:
                _combine([staged for _, _, staged in members], reduce, total)
            else:
                self._tally(self._vote, members, total)

        added = len(members) if self._vote is None else 1
        operation = self.node.compute(self._step(total.tensor, fresh, first.lr, added, prepare))
        operation.when_done(total.release)
        return operation

    def _tally(self, vote: Vote, members: list[tuple[int, int, _Staged]], total: Buffer) -> None:
        """Put the members' signs to the vote. The aggregate is the decoded message, as over collectives.

        A void update is no vote: its zeros may have been encoded as positive signs.
        """
        assert self._coder is not None
        votes = {worker: staged.buffer.tensor for worker, _, staged in members if not staged.void}
        message = vote.settle(votes, self._coder)
        self._verdicts.add(self.version + 1, Verdict(message, members[0][2].lr))
        self._coder.decode(message, total.tensor)

    def _step(
        self,
        gradient: torch.Tensor,
        fresh: Buffer,
        lr: float | Sequence[float] | None,
        added: int = 1,
        prepare: Callable[[], None] = nothing,
    ) -> Apply:
        """The optimizer's step from the current version into a fresh buffer, as work of a node.

        `prepare` adds up as many updates for it.
        """
        if self.optimizer is None:
            return self._apply_one if added == 1 else Apply(nothing, self._apply_one.nbytes * added)
        values, update = self.current.tensor, self.optimizer.apply

        def step() -> None:
            prepare()
            update(values, gradient, fresh.tensor, lr=lr)

        return Apply(step, self._apply_one.nbytes * added)

    def _correcting(self, updates: Sequence[tuple[int, int, int | None, torch.Tensor]]) -> Callable[[], None]:
        """What corrects these updates (worker, seq, base, gradient) in place, as they are about to be applied."""
        assert self.corrections is not None
        members = [Member(w, seq, self._behind(base), each) for w, seq, base, each in updates]
        return partial(self.corrections.correct, members, self.values)

    def _swap(self, fresh: Buffer, *, keep: bool = False) -> None:
        """Make `fresh` the next version; `keep` the last one for those who may still ask for it."""
        old = self.current
        fresh.gradients = self.gradients
        fresh.publish(old.version + 1)
        self.current = fresh
        if keep:
            self._kept[old.version] = old
        elif old is not fresh:
            old.release()
        for promise in self._awaited.pop(fresh.version, ()):
            promise.resolve(fresh.lease())

    def _let_go(self, version: int) -> None:
        self._verdicts.drop(version)
        buffer = self._kept.pop(version, None)
        if buffer is not None:
            buffer.release()

    def _count(self, worker: int, incarnation: int, seq: int, base: int | None, gradients: int, *, void: bool) -> None:
        """Count an update; a void one is taken, and not applied."""
        self.gradients += gradients
        if self.corrections is not None:
            self.corrections.done(worker, seq)
        if not void:
            self.applied += 1
            behind = self._behind(base)
            self.staleness[behind] = self.staleness.get(behind, 0) + 1
        if self.log is not None:
            self.log.append((worker, incarnation, seq))

    def _behind(self, base: int | None) -> int:
        """Versions since `base`; since this shard has come back, where that is all that is known."""
        return 0 if base is None else self.version - max(base, self._returned)

    # ---- for who commands the vectors

    def received(self, call: Call) -> Buffer:
        """A copy of the slice that a worker sends. Raises `Refused` for one that would spoil what it is added to."""
        self._check(call.fields["worker"], call.fields["seq"], 1.0, call.tensors)
        return self._copy(call.tensors)

    def publish(self, buffer: Buffer, gradients: int) -> None:
        """Make `buffer`, held once for this, the next version, to which so many `gradients` have led."""
        self.applied += 1
        self.gradients = gradients
        self.staleness[0] = self.staleness.get(0, 0) + 1
        self._swap(buffer)

    async def in_turn(self, work: Apply) -> Any:
        """Do `work` when it is its turn; its value."""
        if self._busy:
            await self._turn()
        self._busy = True
        try:
            return await self.node.compute(work)
        finally:
            self._next()

    # ---- one at a time, first come first served

    async def _turn(self) -> None:
        """Wait for it, where somebody is busy."""
        turn: Operation[None] = self.node.promise("its turn at the shard")
        self._queue.append(turn)
        mine = False
        try:
            await turn
            mine = True
        finally:
            if not mine:
                self._give_up(turn)

    def _give_up(self, turn: Operation[None]) -> None:
        if turn.done:
            self._next()
        else:
            self._queue.remove(turn)

    def _next(self) -> None:
        if self._queue:
            self._queue.popleft().resolve()
        else:
            self._busy = False

    # ---- readers

    def _pull(self, call: Call) -> Reply | Awaitable[Reply]:
        version = call.fields.get("version")
        if version is None or version == self.current.version:
            lease = self.current.lease()
            return lease if "counted" not in call.fields else self._counted(lease)
        kept = self._kept.get(version)
        if kept is not None:
            return kept.lease()
        if version > self.current.version:
            promise = self.node.promise(f"version {version} of the shard at {self.node.name}")
            self._awaited.setdefault(version, []).append(promise)
            return promise
        raise Evicted(  # versions that somebody was started on are kept
            f"version {version} is gone from {self.node.name}, which is at {self.version}: join again."
        )

    def _counted(self, lease: Reply) -> Reply:
        return Reply({**lease.fields, "gradients": self.current.gradients}, lease.tensors, lease.release)

    def _held(self, call: Call) -> Reply:
        """How many gradients are in a version; where that is no longer kept, in the newest."""
        buffer = self._kept.get(call.fields["version"], self.current)
        return Reply({"gradients": buffer.gradients})

    def _pull_to_work(self, call: Call) -> Reply | Awaitable[Reply]:
        """A pull, remembered if a worker goes on from it."""
        answer = self._pull(call)
        if "worker" not in call.fields:
            return answer
        if not isinstance(answer, Reply):
            return self._remembered(call, answer)
        self._remember(call, answer)
        return answer

    async def _remembered(self, call: Call, answer: Awaitable[Reply]) -> Reply:
        reply = await answer
        self._remember(call, reply)
        return reply

    def _follow(self, call: Call) -> Reply | Awaitable[Reply]:
        """As `_pull`, answered with the verdict that leads to that version in place of the slice."""
        answer = self._pull(call)
        return self._lead(call, answer) if isinstance(answer, Reply) else self._lead_later(call, answer)

    async def _lead_later(self, call: Call, answer: Awaitable[Reply]) -> Reply:
        return self._lead(call, await answer)

    def _lead(self, call: Call, pulled: Reply) -> Reply:
        pulled.release()
        return Reply(*self._verdicts.lead(call.fields["has"], pulled.fields["version"]))

    def _optimizer_state(self, call: Call) -> Awaitable[Reply]:
        """The optimizer's state at a version, between two updates of it."""
        assert self.optimizer is not None
        asked, rule = call.fields["version"], self.optimizer

        def copied() -> Reply:
            return Reply(*optimizer_state(rule, newest=self.version == asked))

        return self.in_turn(Apply(copied, sum(vector.nbytes for vector in rule.vectors.values())))

    def _remember(self, call: Call, reply: Reply) -> None:
        version = reply.fields["version"]
        buffer = self.current if version == self.version else self._kept.get(version)
        if buffer is not None and self.corrections is not None:
            self.corrections.pulled(call.fields["worker"], call.fields["incarnation"], buffer)

    def _status(self, call: Call) -> Reply:
        log = None if self.log is None else [list(entry) for entry in self.log]
        return Reply(
            {
                "version": self.version % GENERATION,
                "epoch": self.version // GENERATION,
                "applied": self.applied,
                "refused": self.refused,
                "gradients": self.gradients,
                "staleness": {str(behind): count for behind, count in sorted(self.staleness.items())},
                "last": {str(worker): seq for worker, seq in sorted(self.ledger.last().items())},
                "staged": self.num_staged,
                "buffers": self.pool.made,
                "log": log,
            }
        )

    # ---- checkpoints

    @property
    def _voting(self) -> dict[str, Vote | Coder]:
        """What remembers, of a vote: how reliable voters are, and what decides even splits."""
        return {} if self._vote is None or self._coder is None else {"vote": self._vote, "coder": self._coder}

    def state(self, keep: Sequence[int] | None = None) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """What survives a restart, while nothing is being applied: tensors by name (not copies), plain values.

        Of the versions before the newest, those in `keep` are among them, or all.
        """
        kept = {v: b for v, b in self._kept.items() if keep is None or v in keep}
        tensors: dict[str, torch.Tensor] = {}
        plain: dict[str, Any] = {"optimizer": {}}
        if self.optimizer is not None:
            vectors, plain["optimizer"] = self.optimizer.state()
            tensors = {"values": self.values, **{f"optimizer.{name}": vector for name, vector in vectors.items()}}
            tensors |= {f"kept.{version}": buffer.tensor for version, buffer in kept.items()}
            tensors |= {f"staged.{w}.{seq}": staged.buffer.tensor for (w, seq), staged in self._staged.items()}
        plain |= {
            "version": self.version,
            "closing": self._closing,
            "ledger": self.ledger.state(),
            "applied": self.applied,
            "refused": self.refused,
            "gradients": self.gradients,
            "staleness": sorted(self.staleness.items()),
            "kept": sorted(kept),
            "staged": [[*key, *staged[1:]] for key, staged in sorted(self._staged.items())],
            "log": self.log,
        }
        for name, part in self._voting.items():
            tensors |= {f"{name}.{key}": tensor for key, tensor in part.state().items()}
        named, plain["vectors"] = self.vectors.state()
        tensors |= {f"vector.{name}": vector for name, vector in named.items()}
        if self.corrections is not None:
            more, plain["remedies"] = self.corrections.state()
            if self.optimizer is not None:
                saved = {f"read.{version}" for version in (self.version, *kept)}
                tensors |= {name: tensor for name, tensor in more.items() if name not in saved}
        return tensors, plain

    def restore(self, tensors: Mapping[str, torch.Tensor], plain: Mapping[str, Any]) -> None:
        """Go on from what `state` gave, on a fresh shard."""
        if self.optimizer is not None:
            self.current.tensor.copy_(tensors["values"])
            own = {name[10:]: vector for name, vector in tensors.items() if name.startswith("optimizer.")}
            self.optimizer.restore(own, plain["optimizer"])
        self.current.publish(int(plain["version"]))
        self._closing = int(plain["closing"])
        self.ledger.restore(plain["ledger"])
        self.applied, self.refused = int(plain["applied"]), int(plain["refused"])
        self.gradients = self.current.gradients = int(plain["gradients"])
        self.staleness = {int(behind): int(count) for behind, count in plain["staleness"]}
        self.log = None if plain["log"] is None else [(w, i, seq) for w, i, seq in plain["log"]]
        for version in plain["kept"]:
            self._kept[version] = self._refill(tensors, f"kept.{version}")
            self._kept[version].publish(version)
        for worker, seq, *said in plain["staged"]:
            self._staged[worker, seq] = _Staged(self._refill(tensors, f"staged.{worker}.{seq}"), *said)
        for name, part in self._voting.items():
            part.restore({key.removeprefix(f"{name}."): t for key, t in tensors.items() if key.startswith(f"{name}.")})
        named = {name[7:]: vector for name, vector in tensors.items() if name.startswith("vector.")}
        self.vectors.restore(named, plain["vectors"])
        if self.corrections is not None:
            self.corrections.restore(tensors, plain["remedies"], self._holding(tensors))

    def start_generation(self, lives: int) -> None:
        """Go on alone after `restore`, for the `lives`-th time in this run; workers may have seen later versions."""
        self._returned = (self.version // GENERATION + lives) * GENERATION + self.version % GENERATION
        self.current.publish(self._returned)
        if self.corrections is not None:
            self.corrections.forget_readers()

    def _holding(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[int], Buffer]:
        """What gives the buffer of a version that somebody has read, with one holder more."""
        found = {self.version: self.current, **self._kept}

        def held(version: int) -> Buffer:
            if version in found:
                found[version].holders += 1
            else:
                found[version] = self._refill(tensors, f"read.{version}")
                found[version].publish(version)
            return found[version]

        return held

    def _refill(self, tensors: Mapping[str, torch.Tensor], name: str) -> Buffer:
        buffer = self.pool.take()
        if not self.timing_only:
            buffer.tensor.copy_(tensors[name])
        return buffer


def _is_finite(tensor: torch.Tensor) -> bool:
    """Exact, but in one cheap pass for all tensors that are finite and whose sum is."""
    return math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())


def _stay(current: Buffer, fresh: Buffer) -> None:
    """The next version is as the current one."""
    if fresh is not current and not isinstance(current.tensor, Ghost):
        fresh.tensor.copy_(current.tensor)


def _combine(members: Sequence[_Staged], reduce: str, total: Buffer) -> None:
    """The members' mean, weighted, or sum; in their order. Their rate is the first one's: they share a schedule."""
    first, *rest = members
    largest = max(member.exponent for member in members)
    weights = [member.weight * math.exp(member.exponent - largest) for member in members]
    if reduce == "sum" or len(set(weights)) == 1:
        divisor = float(len(members))
        torch.add(first.buffer.tensor, rest[0].buffer.tensor, out=total.tensor)
        for member in rest[1:]:
            total.tensor.add_(member.buffer.tensor)
    else:
        divisor = math.fsum(weights)
        torch.mul(first.buffer.tensor, weights[0], out=total.tensor)
        for member, weight in zip(rest, weights[1:], strict=True):
            total.tensor.add_(member.buffer.tensor, alpha=weight)
    if reduce == "mean":
        total.tensor.div_(divisor)
