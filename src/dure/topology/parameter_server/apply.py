"""Updates become versions: a group at a time, in the clock's order, or each on arrival."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dure.codec.exchange import tallying
from dure.core.node import Apply, Ghost, Operation, Reply, nothing, taking
from dure.core.state import State, under_prefix, with_prefix
from dure.errors import Refused
from dure.topology.parameter_server.staging import StaleUpdate
from dure.topology.parameter_server.vote_results import VoteResult, VoteResults, optimizer_state
from dure.topology.turns import Turns

if TYPE_CHECKING:
    from dure.codec.base import Vote
    from dure.codec.coder import Coder
    from dure.core.node import Call
    from dure.job.optimizer import FlatOptimizer
    from dure.topology.parameter_server.staging import Corrections, StagedUpdate, StagingArea
    from dure.topology.parameter_server.versions import Buffer, Versions


class Rule(NamedTuple):
    """A shard's rule for the step of a group: a `vote` or a mean or sum, with `corrections`, then the `optimizer`.

    `optimizer` is None in a timing-only run. `coder` encodes and decodes what is voted on. Of updates that wait for no
    group, those of a staleness above `max_delay` make no step.
    """

    optimizer: FlatOptimizer | None
    corrections: Corrections | None = None
    coder: Coder | None = None
    vote: Vote | None = None
    max_delay: int | None = None

    @property
    def looks_back(self) -> bool:
        """Whether corrections read the version that an update was computed on."""
        return self.corrections is not None and self.corrections.compares

    @property
    def voting(self) -> dict[str, Vote | Coder]:
        """The parts of a vote with state: the reliability of voters, and the draws that decide even splits."""
        return {} if self.vote is None or self.coder is None else {"vote": self.vote, "coder": self.coder}


Members = Sequence[tuple[int, int, "StagedUpdate"]]
"""Worker, seq and update of each member of a group, in rank order."""


class Updater:
    """Applies updates to the newest of a slice's `versions`, one at a time, and counts them.

    `nbytes` is the size of the slice. `log`, if kept, has (worker, incarnation, seq) of every update applied.
    """

    def __init__(self, rule: Rule, versions: Versions, staging: StagingArea, nbytes: int, *, log: bool) -> None:
        self.rule = rule
        self.versions = versions
        self.turns = Turns("the shard")
        self.vote_results = VoteResults(versions)
        self.applied = 0
        self.gradients = 0
        self.staleness: dict[int, int] = {}
        self.log: list[tuple[int, int, int]] | None = [] if log else None
        self._node = versions.node
        self._staging = staging
        self._closed = 0  # groups whose members have been taken
        self._apply_one = Apply(nothing, nbytes * (2 if rule.looks_back else 1))

    # ---- groups

    def close(self, call: Call) -> Reply | Awaitable[Reply]:
        """Apply a group of staged updates and let versions go; acknowledge a group that has been closed before."""
        if call.fields["version"] <= self._closed:  # the clock has repeated an order
            return Reply({"version": self.versions.current.version})
        # The members are taken now, not in their turn: a `leave` behind this order must not find them staged.
        return self._close_in_turn(self._members(call.fields), call.fields)

    async def _close_in_turn(self, members: Members, fields: Mapping[str, Any]) -> Reply:
        turns, versions, rule = self.turns, self.versions, self.rule
        if turns.busy:
            await turns.wait(self._node)
        turns.busy = True
        try:
            if rule.vote is not None:
                await self._node.compute(taking(*tallying(versions.current.tensor.numel(), len(members))))
            fresh = versions.pool.take()
            correct = nothing
            if rule.corrections is not None:
                updates = [(w, seq, each.base, each.buffer.tensor) for w, seq, each in members if not each.void]
                correct = self._correcting(rule.corrections, updates)
            await self._apply_group(members, fields["reduce"], fresh, correct)
            # Staleness is counted against the version before, which is the newest until `advance`.
            for worker, seq, staged in members:
                self._count(worker, staged.incarnation, seq, staged.base, staged.gradients, void=staged.void)
                staged.buffer.release()
            versions.advance(fresh, self.gradients, keep=True)
            for version in fields["drop"]:
                self.vote_results.drop(version)
                versions.let_go(version)
        finally:
            turns.end()
        return Reply({"version": versions.current.version})

    def _members(self, fields: Mapping[str, Any]) -> Members:
        if fields["version"] != self._closed + 1:
            raise Refused(f"version {fields['version']} cannot follow {self._closed}: a group is missing.")
        missing = self._staging.missing(fields["members"])
        if missing or not fields["members"]:
            raise Refused(f"group {fields['group']} cannot be applied: {missing or 'no update'} of it is staged here.")
        self._closed += 1
        return [(worker, seq, self._staging.take(worker, seq)) for worker, seq in fields["members"]]

    def _apply_group(
        self, members: Members, reduce: str, fresh: Buffer, correct: Callable[[], None]
    ) -> Operation[None]:
        """Start the step from the newest version to `fresh`, by the members' corrected updates as one."""
        vote, first = self.rule.vote, members[0][2]
        if all(staged.void for _, _, staged in members):
            return self._node.compute(Apply(partial(_stay, self.versions.current, fresh), self._apply_one.nbytes))
        if len(members) == 1 and vote is None:
            return self._node.compute(self._step(first.buffer.tensor, fresh, first.lr, prepare=correct))
        # Taken here, and released when the operation ends: also where the work fails, or is never run.
        total = self.versions.pool.take()

        def prepare() -> None:
            correct()
            if vote is None:
                _combine([staged for _, _, staged in members], reduce, total)
            else:
                self._tally(vote, members, total)

        added = len(members) if vote is None else 1
        operation = self._node.compute(self._step(total.tensor, fresh, first.lr, added, prepare))
        operation.when_done(total.release)
        return operation

    def _tally(self, vote: Vote, members: Members, total: Buffer) -> None:
        """Vote on the members' signs. The aggregate is the decoded message, as over collectives.

        A void update is no vote: its zeros may have been encoded as positive signs.
        """
        coder = self.rule.coder
        assert coder is not None
        votes = {worker: staged.buffer.tensor for worker, _, staged in members if not staged.void}
        message = vote.settle(votes, coder)
        self.vote_results.add(self.versions.current.version + 1, VoteResult(message, members[0][2].lr))
        coder.decode(message, total.tensor)

    def _step(
        self,
        gradient: torch.Tensor,
        fresh: Buffer,
        lr: float | Sequence[float] | None,
        added: int = 1,
        prepare: Callable[[], None] = nothing,
    ) -> Apply:
        """The optimizer's step from the newest version to `fresh`, as work of a node.

        `prepare` makes `gradient` of as many updates as are `added`.
        """
        if self.rule.optimizer is None:
            if self.rule.vote is not None:
                return Apply(prepare, self._apply_one.nbytes * added)  # the result has a size
            return self._apply_one if added == 1 else Apply(nothing, self._apply_one.nbytes * added)
        values, update = self.versions.current.tensor, self.rule.optimizer.apply

        def step() -> None:
            prepare()
            update(values, gradient, fresh.tensor, lr=lr)

        return Apply(step, self._apply_one.nbytes * added)

    # ---- single updates

    def on_arrival(self, fields: Mapping[str, Any], gradient: torch.Tensor) -> Apply:
        """The step of an update that waits for no group, as work of a node.

        Where no reader holds the newest version, the step is made in place.
        """
        optimizer, corrections, versions = self.rule.optimizer, self.rule.corrections, self.versions
        correct = nothing
        if corrections is not None:
            correct = self._correcting(corrections, [(fields["worker"], fields["seq"], fields.get("base"), gradient)])

        def step() -> None:
            if self._too_stale(fields):
                self._staging.refused += 1
                self._finished(fields["worker"], fields["seq"])
                return
            # Looked at when the work runs, not when it is made: in virtual time a pull may come in between and hold the
            # newest version, which then stays as it is.
            current = versions.current
            in_place = optimizer is not None and current.holders == 1
            fresh = current if in_place else versions.pool.take()
            if fields.get("void"):
                _stay(current, fresh)
            elif optimizer is not None:
                correct()
                optimizer.apply(current.tensor, gradient, fresh.tensor, lr=fields.get("lr"))
            gradients = fields.get("gradients", 1)
            count = (fields["worker"], fields["incarnation"], fields["seq"], fields.get("base"), gradients)
            self._count(*count, void=bool(fields.get("void")))
            versions.advance(fresh, self.gradients)

        return Apply(step, self._apply_one.nbytes)

    def _too_stale(self, fields: Mapping[str, Any]) -> bool:
        """Whether an update is refused for its staleness. One without a gradient never is."""
        most = self.rule.max_delay
        return most is not None and not fields.get("void") and self.versions.behind(fields.get("base")) > most

    # ---- beside updates

    async def in_turn(self, work: Apply) -> Any:
        """Compute `work` when its turn comes; its value."""
        turns = self.turns
        if turns.busy:
            await turns.wait(self._node)
        turns.busy = True
        try:
            return await self._node.compute(work)
        finally:
            turns.end()

    def publish(self, buffer: Buffer, gradients: int) -> None:
        """Make `buffer`, held once for this, the next version, to which so many `gradients` have led."""
        self.applied += 1
        self.gradients = gradients
        self.staleness[0] = self.staleness.get(0, 0) + 1
        self.versions.advance(buffer, gradients)

    def optimizer_state(self, call: Call) -> Awaitable[Reply]:
        """The optimizer's state at a version, copied between two updates."""
        asked, optimizer = call.fields["version"], self.rule.optimizer
        assert optimizer is not None

        def copied() -> Reply:
            return Reply(*optimizer_state(optimizer, newest=self.versions.current.version == asked))

        return self.in_turn(Apply(copied, sum(vector.nbytes for vector in optimizer.vectors.values())))

    def _correcting(
        self, corrections: Corrections, updates: Sequence[tuple[int, int, int | None, torch.Tensor]]
    ) -> Callable[[], None]:
        """A function that corrects these updates (worker, seq, base, gradient) in place, right before their step."""
        versions = self.versions
        stale = [StaleUpdate(w, seq, versions.behind(base), gradient) for w, seq, base, gradient in updates]
        return partial(corrections.correct, stale, versions.current.tensor)

    def _count(self, worker: int, incarnation: int, seq: int, base: int | None, gradients: int, *, void: bool) -> None:
        """Count an update, before its version is the newest. A void one is logged, and not applied."""
        self.gradients += gradients
        self._finished(worker, seq)
        if not void:
            self.applied += 1
            behind = self.versions.behind(base)
            self.staleness[behind] = self.staleness.get(behind, 0) + 1
        if self.log is not None:
            self.log.append((worker, incarnation, seq))

    def _finished(self, worker: int, seq: int) -> None:
        """Release what corrections hold for an update that has been applied or refused."""
        if self.rule.corrections is not None:
            self.rule.corrections.done(worker, seq)

    # ---- checkpoints

    def state(self) -> State:
        """The state that a checkpoint keeps. The tensors are no copies."""
        optimizer = State() if self.rule.optimizer is None else self.rule.optimizer.state()
        state = optimizer.under("optimizer")
        for name, part in self.rule.voting.items():
            state.tensors |= with_prefix(f"{name}.", part.state())
        state.plain |= {
            "closing": self._closed,
            "applied": self.applied,
            "gradients": self.gradients,
            "staleness": sorted(self.staleness.items()),
            "log": self.log,
        }
        return state

    def restore(self, state: State) -> None:
        """Continue from `state`."""
        if self.rule.optimizer is not None:
            self.rule.optimizer.restore(state.part("optimizer"))
        for name, part in self.rule.voting.items():
            part.restore(under_prefix(f"{name}.", state.tensors))
        plain = state.plain
        self._closed = int(plain["closing"])
        self.applied, self.gradients = int(plain["applied"]), int(plain["gradients"])
        self.staleness = {int(behind): int(count) for behind, count in plain["staleness"]}
        self.log = None if plain["log"] is None else [(w, i, seq) for w, i, seq in plain["log"]]


def _stay(current: Buffer, fresh: Buffer) -> None:
    """The next version has the values of the current one."""
    if fresh is not current and not isinstance(current.tensor, Ghost):
        fresh.tensor.copy_(current.tensor)


def _combine(members: Sequence[StagedUpdate], reduce: str, total: Buffer) -> None:
    """The members' weighted mean or sum, added in their order."""
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
