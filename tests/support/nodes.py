"""Nodes without time: every message waits in its channel until the test delivers it.

Between two parties messages keep their order; which channel goes next is the test's choice. A call's handler
runs when the call is delivered and its reply arrives at once: to delay a reply is to delay what follows it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from dure.core.node import Address, Call, Loop, Operation, Reply, Service, Task, Work
from dure.errors import DureError

Channel = tuple[str, Address]


class World(Loop):
    """All nodes, and what is on its way between them."""

    def __init__(self) -> None:
        super().__init__()
        self.channels: dict[Channel, deque[Callable[[], None]]] = {}
        self.services: dict[Address, Service] = {}
        self.dead: set[str] = set()

    def node(self, name: str) -> TestNode:
        return TestNode(self, name)

    def choices(self) -> list[Channel]:
        """The channels that have something to deliver."""
        return sorted(channel for channel, messages in self.channels.items() if messages)

    def deliver(self, channel: Channel) -> None:
        self.channels[channel].popleft()()
        self.run_ready()

    def settle(self, choose: Callable[[list[Channel]], Channel] = lambda channels: channels[0]) -> None:
        """Deliver, one at a time as `choose` says, until nothing is on its way."""
        self.run_ready()
        while choices := self.choices():
            self.deliver(choose(choices))

    def kill(self, name: str) -> None:
        """The node says no more; what it has said is still on its way."""
        self.dead.add(name)
        for task in [task for task in self.tasks if task.name == name]:
            task.kill()

    def run(self, coroutine: Coroutine[Operation[Any], None, Any], name: str = "test") -> Any:
        """The value of `coroutine`, with messages delivered in the order of their channels' names."""
        task = self.spawn(coroutine, name)
        task.when_done(lambda: None)
        self.settle()
        assert task.done, f"{name} waits for {task.waits_for.label if task.waits_for else 'nothing'}"
        return task.result()


class TestNode:
    """The primitives that a server and its clients use."""

    __test__ = False

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.rank = int(name.split()[-1])
        self.computed = 0

    def borrows(self, peer: str, nbytes: int) -> bool:
        return False

    def reaches(self, peer: str) -> bool:
        return True

    def compute(self, work: Work) -> Operation[Any]:
        """Done at once, heard of later: others may run in between."""
        self.computed += 1
        operation: Operation[Any] = Operation(self.world, "its computation")
        value = work.run()
        self.world.soon(lambda: operation.resolve(value))
        return operation

    def call(
        self,
        service: Address,
        method: str,
        *tensors: torch.Tensor,
        into: Sequence[torch.Tensor] = (),
        at_most: bool = False,
        timeout: float | None = None,
        **fields: Any,
    ) -> Operation[Reply]:
        operation: Operation[Reply] = Operation(self.world, f"{method} of {service}")
        call = Call(self.name, method, fields, tensors)
        deliver = Delivery(self.world, service, call, operation, into)
        self.world.channels.setdefault((self.name, service), deque()).append(deliver)
        return operation

    def spawn(self, coroutine: Coroutine[Operation[Any], None, Any], name: str = "") -> Task[Any]:
        return self.world.spawn(coroutine, name or self.name)

    def promise(self, label: str) -> Operation[Any]:
        return Operation(self.world, label)

    def sleep(self, seconds: float, *, background: bool = False) -> Operation[None]:
        """No time passes here."""
        return Operation(self.world, "the end of time")

    def first(self, *operations: Operation[Any], timeout: float | None = None) -> Operation[Operation[Any] | None]:
        """No time passes here: no time-out ends it."""
        winner: Operation[Any] = Operation(self.world, " or ".join(each.label for each in operations))
        winner.resolve_with_first(operations)
        return winner

    def now(self) -> float:
        return 0.0

    def serve(self, name: str, service: Service) -> Address:
        address = Address(self.name, name)
        self.world.services[address] = service
        return address

    def overlapped(self, *values: torch.Tensor) -> AbstractContextManager[None]:
        return nullcontext()

    def room_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.new_empty(tensor.shape)


class Delivery:
    """A call that arrives when it is called."""

    def __init__(
        self, world: World, service: Address, call: Call, operation: Operation[Reply], into: Sequence[torch.Tensor]
    ) -> None:
        self.world = world
        self.service = service
        self.call = call
        self.operation = operation
        self.into = into

    def __call__(self) -> None:
        try:
            answer = self.world.services[self.service].handle(self.call)
        except DureError as error:
            self.operation.fail(error)
            return
        if isinstance(answer, Reply):
            self.reply(answer)
            return
        later: Operation[Reply] = (
            answer
            if isinstance(answer, Operation)
            else self.world.spawn(answer, f"{self.call.method} at {self.service}")  # type: ignore[arg-type]
        )

        def handled() -> None:
            try:
                reply = later.result()
            except DureError as error:
                self.operation.fail(error)
            else:
                self.reply(reply)

        later.when_done(handled)

    def reply(self, reply: Reply) -> None:
        if self.into and self.call.caller not in self.world.dead:
            for destination, tensor in zip(self.into, reply.tensors, strict=True):
                destination[: tensor.numel()].copy_(tensor)
        reply.release()
        self.operation.resolve(reply)
