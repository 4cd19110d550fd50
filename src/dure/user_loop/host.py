"""The helper process of one server of an attached model: its shard, and on server 0 the clock.

rank 0   open (its slice of the initial values) ->  shard and clock are there
ranks    ... what the method calls ...
finish (buffers) ------------------------>  once every rank has finished or failed: the buffers of all
the connection ends --------------------->  exits when no connection is left
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dure.core.node import Call, Operation, Reply, TensorSpec
from dure.core.protocol import PLACE, WORKERS, RemoteService, carrying, mapping, remote
from dure.errors import Refused
from dure.job.optimizer import GroupRange, OptimizerSpec, restrict
from dure.run.server_side import ServerSide
from dure.run.servers import HostedServer
from dure.run.strategy import make
from dure.runtime.launch.shard_process import Starter
from dure.runtime.process.node import ProcessNode
from dure.runtime.wire import Credentials, Identity, Loss
from dure.topology.parameter_server.shard import Shard
from dure.topology.parameter_server.staging import Corrections


class ShardHost(RemoteService):
    """The service through which the ranks set up and take down one server.

    `request` holds: `credentials`, `number` of `shards`, `workers`, `ranges` of the flat parameters, `dtype`, `sync` as
    text, `optimizer` and `segments` as plain values, how many elements of `buffers` each rank has and how many bytes of
    `constants` (0 but on server 0).
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
        """Once all have finished: the ranks that gave buffers, and all of them."""
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
    """The helper's process."""
    torch.set_num_threads(1)
    request = starter.request()
    identity = Identity(request["run"], f"server {request['number']}", request["number"])
    node = ProcessNode(identity, Credentials.of(request["credentials"]))
    host = ShardHost(node, request)
    node.serve("host", host)
    port = node.wire.listen(request["interface"])
    starter.answer(port=port)
    node.loop.run_until(host.over)
    node.wire.close()
