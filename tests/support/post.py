"""Nodes whose every message, answers too, waits until the test delivers it; nodes die, connections end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from dure.core.node import Address, Call, Loop, Operation, Reply, Service, Task
from dure.errors import PeerLost, RemoteError


class Letter:
    """A message under way: `kind` is "meet", "settle" or "copy", with "answer to" before it if it is one."""

    def __init__(
        self, source: str, target: str, kind: str, deliver: Callable[[], None], call: Operation[Reply]
    ) -> None:
        self.source, self.target, self.kind = source, target, kind
        self.deliver = deliver
        self.call = call

    def __repr__(self) -> str:
        return f"{self.kind} from {self.source} to {self.target}"


class Post(Loop):
    """All nodes, and what is on its way between them: in order from one to another, else in any the test likes."""

    def __init__(self) -> None:
        super().__init__()
        self.letters: list[Letter] = []
        self.services: dict[str, Service] = {}
        self.open: dict[Operation[Reply], tuple[str, str]] = {}
        self.dead: set[str] = set()

    def first_letters(self) -> list[Letter]:
        """Those that may be delivered next."""
        found: dict[tuple[str, str, bool], Letter] = {}
        for letter in self.letters:
            found.setdefault((letter.source, letter.target, letter.kind.startswith("answer")), letter)
        return list(found.values())

    def deliver(self, letter: Letter) -> None:
        self.letters.remove(letter)
        letter.deliver()
        self.run_ready()

    def settle(self, choose: Callable[[list[Letter]], Letter] = lambda letters: letters[0]) -> None:
        """Deliver until nothing is on its way."""
        self.run_ready()
        while letters := self.first_letters():
            self.deliver(choose(letters))

    def cut(self, one: str, other: str) -> None:
        """The connections between two nodes end: what is on its way is lost, and both are told."""
        self.letters = [letter for letter in self.letters if {letter.source, letter.target} != {one, other}]
        for call, ends in list(self.open.items()):
            if set(ends) == {one, other}:
                self._lose(call)
        for name, peer in ((one, other), (other, one)):
            if name not in self.dead:
                self.services[name].lost(peer)  # type: ignore[attr-defined]
        self.run_ready()

    def kill(self, name: str) -> None:
        """The node is gone, without a word; everybody is told."""
        self.dead.add(name)
        for task in [task for task in self.tasks if name in task.name]:
            task.kill()
        for other in self.services:
            if other != name:
                self.cut(name, other)

    def _lose(self, call: Operation[Reply]) -> None:
        del self.open[call]
        call.fail(PeerLost("the connection has ended"))


class PostNode:
    """The primitives that a peer uses."""

    def __init__(self, post: Post, rank: int) -> None:
        self.post, self.rank, self.name = post, rank, f"worker {rank}"

    def call(
        self, service: Address, method: str, *tensors: torch.Tensor, into: Sequence[torch.Tensor] = (), **fields: Any
    ) -> Operation[Reply]:
        post, target = self.post, service.node
        operation: Operation[Reply] = Operation(post, f"{method} of {target}")
        call = Call(self.name, method, fields, [tensor.clone() for tensor in tensors])
        post.open[operation] = (self.name, target)
        if target in post.dead:
            post.soon(lambda: post._lose(operation))
            return operation

        def answer(reply: Reply | RemoteError) -> None:
            if operation not in post.open:
                return  # the connection has ended
            copies = [] if isinstance(reply, RemoteError) else [tensor.clone() for tensor in reply.tensors]

            def arrive() -> None:
                post.open.pop(operation, None)
                if isinstance(reply, RemoteError):
                    operation.fail(reply)
                    return
                if not operation.done:
                    for destination, tensor in zip(into, copies, strict=True):
                        destination.copy_(tensor)
                operation.resolve(reply)

            post.letters.append(Letter(target, self.name, f"answer to {method}", arrive, operation))

        def handle() -> None:
            try:
                later = post.services[target].handle(call)
            except RemoteError as error:
                answer(error)
                return
            if isinstance(later, Reply):
                answer(later)
                return
            assert isinstance(later, Operation)
            later.when_done(lambda: answer(_result(later)))

        post.letters.append(Letter(self.name, target, method, handle, operation))
        return operation

    def now(self) -> float:
        return 0.0

    def first(self, *operations: Operation[Any], timeout: float | None = None) -> Operation[Operation[Any] | None]:
        """No time passes here, so no time-out comes."""
        winner: Operation[Operation[Any] | None] = Operation(self.post, f"first of {len(operations)}")
        winner.resolve_with_first(operations)
        return winner

    def spawn(self, coroutine: Any, name: str = "") -> Task[Any]:
        return self.post.spawn(coroutine, name or self.name)

    def promise(self, label: str) -> Operation[Any]:
        return Operation(self.post, label)

    def overlapped(self, *values: torch.Tensor) -> AbstractContextManager[None]:
        return nullcontext()

    def room_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.new_empty(tensor.shape)


def _result(operation: Operation[Reply]) -> Reply | RemoteError:
    try:
        return operation.result()
    except RemoteError as error:
        return error
