"""A worker's client of its parameter servers: admission, pushes, pulls, and vectors of a coordinator.

Every update has a number (`Sender`), and every call that is not answered is made again with the same number. So a
server that has applied the update acknowledges it again, and the update counts once, however often it was sent.

    call                     to                        answered once
    ask                      the clock                 the worker may start its next step
    push                     every shard               the update is staged (ordered) or applied
    staged, next             the clock                 counted; `next` is `staged` and `ask`
    pull                     every shard               the version is there
    push, proceed, exchange  shard and clock in one    as push and staged; as ask and pull; as all four
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dure.core.node import Address, CodecWork, EndOfWork, Node, Operation, Reply, taking
from dure.core.vectors import Ranges, gather, pieces, size
from dure.errors import CallTimeout, PeerLost, Refused, RemoteError, Superseded, WorkOver
from dure.topology.parameter_server.vote_results import SliceMirror, apply_vote_results
from dure.topology.replica import Pulled

if TYPE_CHECKING:
    from dure.job.optimizer import GroupRange, OptimizerSpec
    from dure.topology.parameter_server.topology import ServerLayout

AGAIN_SECONDS = 0.1
"""Seconds before a server that is gone is called again."""

PROGRESS_SECONDS = 1.0
"""Least time between two heartbeats of a worker that pushes seldom."""

Start = Callable[[], "Operation[Reply]"]
"""Makes a call, every time the same one."""


class Joined(NamedTuple):
    """The state in which a newcomer enters. `clock`: that of the slowest worker, None where none waits for another."""

    version: int
    clock: int | None
    incarnation: int


class Sender:
    """The numbers that an update is known by: its worker, the worker's incarnation, and its place in that (`seq`)."""

    __slots__ = ("incarnation", "seq", "worker")

    def __init__(self, worker: int, incarnation: int) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.seq = 0

    @property
    def life(self) -> dict[str, Any]:
        """Fields that name the worker and its incarnation."""
        return {"worker": self.worker, "incarnation": self.incarnation}

    @property
    def last(self) -> dict[str, Any]:
        """Fields that name the last update."""
        return {"worker": self.worker, "incarnation": self.incarnation, "seq": self.seq}


class ServerClient:
    """A worker's calls to its servers.

    An update costs one call per shard and, if ordered, one `staged` to the clock, which in a `push_pull` asks for the
    next step too. Where one server has both (`ServerLayout.clocked`) they are one call, and `push_pull` is all that a
    step costs. If the policy may refuse updates, an `offer` comes before, so that an update is refused before its bytes
    travel. A call that is not answered in `timeout` seconds is made again, up to `attempts` times, under the same
    number; a question of admission as often as it takes. A server that is gone is called again for `return_seconds`.

    `slowest` is the slowest clock at the last admission. `stats` are those that came with the last group's updates.
    `held` are the seconds of the last `next_version` or `push_pull` in which this worker waited for others.
    """

    def __init__(
        self,
        node: Node,
        worker: int,
        servers: ServerLayout,
        *,
        incarnation: int = 0,
        timeout: float | None = None,
        attempts: int = 5,
    ) -> None:
        self.node = node
        self.servers = servers
        self.sender = Sender(worker, incarnation)
        self.timeout = timeout
        self.attempts = attempts
        self.return_seconds = 0.0
        self.slowest = 0
        self.stats: list[Mapping[str, float]] = []
        self.held = 0.0
        self.mirrors: list[SliceMirror] = []
        codec, layouts = servers.codec, servers.layouts
        self.coders = [] if codec is None else [codec.coder(layout, seed=worker) for layout in layouts]
        self._whole = servers.whole_nbytes
        self._called = -math.inf

    def follow(
        self, values: torch.Tensor, rule: OptimizerSpec, segments: Sequence[Sequence[GroupRange]] | None = None
    ) -> None:
        """Receive results of votes in place of models from now on, and apply them by `rule`, which is the shards'.

        `values` is the model at version 0, `segments` are each shard's.
        """
        parts = zip(self.servers.ranges, segments or [()] * len(self.coders), self.coders, strict=True)
        self.mirrors = [SliceMirror(values, ranges, rule, own, coder) for ranges, own, coder in parts]

    # ---- repeated calls

    def _call(self, address: Address, method: str, *tensors: torch.Tensor, **more: Any) -> Start:
        return partial(self.node.call, address, method, *tensors, timeout=self.timeout, **more)

    def _each(self, method: str, into: Sequence[Sequence[torch.Tensor]] | None = None, **fields: Any) -> list[Start]:
        """The same call to each shard; `into` has where the answers are received."""
        shards = self.servers.shards
        into = [()] * len(shards) if into is None or self.servers.timing_only else into
        return [self._call(shard, method, into=part, **fields) for shard, part in zip(shards, into, strict=True)]

    async def _replies(self, calls: Sequence[Start], begun: Sequence[Operation[Reply]] = ()) -> list[Reply]:
        """The replies to all calls, made at once; the first error is raised when all have ended.

        `begun` are the calls' first attempts, if they have been made.
        """
        replies = []
        error: RemoteError | None = None
        for call, operation in zip(calls, begun or [*map(operator.call, calls)], strict=True):
            try:
                try:
                    reply = await operation
                except (CallTimeout, PeerLost) as failed:
                    reply = await self._again(call, failed)
            except RemoteError as final:
                # The other shards' answers are awaited all the same: an update that one shard refuses is withdrawn
                # from the others, which must not receive it after that.
                error = error or final
            else:
                replies.append(reply)
        if error is not None:
            raise error
        return replies

    async def _again(self, call: Start, failed: CallTimeout | PeerLost) -> Reply:
        """The reply to a call whose first attempt has `failed`; raises the error of the last attempt."""
        left, until = self.attempts - 1, math.inf
        while True:
            if isinstance(failed, PeerLost):
                # A server that is gone costs no attempt. The time begins at its first loss.
                until = min(until, self.node.now() + self.return_seconds)
                if not self.return_seconds or self.node.now() >= until:
                    raise failed
                await self.node.sleep(AGAIN_SECONDS)
            elif not left:
                raise failed
            else:
                left -= 1
            try:
                return await call()
            except (CallTimeout, PeerLost) as still:
                failed = still

    # ---- the clock

    async def join(self) -> Joined:
        """Enter, at the slowest clock and under a new incarnation; updates are numbered from 1 again."""
        sender = self.sender
        fields = (await self._ask_clock("join", worker=sender.worker)).fields
        sender.incarnation, sender.seq = fields["incarnation"], 0
        self.stats, self._called = fields.get("notes", []), self.node.now()
        return Joined(fields["version"], fields["clock"], sender.incarnation)

    async def leave(self, *, finished: bool = True) -> None:
        """Leave the clock, so that no worker waits for this one; its pushed updates count.

        `finished`: it has done its work.
        """
        if self.servers.clock is not None:
            await self._ask_clock("leave", **self.sender.life, finished=finished)

    async def ask(self) -> int:
        """Wait until the next step may start; the version that it starts on. Raises `EndOfWork` if none will."""
        return await self._until_admitted("ask")

    async def _until_admitted(self, method: str, **fields: Any) -> int:
        """The version of the next step. The call is made again as often as it takes."""
        address = self._clock(method)
        while True:
            try:
                reply = await self.node.call(address, method, **self.sender.life, **fields)
            except CallTimeout:
                continue
            if "over" in reply.fields:
                raise EndOfWork
            return self._admitted(reply)

    def _admitted(self, reply: Reply) -> int:
        """Take what the clock has answered to an admitted worker; the version of its next step."""
        fields = reply.fields
        version: int = fields["version"]
        self.slowest = fields["slowest"]
        self.stats, self._called = fields.get("notes", []), self.node.now()
        return version

    async def offer(self, base: Sequence[int] | None = None) -> int:
        """Ask whether an update computed on `base` will count; its group. Raises `Superseded` if not."""
        reply = await self._ask_clock("offer", **self.sender.life, base=min(base) if base else 0)
        group: int | None = reply.fields["group"]
        if group is None:
            raise Superseded(reply.fields["reason"])
        return group

    async def staged(self, group: int | None, note: Mapping[str, float] | None) -> None:
        """Report that all shards have staged the last update, which belongs to `group`."""
        noted = {} if note is None else {"note": note}
        await self._ask_clock("staged", group=group, **self.sender.last, **noted)

    async def arrive(self, note: Mapping[str, float]) -> None:
        """Report that this worker has done its part of what a group ends, without an update."""
        self.sender.seq += 1
        await self.staged(None, note)

    def watch(self) -> Operation[Reply]:
        """An operation that ends when the present computation is in vain; `version` says on which version."""
        return self.node.call(self._clock("watch"), "watch", **self.sender.life)

    def heartbeat(self) -> None:
        """Report progress, at most once in `PROGRESS_SECONDS`, while nothing is pushed."""
        now = self.node.now()
        if self.servers.clock is not None and now >= self._called + PROGRESS_SECONDS:
            self._called = now
            self.node.call(self.servers.clock, "progress", **self.sender.life)

    def _clock(self, method: str) -> Address:
        if self.servers.clock is None:
            raise Refused(f"{method}: these servers have no clock.")
        return self.servers.clock

    async def _ask_clock(self, method: str, **fields: Any) -> Reply:
        # A clock that is gone takes the run with it, so only a late answer is asked for again.
        call = self._call(self._clock(method), method, **fields)
        try:
            return await call()
        except CallTimeout as late:
            return await self._again(call, late)

    # ---- parameters

    async def pull(self, into: torch.Tensor, version: int | None = None, *, to_work: bool = False) -> Pulled:
        """The parameters, received into `into`: exactly `version`, once there, or what each shard has now.

        With `to_work` this worker's next updates are computed on them.

        Raises `Refused` if `version` is no longer kept.
        """
        if to_work and self.mirrors:
            shards = range(len(self.mirrors))
            calls = [
                self._call(self.servers.shards[shard], "follow", version=version, **self._receiving(into, shard))
                for shard in shards
            ]
            return await self.advance_mirrors(await self._replies(calls), into, version)
        calls = self._each("pull", self.servers.parts(into), version=version, **self._reader(to_work=to_work))
        return Pulled(into, [reply.fields["version"] for reply in await self._replies(calls)])

    async def look(self, into: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The newest values of each shard, received into `into`, and the number of gradients that every shard holds."""
        replies = await self._replies(self._each("pull", self.servers.parts(into), counted=True))
        return into, min(reply.fields["gradients"] for reply in replies)

    def gradients_at(self, versions: Sequence[int]) -> list[Operation[Reply]]:
        """Ask each shard how many `gradients` are in its part of a version that this worker works on."""
        places = zip(self.servers.shards, versions, strict=True)
        return [self.node.call(shard, "held", timeout=self.timeout, version=version) for shard, version in places]

    @property
    def lends(self) -> bool:
        """Whether parameters can be borrowed: one shard holds them all, where this worker can read them."""
        whole = None if self.mirrors else self._whole
        return whole is not None and self.node.borrows(self.servers.shards[0].node, whole)

    async def borrow(self, version: int | None = None, *, to_work: bool = False) -> Pulled:
        """As `pull`, but the shard's own memory, not a copy: to be read, and released."""
        shard, reader = self.servers.shards[0], self._reader(to_work=to_work)
        (reply,) = await self._replies([self._call(shard, "pull", into=None, version=version, **reader)])
        return self._brought([reply.fields["version"]], reply, None)

    async def next_version(self, into: torch.Tensor | None) -> Pulled:
        """As `ask` and then `pull` or, without `into`, `borrow`, in one call, where one server has both."""
        assert self.servers.clocked is not None
        call = self._call(self.servers.clocked, "proceed", **self.sender.life, **self._receiving(into, 0))
        return await self._once_admitted([call], [call()], into)

    async def _once_admitted(
        self, calls: Sequence[Start], begun: Sequence[Operation[Reply]], into: torch.Tensor | None
    ) -> Pulled:
        """The parameters that a call to a clocked shard brings. The call is made again as often as it takes."""
        while True:
            try:
                (reply,) = await self._replies(calls, begun)
            except CallTimeout:
                begun = ()
                continue
            except WorkOver:
                raise EndOfWork from None
            self.held = reply.fields["held"]
            version = self._admitted(reply)
            if self.mirrors:
                assert into is not None
                return await self.advance_mirrors([reply], into, version)
            return self._brought([version], reply, into)

    def _brought(self, versions: list[int], reply: Reply, into: torch.Tensor | None) -> Pulled:
        """The parameters of a reply: in `into`, or lent."""
        if into is not None:
            return Pulled(into, versions)
        (values,) = reply.tensors
        return Pulled(values, versions, reply.release)

    def _receiving(self, into: torch.Tensor | None, shard: int) -> dict[str, Any]:
        """Arguments of a call to a shard that brings parameters: where they are received; None has them borrowed."""
        if self.mirrors:
            mirror = self.mirrors[shard]
            return {"into": (mirror.message,), "at_most": True, "has": mirror.version}
        if into is None:
            return {"into": None}
        return {"into": () if self.servers.timing_only else pieces(into, self.servers.ranges[shard])}

    def _reader(self, *, to_work: bool) -> dict[str, Any]:
        """Fields by which shards that look back know which worker computes on a version."""
        return self.sender.life if to_work and self.servers.look_back else {}

    # ---- results of votes in place of parameters

    async def advance_mirrors(self, replies: Sequence[Reply], into: torch.Tensor, version: int | None) -> Pulled:
        """Apply the results of all shards' votes, pull slices that none leads to, and write the model to `into`."""
        answers = [(mirror, reply.fields) for mirror, reply in zip(self.mirrors, replies, strict=True)]
        await apply_vote_results(self.node, [(mirror, fields) for mirror, fields in answers if fields["nbytes"]])
        versions = [fields["version"] for _, fields in answers]
        for shard, (mirror, fields) in enumerate(answers):
            if fields["nbytes"] is None:
                versions[shard] = await self._catch_up(shard, into, version)
            else:
                mirror.write(into)
        return Pulled(into, versions)

    async def _catch_up(self, shard: int, into: torch.Tensor, version: int | None) -> int:
        """Pull a shard's values and, while they are its newest, the state of its optimizer; their version."""
        mirror, address = self.mirrors[shard], self.servers.shards[shard]
        mirror.version = None
        place, vectors = pieces(into, self.servers.ranges[shard]), list(mirror.rule.vectors.values())
        (reply,) = await self._replies([self._call(address, "pull", into=place, version=version)])
        found: int = reply.fields["version"]
        asking = self._call(address, "optimizer", into=vectors, at_most=True, version=found)
        (state,) = await self._replies([asking])
        if state.fields["steps"] is not None:
            mirror.start_at(found, into, state.fields["steps"])
        return found

    # ---- updates

    async def push(
        self,
        update: torch.Tensor,
        *,
        weight: float = 1.0,
        exponent: float = 0.0,
        base: Sequence[int] | None = None,
        lr: float | Sequence[float] | None = None,
        note: Mapping[str, float] | None = None,
        gradients: int = 1,
        void: bool = False,
    ) -> list[int]:
        """Push `update`, made of `gradients`; each shard's version once it is staged (if ordered) or applied.

        `base` are the versions that it was computed on (`Pulled.versions`). `weight`, times e to the `exponent`, is its
        share in a weighted mean. `lr` is a rate in place of the servers'. A `void` update, of zeros, makes no step by
        itself. Workers that are admitted on the version that a group makes get the `note`s of its members (`stats`).

        Raises `Refused` if the policy (`Superseded`) or a shard (NaN, a past incarnation) refuses it. A refused update
        counts nowhere, but for updates without order, which the other shards may have applied.
        """
        servers = self.servers
        group = await self.offer(base) if servers.may_refuse else None
        fields = _counts(weight, lr, gradients, void=void) | ({"exponent": exponent} if exponent else {})
        if servers.clocked is not None:
            fields |= {"group": group} | ({} if note is None else {"note": note})
            replies = await self._replies(await self._pushes(update, base, [servers.clocked], "push", **fields))
        else:
            replies = await self._push_to_shards(update, base, fields)
            if servers.ordered:
                await self.staged(group, note)
        return [reply.fields["version"] for reply in replies]

    async def push_pull(
        self,
        update: torch.Tensor,
        into: torch.Tensor | None,
        *,
        weight: float = 1.0,
        base: Sequence[int] | None = None,
        lr: float | Sequence[float] | None = None,
        gradients: int = 1,
        void: bool = False,
    ) -> Pulled:
        """Push, and pull the parameters for the next step.

        Without order, as `push` and `pull` in one call to each shard, which answers with its values once the update is
        applied. With order, as `push`, `ask` and `pull` of that version: in one call where one server has shard and
        clock, else in three (the update; its report and the question; the version). Without `into`, the shard's own
        memory is borrowed (`lends`).
        """
        servers, fields = self.servers, _counts(weight, lr, gradients, void=void)
        receiving = partial(self._receiving, into)
        if servers.clocked is not None:
            calls = await self._pushes(update, base, [servers.clocked], "exchange", receiving, **fields)
            return await self._once_admitted(calls, [*map(operator.call, calls)], into)
        if not servers.ordered:
            calls = await self._pushes(update, base, servers.shards, "push", receiving, pull=True, **fields)
            replies = await self._replies(calls, [*map(operator.call, calls)])
            return self._brought([reply.fields["version"] for reply in replies], replies[0], into)
        await self._push_to_shards(update, base, fields)
        asked = self.node.now()
        version = await self._until_admitted("next", group=None, seq=self.sender.seq)
        self.held = self.node.now() - asked
        return await (self.borrow(version, to_work=True) if into is None else self.pull(into, version, to_work=True))

    async def _push_to_shards(
        self, update: torch.Tensor, base: Sequence[int] | None, fields: Mapping[str, Any]
    ) -> list[Reply]:
        """Push to all shards or, where updates have an order, to none."""
        calls = await self._pushes(update, base, self.servers.shards, "push", **fields)
        try:
            return await self._replies(calls)
        except Refused:
            # A shard keeps what it has staged until a group closes with it, and this update is in no group.
            if self.servers.ordered:
                for withdrawing in self._each("withdraw", **self.sender.last):
                    with suppress(RemoteError):
                        await withdrawing()
            raise

    async def _pushes(
        self,
        update: torch.Tensor,
        base: Sequence[int] | None,
        to: Sequence[Address],
        method: str,
        receiving: Callable[[int], dict[str, Any]] | None = None,
        **fields: Any,
    ) -> list[Start]:
        """The calls that push the next update, one to each shard; `receiving` says where answers go (`_receiving`)."""
        self.sender.seq += 1
        fields |= {"ordered": self.servers.ordered, **self.sender.last}
        parts = await self._encoded(update) if self.coders else self.servers.parts(update)
        calls = []
        for shard, (address, part) in enumerate(zip(to, parts, strict=True)):
            more = {} if receiving is None else receiving(shard)
            calls.append(
                self._call(address, method, *part, base=None if base is None else base[shard], **fields, **more)
            )
        return calls

    async def _encoded(self, update: torch.Tensor) -> Sequence[Sequence[torch.Tensor]]:
        """Messages of `update`, by shard. Encoded once for all attempts, as a residual changes here."""
        await self.node.compute(taking(*(CodecWork("encode", coder.numel) for coder in self.coders)))
        with self.node.overlapped(update):
            slices = (self._gathered(update, ranges) for ranges in self.servers.ranges)
            return [[coder.encode(part)] for coder, part in zip(self.coders, slices, strict=True)]

    def _gathered(self, update: torch.Tensor, ranges: Ranges) -> torch.Tensor:
        return update[: size(ranges)] if self.servers.timing_only else gather(update, ranges)

    # ---- vectors of a coordinator

    async def stage(self, update: torch.Tensor) -> int:
        """Stage `update` at the shards for a coordinator's commands (`vectors`), and return its number there.

        Raises `Refused` if a shard refuses the update (NaN, a past incarnation). Other shards may have staged it then.
        """
        self.sender.seq += 1
        shards = zip(self.servers.shards, self.servers.parts(update), strict=True)
        await self._replies([self._call(shard, "stage", *part, **self.sender.last) for shard, part in shards])
        return self.sender.seq

    async def fetch(self, into: torch.Tensor, name: str) -> None:
        """Receive the shards' vector called `name` (`vectors`) into `into`. Raises `Refused` if no vector has it."""
        await self._replies(self._each("fetch", self.servers.parts(into), name=name))

    # ---- state

    async def status(self) -> list[Mapping[str, Any]]:
        """The counters of every shard."""
        return [reply.fields for reply in await self._replies(self._each("status"))]

    def state(self) -> dict[str, int]:
        """The state that a checkpoint keeps."""
        return {"incarnation": self.sender.incarnation, "seq": self.sender.seq}

    def restore(self, state: Mapping[str, int]) -> None:
        """Continue from `state`. The next pulls bring values and optimizer state: mirrors are not saved."""
        self.sender.incarnation, self.sender.seq = state["incarnation"], state["seq"]
        for mirror in self.mirrors:
            mirror.version = None


def _counts(weight: float, lr: float | Sequence[float] | None, gradients: int, *, void: bool) -> dict[str, Any]:
    """Fields that say how an update counts."""
    counts: dict[str, Any] = {"weight": weight, "gradients": gradients}
    if lr is not None:
        counts["lr"] = lr
    if void:
        counts["void"] = True
    return counts
