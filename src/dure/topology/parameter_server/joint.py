"""A coordinator over copies of the model that several workers hold together, as DistBelief's replicas are.

    workers of a copy                                     server 0
      each asks, with its report ------------------------>  JointAsks: once all have, one ask of the copy
      <----------------------------- the same portions ---  the coordinator
      each computes its part of the gradients
      each stages its sum at the servers of its part

                              servers of every part         the coordinator
                              <--- commands to `orders` ---   one vector has its slices at all of them

Each part of the model has servers of its own, whose callers are known by their numbers among the workers of the part.
The coordinator is outside of that, so it calls a service of its own on them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from dure.core.protocol import Method
from dure.topology.parameter_server.batch.coordinator import Coordinator
from dure.topology.parameter_server.shard import Shard

if TYPE_CHECKING:
    from dure.core.node import Call, Node, Operation, Reply, TensorSpec


class _JointAsk(NamedTuple):
    """Calls of the workers of a copy, by number in it. Once there is one of each, `answer` is the coordinator's."""

    calls: dict[int, Call]
    answer: Operation[Operation[Reply]]


class JointAsks:
    """The service of a coordinator to copies of the model with `size` workers each, on `node`.

    The coordinator knows copies: copy number i is worker i to it. Worker j of copy i is number `i * size + j`.
    """

    protocol: ClassVar[Mapping[str, Method]] = Coordinator.protocol

    def __init__(self, coordinator: Coordinator, node: Node, size: int) -> None:
        self._coordinator = coordinator
        self._node = node
        self._size = size
        self._open: dict[int, _JointAsk] = {}

    def handle(self, call: Call) -> Reply | Awaitable[Reply]:
        if call.method not in self.protocol:
            return self._coordinator.handle(call)
        copy, worker = divmod(call.fields["worker"], self._size)
        if copy not in self._open:
            self._open[copy] = _JointAsk({}, self._node.promise(f"the asks of all workers of copy {copy} of the model"))
        ask = self._open[copy]
        again = worker in ask.calls
        ask.calls[worker] = call
        if len(ask.calls) == self._size and not again:
            calls = [each for _, each in sorted(ask.calls.items())]
            answer = self._coordinator.asked(replace(call, fields=joint_fields(copy, calls)))
            answer.when_done(lambda: self._open.__delitem__(copy))
            ask.answer.resolve(answer)
        return self._answered(ask)

    async def _answered(self, ask: _JointAsk) -> Reply:
        answer: Operation[Reply] = await ask.answer
        return await answer

    def expects(self, method: str) -> Sequence[TensorSpec]:
        return ()


def joint_fields(copy: int, asks: Sequence[Call]) -> dict[str, Any]:
    """The fields of the one ask. A sum counts only if all of its parts are staged and finite."""
    fields = {**asks[0].fields, "worker": copy, "due": any(call.fields["due"] for call in asks)}
    reports = [call.fields["report"] for call in asks]
    if reports[0] is not None and not all(report["losses"] for report in reports):
        fields["report"] = {**reports[0], "losses": []}
    return fields


class ShardOrders:
    """The service `orders` of a server: a coordinator's commands to its `shard`."""

    protocol: ClassVar[Mapping[str, Method]] = {"order": Shard.protocol["order"]}

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def handle(self, call: Call) -> Reply | Awaitable[Reply]:
        return self._shard.handle(call)

    def expects(self, method: str) -> Sequence[TensorSpec]:
        return ()
