"""One server alone has the model and the clock: what a step asks of both, it asks in one call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from dure.core.node import Address, Call, Reply, TensorSpec
from dure.core.protocol import WORKERS, Method
from dure.errors import Refused, WorkOver
from dure.topology.fields import HAS, LIFE, PUSHED, WORD
from dure.topology.parameter_server.shard import Shard

if TYPE_CHECKING:
    from dure.core.node import Node, Service
    from dure.topology.parameter_server.clock import ClockService
    from dure.topology.parameter_server.policies import Policy

NAME = "clocked shard"
"""That of the service at its node."""


def clocked_at(shards: Sequence[Address], policy: Policy | None) -> Address | None:
    """Where shard and clock can be asked in one call; None where there are several shards, or no order."""
    return Address(shards[0].node, NAME) if len(shards) == 1 and policy is not None and policy.ordered else None


def serve_clock(node: Node, clock: ClockService, shard: Service) -> None:
    """Host the clock on the first server, and with its shard what `clocked_at` tells of."""
    node.serve("clock", clock)
    if isinstance(shard, Shard):
        node.serve(NAME, ClockedShard(shard, clock))


class ClockedShard:
    """The only shard of a model and the clock beside it, as one service.

        worker                        the server
          exchange (seq, base) ------>  staged; its group closes, sooner or later
                                        held until the worker may start its next step, on version v
          <----------- version v --  its slice at v, once applied

    | method     | fields and tensors                      | reply                                               |
    |------------|-----------------------------------------|-----------------------------------------------------|
    | `push`     | a shard's `push` and a clock's `staged` | version; once counted                               |
    | `proceed`  | a clock's `ask`                         | as `ask`; slice at that version, and seconds `held` |
    | `exchange` | `push`                                  | as `proceed`, after a `push`                        |

    Where the fields say which version the worker `has`, the reply's tensor is a shard's reply to `follow`.

    Nothing comes between an update's staging and its word to the clock. Where `ask` says that the work is over,
    `WorkOver` is raised.
    """

    def __init__(self, shard: Shard, clock: ClockService) -> None:
        self._shard = shard
        self._now = clock.node.now
        self._stage = shard.methods["push"]
        self._staged, self._ask = clock.methods["staged"], clock.methods["ask"]
        self._methods: dict[str, Callable[[Call], Awaitable[Reply]]] = {
            "push": self._push,
            "proceed": self._proceed,
            "exchange": self._exchange,
        }

    protocol: ClassVar[Mapping[str, Method]] = {
        "push": Method(WORKERS, {**PUSHED, **WORD}),
        "proceed": Method(WORKERS, {**LIFE, **HAS}),
        "exchange": Method(WORKERS, {**PUSHED, **WORD, **HAS}),
    }

    def handle(self, call: Call) -> Awaitable[Reply]:
        method = self._methods.get(call.method)
        if method is None:
            raise Refused(f'a clocked shard has no method "{call.method}"; it has {", ".join(self._methods)}.')
        return method(call)

    def expects(self, method: str) -> Sequence[TensorSpec]:
        return () if method == "proceed" else self._shard.expects("push")

    async def _push(self, call: Call) -> Reply:
        staging = self._stage(call)
        reply = staging if isinstance(staging, Reply) else await staging
        call.release()
        self._staged(call)
        return reply

    async def _proceed(self, call: Call) -> Reply:
        fields, asked = call.fields, self._now()
        asking = self._ask(call)
        admitted = (asking if isinstance(asking, Reply) else await asking).fields
        if "over" in admitted:
            raise WorkOver(f"no step is left for worker {fields['worker']}: too few workers are left to go on.")
        held = self._now() - asked
        method = "follow" if "has" in fields else "pull"
        asked_for = Call(call.caller, method, {**fields, "version": admitted["version"]}, ())
        pulling = self._shard.methods[method](asked_for)
        pulled = pulling if isinstance(pulling, Reply) else await pulling
        return Reply({**admitted, **pulled.fields, "held": held}, pulled.tensors, pulled.release)

    async def _exchange(self, call: Call) -> Reply:
        await self._push(call)
        return await self._proceed(call)
