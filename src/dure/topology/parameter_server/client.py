"""What a worker uses of its parameter servers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dure.core.node import Address, CodecWork, EndOfWork, Ghost, Node, Operation, Reply, taking
from dure.core.ranges import Ranges, gather, pieces
from dure.errors import CallTimeout, PeerLost, Refused, RemoteError, Superseded, WorkOver
from dure.topology.parameter_server.verdicts import Follower, apply_verdicts
from dure.topology.replica import Pulled

if TYPE_CHECKING:
    from dure.codec.base import Codec
    from dure.codec.coder import SliceLayout
    from dure.job.optimizer import GroupRange, OptimizerSpec

PROGRESS_SECONDS = 1.0
"""How often a worker that pushes seldom says that it is at work."""


AGAIN_SECONDS = 0.1
"""How long to wait before a shard that is gone is called again."""


@dataclass(frozen=True, slots=True)
class Servers:
    """Where a model is held, as its clients need to know it.

    `ranges` are those of each shard (`sharding.split`). `ordered` updates go through the `clock`; the others are
    applied on arrival. Where there is one shard, `clocked` has it and the clock (`ClockedShard`). `may_refuse` is the
    policy's. `look_back` shards are told who works on what. `timing_only` runs move `Ghost`s of `itemsize` bytes each.
    Updates travel as `codec` has them, each shard's part by its layout; what is pulled does not.
    """

    shards: Sequence[Address]
    ranges: Sequence[Ranges]
    clock: Address | None = None
    ordered: bool = True
    may_refuse: bool = False
    timing_only: bool = False
    itemsize: int = 4
    look_back: bool = False
    codec: Codec | None = None
    layouts: Sequence[SliceLayout] = ()
    clocked: Address | None = None
    ghosts: Sequence[Sequence[torch.Tensor]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Make what stands for each shard's tensors in a timing-only run, once for all clients."""
        ghosts = [[Ghost(stop - start, self.itemsize) for start, stop in ranges] for ranges in self.ranges]
        object.__setattr__(self, "ghosts", ghosts)


class Joined(NamedTuple):
    """Where a newcomer stands."""

    version: int
    clock: int
    incarnation: int


class ServerClient:
    """What a worker uses of its servers.

    An update costs one call per shard and, if ordered, one `staged` to the clock, which in a `push_pull` asks for the
    next step too. Where one server has both (`Servers.clocked`) they are one call, and `push_pull` is all that a step
    costs. Before it comes an `offer`, so that what is refused is refused before its bytes travel; where the policy
    refuses nobody (`may_refuse=False`) the offer is skipped. What is not answered in `timeout` seconds is sent again,
    up to `attempts` times, under the same number; a question of admission as often as it takes. A shard that is gone
    is called again for `return_seconds`.
    """

    def __init__(
        self,
        node: Node,
        worker: int,
        servers: Servers,
        *,
        incarnation: int = 0,
        timeout: float | None = None,
        attempts: int = 5,
    ) -> None:
        self.node = node
        self.worker = worker
        self.servers = servers
        self.incarnation = incarnation
        self.timeout = timeout
        self.attempts = attempts
        self.return_seconds = 0.0
        self.seq = 0
        self.heard: list[Mapping[str, float]] = []
        self.slowest = 0
        self.held = 0.0
        self._spoke = -math.inf
        codec, layouts = servers.codec, servers.layouts
        self.coders = [] if codec is None else [codec.coder(layout, seed=worker) for layout in layouts]
        self.followers: list[Follower] = []
        self._whole = _nbytes_of_the_only_range(servers)

    def follow(
        self, values: torch.Tensor, rule: OptimizerSpec, segments: Sequence[Sequence[GroupRange]] | None = None
    ) -> None:
        """Receive verdicts in place of models from now on, and apply them by `rule`, which is the shards'.

        `values` is the model at version 0, `segments` are each shard's.
        """
        parts = zip(self.servers.ranges, segments or [()] * len(self.coders), self.coders, strict=True)
        self.followers = [Follower(values, ranges, rule, own, coder) for ranges, own, coder in parts]

    async def join(self) -> Joined:
        """Enter, at the slowest clock and under a new incarnation; updates are numbered from 1 again."""
        reply = await self._clock("join", worker=self.worker)
        self.incarnation, self.seq = reply.fields["incarnation"], 0
        self.heard, self._spoke = reply.fields.get("notes", []), self.node.now()
        return Joined(reply.fields["version"], reply.fields["clock"], self.incarnation)

    async def leave(self, *, finished: bool = True) -> None:
        """Nobody waits for this worker any more. What it has pushed counts. `finished`: it has done its work."""
        if self.servers.clock is not None:
            await self._clock("leave", worker=self.worker, incarnation=self.incarnation, finished=finished)

    async def ask(self) -> int:
        """Wait until the next step may start; the version that it starts on. Raises `EndOfWork` if none will."""
        return await self._until_admitted("ask")

    async def _until_admitted(self, method: str, **said: Any) -> int:
        """Ask as often as it takes."""
        clock = self._address(method)
        while True:
            try:
                reply = await self.node.call(clock, method, worker=self.worker, incarnation=self.incarnation, **said)
            except CallTimeout:
                continue
            if "over" in reply.fields:
                raise EndOfWork
            return self._admitted(reply)

    def _admitted(self, reply: Reply) -> int:
        """What the clock says to who may start: the version, and what it has to tell."""
        fields = reply.fields
        version: int = fields["version"]
        self.slowest = fields["slowest"]
        self.heard, self._spoke = fields.get("notes", []), self.node.now()
        return version

    async def next_version(self, into: torch.Tensor | None) -> Pulled:
        """As `ask` and then `pull` or, without `into`, `borrow`, in one call, where shard and clock are `clocked`.

        `held` is how many seconds of it this worker was kept waiting for others.
        """
        clocked = self.servers.clocked
        assert clocked is not None
        place = self._place(into, 0)
        call = partial(self.node.call, clocked, "proceed", into=place, timeout=self.timeout, **self._has(0))
        return await self._once_admitted(lambda _: call(worker=self.worker, incarnation=self.incarnation), into)

    async def _once_admitted(self, start: Callable[[int], Operation[Reply]], into: torch.Tensor | None) -> Pulled:
        """What a call to a clocked shard brings back, made as often as it takes."""
        while True:
            try:
                (reply,) = await self._every(start)
            except CallTimeout:
                continue
            except WorkOver:
                raise EndOfWork from None
            self.held = reply.fields["held"]
            version = self._admitted(reply)
            if self.followers:
                assert into is not None
                return await self._followed([reply], into, version)
            return self._brought([version], reply, into)

    def _brought(self, versions: list[int], reply: Reply, into: torch.Tensor | None) -> Pulled:
        """What came back: in `into`, or lent."""
        if into is not None:
            return Pulled(into, versions)
        (values,) = reply.tensors
        return Pulled(values, versions, reply.release)

    def _place(self, into: torch.Tensor | None, shard: int) -> Sequence[torch.Tensor] | None:
        """Where a shard's reply is received; None where it is borrowed."""
        if self.followers:
            return (self.followers[shard].message,)
        if into is None:
            return None
        return () if self.servers.timing_only else pieces(into, self.servers.ranges[shard])

    async def pull(self, into: torch.Tensor, version: int | None = None, *, to_work: bool = False) -> Pulled:
        """The parameters, received into `into`: exactly `version`, once there, or what each shard has now.

        With `to_work` this worker's next updates are computed on them.

        Raises `Refused` if `version` is no longer kept.
        """
        if to_work and self.followers:
            return await self._pull_verdicts(into, version)
        parts = self._parts(into)
        call, shards, timing_only = self.node.call, self.servers.shards, self.servers.timing_only
        told = self._told(to_work=to_work)

        def start(shard: int) -> Operation[Reply]:
            destination = () if timing_only else parts[shard]
            return call(shards[shard], "pull", into=destination, timeout=self.timeout, version=version, **told)

        replies = await self._every(start)
        return Pulled(into, [reply.fields["version"] for reply in replies])

    async def look(self, into: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The newest values of each shard, received into `into`, and the number of gradients that every shard holds."""
        parts, call, shards = self._parts(into), self.node.call, self.servers.shards
        replies = await self._every(
            lambda shard: call(shards[shard], "pull", into=parts[shard], timeout=self.timeout, counted=True)
        )
        return into, min(reply.fields["gradients"] for reply in replies)

    def gradients_at(self, versions: Sequence[int]) -> list[Operation[Reply]]:
        """Ask each shard how many `gradients` are in its part of a version that this worker works on."""
        places = zip(self.servers.shards, versions, strict=True)
        return [self.node.call(shard, "held", timeout=self.timeout, version=version) for shard, version in places]

    # ---- verdicts in place of models

    def _has(self, shard: int) -> dict[str, Any]:
        """Fields by which a shard answers with a verdict; none where models are pulled."""
        return {"has": self.followers[shard].version, "at_most": True} if self.followers else {}

    async def _pull_verdicts(self, into: torch.Tensor, version: int | None) -> Pulled:
        """As `pull`, by the verdicts that lead to `version`."""
        call, shards, timeout = self.node.call, self.servers.shards, self.timeout

        def start(shard: int) -> Operation[Reply]:
            place = self._place(into, shard)
            return call(shards[shard], "follow", into=place, timeout=timeout, version=version, **self._has(shard))

        return await self._followed(await self._every(start), into, version)

    async def _followed(self, replies: Sequence[Reply], into: torch.Tensor, version: int | None) -> Pulled:
        """Apply what the shards have answered, pull what no verdict leads to, and write the model to `into`."""
        answers = [(follower, reply.fields) for follower, reply in zip(self.followers, replies, strict=True)]
        await apply_verdicts(self.node, [(follower, fields) for follower, fields in answers if fields["nbytes"]])
        versions = [fields["version"] for _, fields in answers]
        for shard, (follower, fields) in enumerate(answers):
            if fields["nbytes"] is None:
                versions[shard] = await self._catch_up(shard, into, version)
            else:
                follower.write(into)
        return Pulled(into, versions)

    async def _catch_up(self, shard: int, into: torch.Tensor, version: int | None) -> int:
        """Pull a shard's values and, while they are its newest, the state of its optimizer; their version."""
        follower, address, timeout = self.followers[shard], self.servers.shards[shard], self.timeout
        follower.version = None
        place, vectors = pieces(into, self.servers.ranges[shard]), list(follower.rule.vectors.values())
        reply = await self._insisting(
            lambda: self.node.call(address, "pull", into=place, timeout=timeout, version=version)
        )
        found: int = reply.fields["version"]
        state = await self._insisting(
            lambda: self.node.call(address, "optimizer", into=vectors, at_most=True, timeout=timeout, version=found)
        )
        if state.fields["steps"] is not None:
            follower.start_at(found, into, state.fields["steps"])
        return found

    @property
    def lends(self) -> bool:
        """Whether parameters can be borrowed: one shard holds them all, where this worker can read them."""
        if self.followers:
            return False
        return self._whole is not None and self.node.borrows(self.servers.shards[0].node, self._whole)

    async def borrow(self, version: int | None = None, *, to_work: bool = False) -> Pulled:
        """As `pull`, but the shard's own memory, not a copy: to be read, and released."""
        told = self._told(to_work=to_work)
        shard, call, timeout = self.servers.shards[0], self.node.call, self.timeout
        (reply,) = await self._every(lambda _: call(shard, "pull", into=None, timeout=timeout, version=version, **told))
        (values,) = reply.tensors
        return Pulled(values, [reply.fields["version"]], reply.release)

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
        """Give `update`, made of `gradients`, to the servers; returns once they have it, with each version.

        `base` are the versions that it was computed on (`Pulled.versions`), `weight` the batch size in a weighted mean
        or, times e to the `exponent`, what may be too small for a number, `lr` a rate in place of the servers'. Ordered
        updates have it staged when this returns, others applied. A `void` one, of zeros, makes no step by itself. The
        `note`s of a group's members are `heard` by all workers that are admitted on the version that the group makes.

        Raises `Refused` if the policy (`Superseded`) or a shard (NaN, a past incarnation) refuses it; then it counts
        nowhere, but for updates without order, which the other shards may have applied.
        """
        group = await self.offer(base) if self.servers.may_refuse else None
        servers = self.servers
        said: dict[str, Any] = {} if note is None else {"note": note}
        counts: dict[str, Any] = {"gradients": gradients} | ({"exponent": exponent} if exponent else {})
        counts |= {"void": True} if void else {}
        if servers.clocked is not None:
            clocked = [servers.clocked]
            start = await self._pushing(update, weight, base, lr, clocked, "push", group=group, **said, **counts)
            return [reply.fields["version"] for reply in await self._every(start)]
        replies = await self._push_to_shards(update, weight, base, lr, **counts)
        if servers.ordered:
            await self._clock("staged", group=group, **self._mine, **said)
        return [reply.fields["version"] for reply in replies]

    async def _push_to_shards(
        self,
        update: torch.Tensor,
        weight: float,
        base: Sequence[int] | None,
        lr: float | Sequence[float] | None,
        **counts: Any,
    ) -> list[Reply]:
        """To all or, where updates have an order, to none."""
        start = await self._pushing(update, weight, base, lr, self.servers.shards, "push", **counts)
        try:
            return await self._every(start)
        except Refused:
            if self.servers.ordered:
                await self._withdraw()
            raise

    @property
    def _mine(self) -> dict[str, Any]:
        """What the last update is known by."""
        return {"worker": self.worker, "incarnation": self.incarnation, "seq": self.seq}

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
        """Push and go on from what the servers have then.

        Without order, as `push` and `pull` in one call to each: what each shard has once the update is applied. With
        it, as `push`, `ask` and `pull` of that version: in one call where shard and clock are `clocked`, else in three
        (the update, word of it and the question, the version); `held` is how many seconds this worker was kept waiting
        for others, the clock's answer included where it comes alone. Without `into`, the shard's own memory is borrowed
        (`lends`). The next updates are computed on it.
        """
        clocked, place = self.servers.clocked, partial(self._place, into)
        counts: dict[str, Any] = {"gradients": gradients} | ({"void": True} if void else {})
        if clocked is not None:
            start = await self._pushing(update, weight, base, lr, [clocked], "exchange", place, **counts)
            return await self._once_admitted(start, into)
        if self.servers.ordered:
            await self._push_to_shards(update, weight, base, lr, **counts)
            asked = self.node.now()
            version = await self._until_admitted("next", group=None, seq=self.seq)
            self.held = self.node.now() - asked
            pulling = self.borrow(version, to_work=True) if into is None else self.pull(into, version, to_work=True)
            return await pulling
        start = await self._pushing(update, weight, base, lr, self.servers.shards, "push", place, pull=True, **counts)
        replies = await self._every(start)
        return self._brought([reply.fields["version"] for reply in replies], replies[0], into)

    async def _pushing(
        self,
        update: torch.Tensor,
        weight: float,
        base: Sequence[int] | None,
        lr: float | Sequence[float] | None,
        to: Sequence[Address],
        method: str,
        place: Callable[[int], Sequence[torch.Tensor] | None] | None = None,
        **more: Any,
    ) -> Callable[[int], Operation[Reply]]:
        """What starts to push the next update to a shard; with `place`, what it answers is received there."""
        self.seq += 1
        servers, seq = self.servers, self.seq
        if lr is not None:
            more["lr"] = lr
        parts = await self._encoded(update) if self.coders else self._parts(update)

        def start(shard: int) -> Operation[Reply]:
            return self.node.call(
                to[shard],
                method,
                *parts[shard],
                into=() if place is None else place(shard),
                timeout=self.timeout,
                **({} if place is None else self._has(shard)),
                base=None if base is None else base[shard],
                weight=weight,
                ordered=servers.ordered,
                worker=self.worker,
                incarnation=self.incarnation,
                seq=seq,
                **more,
            )

        return start

    async def arrive(self, note: Mapping[str, float]) -> None:
        """Tell the clock that this worker has done its part of what a group ends, with no update in it."""
        self.seq += 1
        await self._clock("staged", group=None, note=note, **self._mine)

    async def stage(self, update: torch.Tensor) -> int:
        """Leave `update` with the shards, for whoever commands them (`vectors`); the number that it has there.

        Raises `Refused` if a shard refuses it (NaN, a past incarnation); the others may have it then.
        """
        self.seq += 1
        parts, shards = self._parts(update), self.servers.shards
        call, mine, timeout = self.node.call, self._mine, self.timeout

        def start(shard: int) -> Operation[Reply]:
            return call(shards[shard], "stage", *parts[shard], timeout=timeout, **mine)

        await self._every(start)
        return self.seq

    async def fetch(self, into: torch.Tensor, name: str) -> None:
        """The shards' vector called `name` (`vectors`), received into `into`. Raises `Refused` if there is none."""
        parts, shards, timing_only = self._parts(into), self.servers.shards, self.servers.timing_only

        def start(shard: int) -> Operation[Reply]:
            destination = () if timing_only else parts[shard]
            return self.node.call(shards[shard], "fetch", into=destination, timeout=self.timeout, name=name)

        await self._every(start)

    def heartbeat(self) -> None:
        """Tell the clock, now and then, that this worker makes progress though it has pushed nothing for a while."""
        now = self.node.now()
        if self.servers.clock is not None and now >= self._spoke + PROGRESS_SECONDS:
            self._spoke = now
            self.node.call(self.servers.clock, "progress", worker=self.worker, incarnation=self.incarnation)

    async def offer(self, base: Sequence[int] | None = None) -> int:
        """Ask whether an update computed on `base` will count; its group. Raises `Superseded` if not."""
        oldest = min(base) if base else 0
        reply = await self._clock("offer", worker=self.worker, incarnation=self.incarnation, base=oldest)
        group: int | None = reply.fields["group"]
        if group is None:
            raise Superseded(reply.fields["reason"])
        return group

    def watch(self) -> Operation[Reply]:
        """Word, some time, that what this worker computes is in vain; `version` says on which."""
        return self.node.call(self._address("watch"), "watch", worker=self.worker, incarnation=self.incarnation)

    async def status(self) -> list[Mapping[str, Any]]:
        """The counters of every shard."""
        call, shards = self.node.call, self.servers.shards
        replies = await self._every(lambda shard: call(shards[shard], "status", timeout=self.timeout))
        return [reply.fields for reply in replies]

    def state(self) -> dict[str, int]:
        """What survives a restart."""
        return {"incarnation": self.incarnation, "seq": self.seq}

    def restore(self, state: Mapping[str, int]) -> None:
        self.incarnation, self.seq = state["incarnation"], state["seq"]
        for follower in self.followers:
            follower.version = None

    def _told(self, *, to_work: bool) -> dict[str, Any]:
        """What shards that look back are told of a pull."""
        return {"worker": self.worker, "incarnation": self.incarnation} if to_work and self.servers.look_back else {}

    # ---- calls

    def _parts(self, flat: torch.Tensor) -> Sequence[Sequence[torch.Tensor]]:
        """Views of `flat`, by shard."""
        if self.servers.timing_only:
            return self.servers.ghosts
        return [pieces(flat, ranges) for ranges in self.servers.ranges]

    async def _encoded(self, update: torch.Tensor) -> Sequence[Sequence[torch.Tensor]]:
        """Messages of `update`, by shard. A residual changes here, so this is once for all attempts."""
        slices = (gather(update, ranges) for ranges in self.servers.ranges)
        await self.node.compute(taking(*(CodecWork("encode", coder.numel) for coder in self.coders)))
        return [[coder.encode(part)] for coder, part in zip(self.coders, slices, strict=True)]

    async def _withdraw(self) -> None:
        """Take back what other shards have staged of the last update, which was refused."""
        for shard in self.servers.shards:
            with suppress(RemoteError):
                await self.node.call(shard, "withdraw", timeout=self.timeout, **self._mine)

    def _address(self, method: str) -> Address:
        clock = self.servers.clock
        if clock is None:
            raise Refused(f"{method}: these servers have no clock.")
        return clock

    async def _clock(self, method: str, **fields: Any) -> Reply:
        call, clock, timeout = self.node.call, self._address(method), self.timeout
        try:
            return await call(clock, method, timeout=timeout, **fields)
        except CallTimeout as late:
            return await self._insist(partial(call, clock, method, timeout=timeout, **fields), late)

    async def _every(self, start: Callable[[int], Operation[Reply]]) -> list[Reply]:
        """Call every shard at once; the first error is raised when all have ended."""
        count = len(self.servers.shards)
        if count == 1:
            return [await self._insisting(partial(start, 0))]
        operations = [start(shard) for shard in range(count)]
        replies = []
        error: RemoteError | None = None
        for shard, operation in enumerate(operations):
            try:
                try:
                    reply = await operation
                except (CallTimeout, PeerLost) as failed:
                    reply = await self._insist(partial(start, shard), failed)
            except RemoteError as final:
                error = error or final
            else:
                replies.append(reply)
        if error is not None:
            raise error
        return replies

    async def _insisting(self, start: Callable[[], Operation[Reply]]) -> Reply:
        """Call, and call again until an attempt is answered or was the last."""
        try:
            return await start()
        except (CallTimeout, PeerLost) as failed:
            return await self._insist(start, failed)

    async def _insist(self, again: Callable[[], Operation[Reply]], failed: CallTimeout | PeerLost) -> Reply:
        """Call once more, and again, until an attempt is answered or was the last; the first has `failed`."""
        left, until = self.attempts - 1, math.inf
        while True:
            if isinstance(failed, PeerLost):
                until = min(until, self.node.now() + self.return_seconds)
                if not self.return_seconds or self.node.now() >= until:
                    raise failed
                await self.node.sleep(AGAIN_SECONDS)
            elif not left:
                raise failed
            else:
                left -= 1
            try:
                return await again()
            except (CallTimeout, PeerLost) as still:
                failed = still


def _nbytes_of_the_only_range(servers: Servers) -> int | None:
    """What one shard holds in one piece; None where the model is cut."""
    if len(servers.ranges) != 1 or len(servers.ranges[0]) != 1:
        return None
    ((start, stop),) = servers.ranges[0]
    return (stop - start) * servers.itemsize
