"""The servers of an attached model: helper processes of the ranks, shard s beside rank s modulo their number.

A helper has one shard, and server 0 the clock too (`ShardHost`):

    rank 0   open (its slice of the initial values) ->  shard and clock are there
    ranks    ... what the method calls ...
             finish (buffers) ----------------------->  once every rank has finished or failed: the buffers of all
             the connection ends -------------------->  exits when no connection is left
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch

from dure.codec.base import COMBINED_SEED
from dure.codec.coder import SliceLayout
from dure.codec.fp32 import Float32
from dure.core.node import Address, Call, Operation, Reply, TensorSpec
from dure.core.protocol import PLACE, WORKERS, RemoteService, carrying, mapping, remote
from dure.core.vectors import pieces
from dure.errors import CallTimeout, Refused, UsageError
from dure.job.optimizer import GroupRange, OptimizerSpec, restrict
from dure.job.rates import Rates
from dure.job.replica import as_bytes, copy_bytes
from dure.run.server_side import CLOCK, ServerSide
from dure.run.servers import HostedServer
from dure.run.strategy import catalogue, make, member_text, name_of
from dure.runtime.launch.shard_process import ShardProcess, Starter
from dure.runtime.memory import SHARD_PROCESS_NBYTES, check_memory, physical_memory
from dure.runtime.process.node import ProcessNode
from dure.runtime.wire import Credentials, Identity, Loss
from dure.sync import lifecycle
from dure.sync.base import traits_of
from dure.topology.collective.compressed import WIDE
from dure.topology.parameter_server.client import ServerClient
from dure.topology.parameter_server.session import ServerSession
from dure.topology.parameter_server.shard import Shard
from dure.topology.parameter_server.staging import Corrections
from dure.topology.parameter_server.topology import held_by
from dure.user_loop.optimizer import AT_SERVERS, FlatRule

if TYPE_CHECKING:
    from dure.codec.base import Codec
    from dure.job.replica import Replica
    from dure.run.strategy import Strategy
    from dure.runtime.launch.rendezvous import Rendezvous
    from dure.sync.worker_state import WorkerState
    from dure.topology.collective.topology import Intention
    from dure.user_loop.optimizer import UserOptimizer
    from dure.user_loop.source import Failed, LoopSource


MOST_SHARDS = 64
"""Servers of an attached model on one machine: each is a process of its own."""


class LoopServers:
    """Ties over parameter servers. Raises `UsageError` for what servers cannot do with the user's optimizer.

    `overflowed` and `skipped` are never set: each rank skips its own steps. `bytes_sent` is 0: all bytes go over the
    wire.
    `undone_at` names the calls that undo a change of the model in place: where servers have the only model, all that
    pull it, and else the end.
    """

    overflowed = skipped = False
    bytes_sent = 0

    def __init__(
        self,
        node: ProcessNode,
        rendezvous: Rendezvous,
        replica: Replica,
        strategy: Strategy,
        mine: UserOptimizer,
        credentials: Credentials,
    ) -> None:
        sync: Any = strategy.sync
        topology: Any = strategy.topology
        if name_of("sync", sync) not in catalogue("sync"):
            raise UsageError(
                f"{type(sync).__name__} is not in the catalogue of dure.sync, so helper processes cannot make it. Add "
                'its line there, or attach over collectives (topology="collective").'
            )
        self._node = node
        self._credentials = credentials
        self._meeting = rendezvous
        self._replica = replica
        self._sync = sync
        self._ranges = held_by(topology, replica.layers, replica.numel)
        self._world_size = rendezvous.place.world_size
        self._side = ServerSide(sync, self._world_size, len(self._ranges))
        self._rule = None if self._side.own_rule else FlatRule(mine.optimizer, replica)
        if self._rule is not None:
            mine.refuse_states(AT_SERVERS)
        pulls = self._rule is not None or traits_of(sync).delivers == "server"
        self.undone_at = ("step", "skip", "evaluation", "close") if pulls else ("close",)
        self._codec = None if isinstance(strategy.codec, Float32) else strategy.codec
        self._layouts = [SliceLayout.of(replica.layers, ranges) for ranges in self._ranges]
        _check_codec(self._codec, replica.dtype)
        self._spec = self._side.optimizer(self._rule.spec if self._rule else OptimizerSpec())
        self._helpers: list[ShardProcess] = []
        self._check_room()

    def processes(self) -> Mapping[str, int]:
        """The process numbers of the servers that this rank has started."""
        place, size = self._meeting.place, self._world_size
        return {f"server {place.rank + size * number}": each.pid for number, each in enumerate([*self._helpers])}

    def _check_room(self) -> None:
        """Raise `UsageError` if the servers of this machine's ranks are too many, or do not fit in its memory."""
        shards, place = len(self._ranges), self._meeting.place
        here = -(-shards * place.local_size // place.world_size)
        if here > MOST_SHARDS:
            raise UsageError(
                f"{shards} shards make {here} helper processes on one machine, and at most {MOST_SHARDS} are started: "
                f'more servers than ranks rarely help. Write topology="ps:shards={place.world_size}".'
            )
        nbytes = self._replica.params.nbytes // shards
        instead = "take fewer shards, or a method over collectives"
        check_memory(here, nbytes, physical_memory(), own=SHARD_PROCESS_NBYTES, instead=instead)

    def rates(self) -> list[float] | None:
        """The present rate of each parameter group, which travels with the next update; None under a method's rule."""
        return None if self._rule is None else self._rule.rates()

    # ---- the start

    async def begin(self, worker: WorkerState, source: LoopSource, failed: Failed) -> None:
        """Have the servers hold rank 0's model, and every replica start from it."""
        first = self._first(worker)
        self._start_mine(worker, first)
        names = [f"server {number}" for number in range(len(self._ranges))]
        directory = {name: self._meeting.get(name) for name in names}
        self._node.directory.update({name: (host, port) for name, (host, port) in directory.items()})
        if worker.rank == 0:
            await self._open(directory, first)
            self._meeting.put("open", True)
        self._meeting.get("open")  # before that a server has no shard to call
        reached = self._side.as_reached(self._ranges, codec=self._codec, layouts=self._layouts)
        client = ServerClient(self._node, worker.rank, reached)
        worker.sessions.server = ServerSession(worker, client)
        await lifecycle.join(worker, newcomer=False)
        await worker.server.pull()
        if first:
            await self._node.call(_host(0), "first", into=first)
            self._load(worker, first)
        self._meeting.exchange("ready", True)

    def _first(self, worker: WorkerState) -> list[torch.Tensor]:
        """The values besides trained parameters that all ranks take from rank 0: buffers, and constants as bytes."""
        constants = [as_bytes(constant).cpu() for constant in self._replica.constants.values()]
        every = [] if worker.buffers is None else [worker.buffers]
        if self._world_size > 1 and any(each.numel() for each in constants):
            every.append(torch.cat(constants))
        return every

    def _load(self, worker: WorkerState, first: Sequence[torch.Tensor]) -> None:
        """Load the values `first` of rank 0 into the replica."""
        if worker.buffers is not None:
            self._replica.load_buffers(worker.buffers)
        if first[-1] is not worker.buffers:
            constants = list(self._replica.constants.values())
            parts = torch.split(first[-1], [constant.nbytes for constant in constants])
            for constant, values in zip(constants, parts, strict=True):
                copy_bytes(constant, values)

    def _start_mine(self, worker: WorkerState, first: Sequence[torch.Tensor]) -> None:
        place = self._meeting.place
        mine = range(place.rank, len(self._ranges), place.world_size)
        for number in mine:
            request = {**self._request(number), "buffers": 0, "constants": 0}
            if number == 0:
                request |= {"buffers" if each is worker.buffers else "constants": each.numel() for each in first}
            self._helpers.append(ShardProcess(__name__, f"server {number}", request))
        for number, helper in zip(mine, self._helpers, strict=True):
            self._meeting.put(f"server {number}", [place.interface, helper.answer()["port"]])

    def _request(self, number: int) -> Mapping[str, Any]:
        place = self._meeting.place
        return {
            "run": self._node.identity.job,
            "credentials": self._credentials.plain(),
            "number": number,
            "shards": len(self._ranges),
            "workers": place.world_size,
            "interface": place.interface,
            "ranges": self._ranges[number],
            "dtype": str(self._replica.dtype).removeprefix("torch."),
            "sync": member_text("sync", self._sync),
            "codec": member_text("codec", self._codec or Float32()),
            "layout": list(self._layouts[number]),
            "optimizer": asdict(self._spec),
            "segments": self._segments(),
        }

    def _segments(self) -> list[GroupRange]:
        """The user's parameter groups, as the servers' optimizer applies them."""
        if self._rule is None:
            return []
        return Rates(self._rule.spec, self._rule.segments).seen_by(self._side.optimizer)

    async def _open(self, directory: Mapping[str, Any], first: Sequence[torch.Tensor]) -> None:
        for number, ranges in enumerate(self._ranges):
            slices = pieces(self._replica.params, ranges)
            extra = [] if number else first
            await self._node.call(_host(number), "open", *slices, *extra, directory=dict(directory))

    # ---- between steps

    def intend(self, mine: Intention) -> bool:
        """Whether this rank goes on. It asks no other rank: over servers each may end after any step."""
        return mine != "end"

    async def delivered(self, worker: WorkerState) -> WorkerState:
        """A worker with the servers' parameters, as they are, and the buffers of this rank."""
        return replace(worker, params=(await worker.server.client.pull(worker.params.clone())).values)

    async def share_buffers(self, worker: WorkerState) -> None:
        """Do nothing: over servers no two ranks meet at a step."""

    # ---- the end

    async def leave(self, worker: WorkerState) -> None:
        """Leave the servers' clock, so that no rank waits for this one."""
        # Not `finished`: that may end the work of the others where too few are left, and their loops still go on.
        await worker.server.leave(finished=False)

    async def finish(self, worker: WorkerState) -> torch.Tensor:
        """Wait until all ranks have finished; returns the servers' parameters, and merges the buffers of all ranks."""
        await self.leave(worker)
        for number in range(len(self._ranges)):
            await self._finish(number, worker)
        version = None
        if self._side.policy is not None:
            version = (await self._node.call(CLOCK, "status")).fields["version"]
        return (await worker.server.client.pull(worker.params.clone(), version=version)).values

    async def _finish(self, number: int, worker: WorkerState) -> None:
        """Wait for the other ranks at a server, without a time limit; the loss of the server ends the wait."""
        mine = [worker.buffers] if worker.buffers is not None and not number else []
        rows = [each.new_empty(worker.world_size * each.numel()) for each in mine]
        reply: Reply | None = None
        while reply is None:
            with suppress(CallTimeout):
                reply = await self._node.call(_host(number), "finish", *mine, into=rows)
        if rows:
            found = rows[0].view(worker.world_size, -1)
            worker.buffers = worker.merge_buffers([found[rank] for rank in reply.fields["ranks"]])

    def close(self, *, failed: bool = False) -> None:
        """Wait until no rank uses this rank's servers; after a failure, kill them."""
        for helper in self._helpers:
            if failed:
                helper.kill()
            else:
                helper.until_gone(self._node.loop.check)
        self._helpers.clear()


def _check_codec(codec: Codec | None, dtype: torch.dtype) -> None:
    if codec is not None and dtype not in WIDE:
        raise UsageError(
            f"the model's parameters are {dtype}, and over servers {member_text('codec', codec)} encodes float32 and "
            'float64. Leave the codec out, or take topology="collective".'
        )
    if codec is not None and codec.vote() is not None:
        raise UsageError(
            f"{member_text('codec', codec)} has servers count votes, and workers apply the result by the rule of a "
            'run. In a loop it goes over collectives: topology="collective".'
        )


def name_of_run() -> str:
    """A name that no other run has."""
    return f"attach-{secrets.token_hex(4)}"


def _host(number: int) -> Address:
    return Address(f"server {number}", "host")


class ShardHost(RemoteService):
    """The service through which the ranks set up and take down one server.

    `request` holds: `credentials`, `number` of `shards`, `workers`, `ranges` of the flat parameters, `dtype`, `sync` as
    text, `optimizer` and `segments` as plain values, how many elements of `buffers` each rank has and how many bytes of
    `constants` (0 but on server 0), `codec` as text and the `layout` of its slice.
    """

    def __init__(self, node: ProcessNode, request: Mapping[str, Any]) -> None:
        self.over: Operation[None] = node.promise("all workers to go")
        self._node = node
        self._request = request
        self._of_rank_0: Sequence[torch.Tensor] = ()
        self._last: dict[int, torch.Tensor] = {}
        self._finished: set[str] = set()
        self._gone: set[str] = set()
        self._all_finished: Operation[None] = node.promise("all workers to finish")
        node.on_lost = self._lost

    @property
    def buffers(self) -> Sequence[TensorSpec]:
        """The buffers of a rank as tensors of a call."""
        count = self._request["buffers"]
        return [TensorSpec("float64", count)] if count else []

    @property
    def opened(self) -> Sequence[TensorSpec]:
        """The slice of this server, the buffers and the constants of rank 0."""
        dtype, nbytes = self._request["dtype"], self._request["constants"]
        constants = [TensorSpec("uint8", nbytes)] if nbytes else []
        slices = (TensorSpec(dtype, stop - start) for start, stop in self._request["ranges"])
        return [*slices, *self.buffers, *constants]

    def unknown(self, call: Call) -> str:
        return f"{call.caller} may not ask the host of {self._node.name} to {call.method}."

    @remote(("worker 0",), directory=mapping(PLACE))
    @carrying(lambda host: host.opened)
    def _open(self, call: Call) -> Reply:
        """Host the shard, which can be called then; from rank 0 alone."""
        if call.caller != "worker 0":
            raise Refused(self.unknown(call))
        request, node = self._request, self._node
        ranges = [(start, stop) for start, stop in request["ranges"]]
        node.directory.update({name: (host, port) for name, (host, port) in call.fields["directory"].items()})
        slices = call.tensors[: len(ranges)]
        self._of_rank_0 = [tensor.clone() for tensor in call.tensors[len(ranges) :]]
        values = torch.cat([torch.empty(0, dtype=getattr(torch, request["dtype"])), *slices])
        segments = restrict([GroupRange(*segment) for segment in request["segments"]], ranges)
        spec = OptimizerSpec(**{**request["optimizer"], "betas": tuple(request["optimizer"]["betas"])})
        side = ServerSide(make(request["sync"], "sync"), request["workers"], request["shards"])
        remedies: dict[str, Any] = {"corrections": Corrections.of(side.corrections), "max_delay": side.max_delay}
        codec = make(request["codec"], "codec")
        if not isinstance(codec, Float32):
            remedies["coder"] = codec.coder(SliceLayout(*request["layout"]), COMBINED_SEED)
        server = HostedServer(node, Shard(node, values, spec, ranges=ranges, segments=segments, **remedies))
        if request["number"] == 0:
            # The user's loop may rest as long as it likes, to evaluate or to save: no worker is evicted.
            server.clock = side.clock(node, present=range(request["workers"]), evict_seconds=math.inf)
        server.serve()
        return Reply()

    @remote(WORKERS)
    def _first(self, call: Call) -> Reply:
        """The buffers and constants of rank 0."""
        return Reply(tensors=self._of_rank_0)

    @remote(WORKERS)
    @carrying(lambda host: host.buffers)
    async def _finish(self, call: Call) -> Reply:
        """Once all have finished: the ranks that sent buffers, and the buffers."""
        if call.tensors:
            self._last[int(call.caller.split()[1])] = call.tensors[0].clone()
        self._finished.add(call.caller)
        self._check()
        await self._all_finished
        if not call.tensors:
            return Reply()
        empty = torch.zeros(self._request["buffers"], dtype=torch.float64)
        rows = [self._last.get(rank, empty) for rank in range(self._request["workers"])]
        return Reply({"ranks": sorted(self._last)}, [torch.cat(rows)])

    def _lost(self, loss: Loss) -> None:
        if loss.incoming and loss.peer.startswith("worker"):
            self._gone.add(loss.peer)
            self._check()

    def _check(self) -> None:
        if len(self._finished | self._gone) == self._request["workers"]:
            self._all_finished.resolve()
        if len(self._gone) == self._request["workers"]:
            self.over.resolve()


def main(starter: Starter) -> None:
    """Entry point of a helper process, which serves one shard until all ranks have closed their connections."""
    torch.set_num_threads(1)  # it runs beside the ranks, on the same cores
    request = starter.request()
    identity = Identity(request["run"], f"server {request['number']}", request["number"])
    node = ProcessNode(identity, Credentials.of(request["credentials"]))
    host = ShardHost(node, request)
    node.serve("host", host)  # before the port is known: from then on ranks call it
    port = node.wire.listen(request["interface"])
    starter.answer(port=port)
    node.loop.run_until(host.over)
    node.wire.close()
