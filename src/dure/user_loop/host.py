"""The helper process of one server of an attached model: its shard, and on server 0 the clock.

rank 0   open (its slice of the initial values) ->  shard and clock are there
ranks    ... what the method calls ...
finish (buffers) ------------------------>  once every rank has finished or failed: the buffers of all
the connection ends --------------------->  exits when no connection is left
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from dure.core.node import Call, Operation, Reply, TensorSpec
from dure.core.protocol import PLACE, WORKERS, Method, mapping
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


class ShardHost:
    """The service through which the ranks set up and take down one server.

    `request` holds: `credentials`, `number` of `shards`, `workers`, `ranges` of the flat parameters, `dtype`, `sync` as
    text, `optimizer` and `segments` as plain values, how many elements of `buffers` each rank has and how many bytes of
    `constants` (0 but on server 0).

    | method   | tensors                       | reply                                                            |
    |----------|-------------------------------|------------------------------------------------------------------|
    | `open`   | slice, (buffers), (constants) | once the shard can be called; from rank 0 alone                  |
    | `first`  |                               | the buffers and constants of rank 0                              |
    | `finish` | (buffers)                     | once all have finished: ranks that gave buffers, and all of them |
    """

    def __init__(self, node: ProcessNode, request: Mapping[str, Any]) -> None:
        self.over: Operation[None] = node.promise("all workers to go")
        self._node = node
        self._request = request
        self._first: Sequence[torch.Tensor] = ()
        self._last: dict[int, torch.Tensor] = {}
        self._finished: set[str] = set()
        self._gone: set[str] = set()
        self._all_finished: Operation[None] = node.promise("all workers to finish")
        node.on_lost = self._lost

    protocol: ClassVar[Mapping[str, Method]] = {
        "open": Method(("worker 0",), {"directory": mapping(PLACE)}),
        "first": Method(WORKERS),
        "finish": Method(WORKERS),
    }

    def expects(self, method: str) -> Sequence[TensorSpec]:
        count = self._request["buffers"]
        buffers = [TensorSpec("float64", count)] if count else []
        if method == "open":
            dtype, nbytes = self._request["dtype"], self._request["constants"]
            constants = [TensorSpec("uint8", nbytes)] if nbytes else []
            return [*(TensorSpec(dtype, stop - start) for start, stop in self._request["ranges"]), *buffers, *constants]
        return buffers if method == "finish" else ()

    def handle(self, call: Call) -> Reply | Awaitable[Reply]:
        if call.method == "open" and call.caller == "worker 0":
            return self._open(call)
        if call.method == "first":
            return Reply(tensors=self._first)
        if call.method == "finish":
            return self._finish(call)
        raise Refused(f"{call.caller} may not ask the host of {self._node.name} to {call.method}.")

    def _open(self, call: Call) -> Reply:
        request, node = self._request, self._node
        ranges = [(start, stop) for start, stop in request["ranges"]]
        node.directory.update({name: (host, port) for name, (host, port) in call.fields["directory"].items()})
        slices = call.tensors[: len(ranges)]
        self._first = [tensor.clone() for tensor in call.tensors[len(ranges) :]]
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

    async def _finish(self, call: Call) -> Reply:
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
