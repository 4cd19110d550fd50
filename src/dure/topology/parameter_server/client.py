"""A worker's pushes to its parameter servers, and pulls from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from dure.core.node import Address, CodecWork, EndOfWork, Node, Operation, Reply, taking
from dure.core.ranges import Ranges, gather, pieces, size
from dure.errors import CallTimeout, Refused, RemoteError, WorkOver
from dure.topology.parameter_server.calls import RepeatedCalls, Sender
from dure.topology.parameter_server.clock_client import ClockClient
from dure.topology.parameter_server.following import Following
from dure.topology.parameter_server.verdicts import Follower
from dure.topology.replica import Pulled

if TYPE_CHECKING:
    from dure.job.optimizer import GroupRange, OptimizerSpec
    from dure.topology.parameter_server.layout import ServerLayout


class ServerClient:
    """A worker's pushes to its servers, and pulls from them.

    An update costs one call per shard and, if ordered, one `staged` to the clock (`clock`), which in a `push_pull` asks
    for the next step too. Where one server has both (`ServerLayout.clocked`) they are one call, and `push_pull` is all
    that a step costs. If the policy may refuse updates, an `offer` comes before, so that an update is refused before
    its bytes travel. A call that is not answered in `timeout` seconds is made again, up to `attempts` times, under the
    same number; a question of admission as often as it takes. `held` are the seconds of the last `next_version` or
    `push_pull` in which this worker waited for others.
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
        self.calls = RepeatedCalls(node, len(servers.shards), timeout, attempts)
        self.clock = ClockClient(self.calls, self.sender, servers.clock)
        self.held = 0.0
        self.following: Following | None = None
        codec, layouts = servers.codec, servers.layouts
        self.coders = [] if codec is None else [codec.coder(layout, seed=worker) for layout in layouts]
        self._whole = servers.whole_nbytes

    def follow(
        self, values: torch.Tensor, rule: OptimizerSpec, segments: Sequence[Sequence[GroupRange]] | None = None
    ) -> None:
        """Receive verdicts in place of models from now on, and apply them by `rule`, which is the shards'.

        `values` is the model at version 0, `segments` are each shard's.
        """
        parts = zip(self.servers.ranges, segments or [()] * len(self.coders), self.coders, strict=True)
        followers = [Follower(values, ranges, rule, own, coder) for ranges, own, coder in parts]
        self.following = Following(followers, self.calls, self.servers)

    async def next_version(self, into: torch.Tensor | None) -> Pulled:
        """As `clock.ask` and then `pull` or, without `into`, `borrow`, in one call, where one server has both."""
        clocked = self.servers.clocked
        assert clocked is not None
        sender, place = self.sender, self._place(into, 0)
        has = {} if self.following is None else self.following.has(0)
        call = partial(self.node.call, clocked, "proceed", into=place, timeout=self.calls.timeout, **has)
        return await self._once_admitted(lambda _: call(worker=sender.worker, incarnation=sender.incarnation), into)

    async def _once_admitted(self, start: Callable[[int], Operation[Reply]], into: torch.Tensor | None) -> Pulled:
        """The parameters that a call to a clocked shard brings. The call is made again as often as it takes."""
        while True:
            try:
                (reply,) = await self.calls.every(start)
            except CallTimeout:
                continue
            except WorkOver:
                raise EndOfWork from None
            self.held = reply.fields["held"]
            version = self.clock.admitted(reply)
            if self.following is not None:
                assert into is not None
                return await self.following.apply([reply], into, version)
            return self._brought([version], reply, into)

    def _brought(self, versions: list[int], reply: Reply, into: torch.Tensor | None) -> Pulled:
        """The parameters of a reply: in `into`, or lent."""
        if into is not None:
            return Pulled(into, versions)
        (values,) = reply.tensors
        return Pulled(values, versions, reply.release)

    def _place(self, into: torch.Tensor | None, shard: int) -> Sequence[torch.Tensor] | None:
        """Memory that a shard's reply is received into; None where it is borrowed."""
        if self.following is not None:
            return self.following.message(shard)
        if into is None:
            return None
        return () if self.servers.timing_only else pieces(into, self.servers.ranges[shard])

    async def pull(self, into: torch.Tensor, version: int | None = None, *, to_work: bool = False) -> Pulled:
        """The parameters, received into `into`: exactly `version`, once there, or what each shard has now.

        With `to_work` this worker's next updates are computed on them.

        Raises `Refused` if `version` is no longer kept.
        """
        if to_work and self.following is not None:
            return await self.following.pull(into, version)
        parts = self.servers.parts(into)
        call, shards, timing_only = self.node.call, self.servers.shards, self.servers.timing_only
        reader = self._reader(to_work=to_work)

        def start(shard: int) -> Operation[Reply]:
            destination = () if timing_only else parts[shard]
            return call(shards[shard], "pull", into=destination, timeout=self.calls.timeout, version=version, **reader)

        replies = await self.calls.every(start)
        return Pulled(into, [reply.fields["version"] for reply in replies])

    async def look(self, into: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The newest values of each shard, received into `into`, and the number of gradients that every shard holds."""
        parts, call, shards = self.servers.parts(into), self.node.call, self.servers.shards
        replies = await self.calls.every(
            lambda shard: call(shards[shard], "pull", into=parts[shard], timeout=self.calls.timeout, counted=True)
        )
        return into, min(reply.fields["gradients"] for reply in replies)

    def gradients_at(self, versions: Sequence[int]) -> list[Operation[Reply]]:
        """Ask each shard how many `gradients` are in its part of a version that this worker works on."""
        places = zip(self.servers.shards, versions, strict=True)
        return [self.node.call(shard, "held", timeout=self.calls.timeout, version=version) for shard, version in places]

    @property
    def lends(self) -> bool:
        """Whether parameters can be borrowed: one shard holds them all, where this worker can read them."""
        whole = self._whole if self.following is None else None
        return whole is not None and self.node.borrows(self.servers.shards[0].node, whole)

    async def borrow(self, version: int | None = None, *, to_work: bool = False) -> Pulled:
        """As `pull`, but the shard's own memory, not a copy: to be read, and released."""
        reader = self._reader(to_work=to_work)
        shard, call, timeout = self.servers.shards[0], self.node.call, self.calls.timeout
        reply = await self.calls.one(lambda: call(shard, "pull", into=None, timeout=timeout, version=version, **reader))
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
        """Push `update`, made of `gradients`; each shard's version once it is staged (if ordered) or applied.

        `base` are the versions that it was computed on (`Pulled.versions`). `weight`, times e to the `exponent`, is its
        share in a weighted mean. `lr` is a rate in place of the servers'. A `void` update, of zeros, makes no step by
        itself. Workers that are admitted on the version that a group makes get the `note`s of its members
        (`ClockClient.stats`).

        Raises `Refused` if the policy (`Superseded`) or a shard (NaN, a past incarnation) refuses it. A refused update
        counts nowhere, but for updates without order, which the other shards may have applied.
        """
        group = await self.clock.offer(base) if self.servers.may_refuse else None
        servers = self.servers
        counts: dict[str, Any] = {"gradients": gradients} | ({"exponent": exponent} if exponent else {})
        counts |= {"void": True} if void else {}
        if servers.clocked is not None:
            report: dict[str, Any] = {"group": group} | ({} if note is None else {"note": note})
            start = await self._pushing(update, weight, base, lr, [servers.clocked], "push", **report, **counts)
            return [reply.fields["version"] for reply in await self.calls.every(start)]
        replies = await self._push_to_shards(update, weight, base, lr, **counts)
        if servers.ordered:
            await self.clock.staged(group, note)
        return [reply.fields["version"] for reply in replies]

    async def _push_to_shards(
        self,
        update: torch.Tensor,
        weight: float,
        base: Sequence[int] | None,
        lr: float | Sequence[float] | None,
        **counts: Any,
    ) -> list[Reply]:
        """Push to all shards or, where updates have an order, to none."""
        start = await self._pushing(update, weight, base, lr, self.servers.shards, "push", **counts)
        try:
            return await self.calls.every(start)
        except Refused:
            if self.servers.ordered:
                await self._withdraw()
            raise

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
        applied. With order, as `push`, `clock.ask` and `pull` of that version: in one call where one server has shard
        and clock, else in three (the update; its report and the question; the version). Without `into`, the shard's own
        memory is borrowed (`lends`).
        """
        clocked, place = self.servers.clocked, partial(self._place, into)
        counts: dict[str, Any] = {"gradients": gradients} | ({"void": True} if void else {})
        if clocked is not None:
            start = await self._pushing(update, weight, base, lr, [clocked], "exchange", place, **counts)
            return await self._once_admitted(start, into)
        if self.servers.ordered:
            await self._push_to_shards(update, weight, base, lr, **counts)
            asked = self.node.now()
            version = await self.clock.report_and_ask()
            self.held = self.node.now() - asked
            pulling = self.borrow(version, to_work=True) if into is None else self.pull(into, version, to_work=True)
            return await pulling
        start = await self._pushing(update, weight, base, lr, self.servers.shards, "push", place, pull=True, **counts)
        replies = await self.calls.every(start)
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
        """A function that starts to push the next update to a shard, whose answer is received in `place`."""
        servers, sender, following = self.servers, self.sender, self.following
        sender.seq += 1
        seq = sender.seq
        if lr is not None:
            more["lr"] = lr
        parts = await self._encoded(update) if self.coders else self.servers.parts(update)

        def start(shard: int) -> Operation[Reply]:
            return self.node.call(
                to[shard],
                method,
                *parts[shard],
                into=() if place is None else place(shard),
                timeout=self.calls.timeout,
                **({} if place is None or following is None else following.has(shard)),
                base=None if base is None else base[shard],
                weight=weight,
                ordered=servers.ordered,
                worker=sender.worker,
                incarnation=sender.incarnation,
                seq=seq,
                **more,
            )

        return start

    async def status(self) -> list[Mapping[str, Any]]:
        """The counters of every shard."""
        call, shards = self.node.call, self.servers.shards
        replies = await self.calls.every(lambda shard: call(shards[shard], "status", timeout=self.calls.timeout))
        return [reply.fields for reply in replies]

    def state(self) -> dict[str, int]:
        """What survives a restart."""
        return {"incarnation": self.sender.incarnation, "seq": self.sender.seq}

    def restore(self, state: Mapping[str, int]) -> None:
        self.sender.incarnation, self.sender.seq = state["incarnation"], state["seq"]
        if self.following is not None:
            self.following.restart()

    def _reader(self, *, to_work: bool) -> dict[str, Any]:
        """Fields by which shards that look back know which worker computes on a version."""
        sender = self.sender
        return (
            {"worker": sender.worker, "incarnation": sender.incarnation} if to_work and self.servers.look_back else {}
        )

    async def _encoded(self, update: torch.Tensor) -> Sequence[Sequence[torch.Tensor]]:
        """Messages of `update`, by shard. Encoded once for all attempts, as a residual changes here."""
        await self.node.compute(taking(*(CodecWork("encode", coder.numel) for coder in self.coders)))
        with self.node.beside(update):
            slices = (self._gathered(update, ranges) for ranges in self.servers.ranges)
            return [[coder.encode(part)] for coder, part in zip(self.coders, slices, strict=True)]

    def _gathered(self, update: torch.Tensor, ranges: Ranges) -> torch.Tensor:
        return update[: size(ranges)] if self.servers.timing_only else gather(update, ranges)

    async def _withdraw(self) -> None:
        """Withdraw the last update from shards that have staged it, since another one has refused it."""
        for shard in self.servers.shards:
            with suppress(RemoteError):
                await self.node.call(shard, "withdraw", timeout=self.calls.timeout, **self.sender.last)
