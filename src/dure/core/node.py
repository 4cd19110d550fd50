"""What an algorithm may ask of the world, and the loop that answers.

An algorithm is written as coroutines (*roles*) and objects that others call (*services*). It touches the
world only through the operations of its `Node`. Two runtimes implement `Node`: one in virtual time
(`runtime.virtual`), one over processes and sockets (`runtime.process`). Both resume coroutines with the
`Loop` below: it is not asyncio, and no algorithm can tell them apart.

An operation *starts when it is called* and is *waited for when it is awaited*:

    reply = node.call(shard, "pull")     # on its way
    await node.compute(work)             # meanwhile
    values = await reply

A tensor given to an operation is lent to it until the operation has been awaited.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import torch

T = TypeVar("T")
Fields = Mapping[str, Any]


class Operation(Generic[T]):
    """Something that was started and will finish: await it, or cancel it.

    `label` says what it is in words, for the error that names who waits for what; it is asked for only then.
    """

    __slots__ = ("_error", "_label", "_value", "_waiters", "done", "loop", "on_cancel")

    def __init__(self, loop: Loop, label: str = "") -> None:
        self.loop = loop
        self._label = label
        self.done = False
        self.on_cancel: Callable[[], None] | None = None
        self._value: Any = None
        self._error: BaseException | None = None
        self._waiters: list[Callable[[], None]] | None = None

    @property
    def label(self) -> str:
        return self._label

    def __await__(self) -> Generator[Operation[Any], None, T]:
        if not self.done:
            yield self
        error = self._error
        if error is None:
            return self._value  # type: ignore[no-any-return]
        try:
            raise error
        finally:
            del self, error  # the error has this frame in its traceback: a cycle, if the frame had the error

    def result(self) -> T:
        """The value of a finished operation; raises the error that it failed with."""
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[no-any-return]

    def resolve(self, value: Any = None) -> None:
        """Finish with `value`. The first end counts: finishing twice changes nothing."""
        if not self.done:
            self.done = True
            self._value = value
            if self._waiters is not None:
                self.loop.ready.extend(self._waiters)
                self._waiters = None

    def fail(self, error: BaseException) -> None:
        """Finish with `error`, raised in everyone who awaits."""
        if not self.done:
            self.done = True
            self._error = error
            if self._waiters is not None:
                self.loop.ready.extend(self._waiters)
                self._waiters = None

    def cancel(self) -> None:
        """Give up: whoever awaits gets `Cancelled`; what has not begun never will."""
        if not self.done:
            if self.on_cancel is not None:
                self.on_cancel()
            self.fail(Cancelled(self.label))

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` from the loop once this is finished."""
        if self.done:
            self.loop.soon(callback)
        elif self._waiters is None:
            self._waiters = [callback]
        else:
            self._waiters.append(callback)

    def resolve_with_first(self, operations: Sequence[Operation[Any]]) -> None:
        """Finish with the one of `operations` that ends first; the others forget it."""

        def won(operation: Operation[Any]) -> None:
            self.resolve(operation)
            for other, callback in callbacks:
                other.forget(callback)

        callbacks = [(each, partial(won, each)) for each in operations]
        for operation, callback in callbacks:
            operation.when_done(callback)

    def forget(self, callback: Callable[[], None]) -> None:
        """Undo `when_done`."""
        if self._waiters is not None and callback in self._waiters:
            self._waiters.remove(callback)


class Cancelled(Exception):
    """Raised in whoever awaits an operation that was cancelled."""


class EndOfWork(Exception):
    """Thrown into a pending `gradient()` when there is no more work; a method may catch it and still await."""


class Suspend(BaseException):
    """Thrown into a role at a step boundary, for a checkpoint. Not for methods to catch."""


class Task(Operation[T]):
    """A coroutine that the loop resumes; itself an operation that ends when the coroutine does."""

    __slots__ = ("coroutine", "name", "waits_for")

    def __init__(self, loop: Loop, coroutine: Coroutine[Operation[Any], None, T], name: str) -> None:
        super().__init__(loop, label=name)
        self.coroutine = coroutine
        self.name = name
        self.waits_for: Operation[Any] | None = None

    def advance(self) -> None:
        """Run the coroutine to its next unfinished operation."""
        if self.done:
            return
        try:
            operation = self.coroutine.send(None)
        except StopIteration as stop:
            self._end(stop.value, None)
        except BaseException as error:  # noqa: BLE001  (it is raised in whoever awaits)
            self._end(None, error)
        else:
            self.waits_for = operation
            if operation._waiters is None and not operation.done:  # as when_done: the commonest of all calls
                operation._waiters = [self.advance]
            else:
                operation.when_done(self.advance)

    def throw(self, error: BaseException) -> None:
        """Raise `error` in the coroutine where it waits; what it has waited for is given up."""
        if self.done:
            return
        if self.waits_for is not None:
            self.waits_for.forget(self.advance)
            self.waits_for.cancel()
        try:
            operation = self.coroutine.throw(error)
        except StopIteration as stop:
            self._end(stop.value, None)
        except BaseException as raised:  # noqa: BLE001  (as above)
            self._end(None, raised)
        else:
            self.waits_for = operation
            operation.when_done(self.advance)

    def kill(self) -> None:
        """End the coroutine where it stands, as a crash would: nothing in it runs any more."""
        if self.waits_for is not None:
            self.waits_for.forget(self.advance)
        self.done = True
        self.loop.tasks.pop(self, None)
        self.coroutine.close()

    def _end(self, value: Any, error: BaseException | None) -> None:
        self.waits_for = None
        self.loop.tasks.pop(self, None)
        if error is None:
            self.resolve(value)
        else:
            unheard = not self._waiters  # None, or all forgotten
            self.fail(error)
            if unheard:
                self.loop.unheard(self, error)


class Loop:
    """Runs tasks until they wait. A runtime adds what they wait for."""

    def __init__(self) -> None:
        self.ready: deque[Callable[[], None]] = deque()
        self.tasks: dict[Task[Any], None] = {}

    def soon(self, callback: Callable[[], None]) -> None:
        self.ready.append(callback)

    def spawn(self, coroutine: Coroutine[Operation[Any], None, T], name: str) -> Task[T]:
        task = Task(self, coroutine, name)
        self.tasks[task] = None
        self.ready.append(task.advance)
        return task

    def run_ready(self) -> None:
        ready = self.ready
        while ready:
            ready.popleft()()

    def end(self) -> None:
        """Nothing goes on any more: tasks that have not ended, or not begun, are closed where they stand."""
        self.ready.clear()
        for task in list(self.tasks):
            task.kill()

    def unheard(self, task: Task[Any], error: BaseException) -> None:
        """A task failed and nobody awaits it. A runtime decides; by default it is raised."""
        raise error


class Address(NamedTuple):
    """Where a service lives: the name of its node (`"worker 3"`, `"server 0"`) and its own name there."""

    node: str
    service: str


def nothing() -> None:
    """Nothing to be done."""


@dataclass(slots=True)
class Call:
    """A call as its handler sees it. `tensors` are the handler's until it returns; keep by copying.

    A handler that goes on to wait for others calls `release` first: memory that all of them hold while each waits for
    another's message may be all there is.
    """

    caller: str
    method: str
    fields: Fields
    tensors: Sequence[torch.Tensor]
    release: Callable[[], None] = nothing


@dataclass(slots=True)
class Reply:
    """What a handler answers. `tensors` are lent to the runtime, which calls `release` once they have left."""

    fields: Fields = field(default_factory=dict)
    tensors: Sequence[torch.Tensor] = ()
    release: Callable[[], None] = nothing


class TensorSpec(NamedTuple):
    """What a payload must be: `dtype` as torch names it without its prefix ("float32"), elements; `at_most` those."""

    dtype: str
    numel: int
    at_most: bool = False


class Service(Protocol):
    """An object that a node hosts and others call.

    `handle` may be plain or `async`; it is atomic between its awaits, and defers its reply by awaiting
    `node.promise()`. `expects` answers, from what the service knows itself, which tensors a call of `method`
    carries; a runtime compares before it receives a byte of them.
    """

    def handle(self, call: Call) -> Reply | Awaitable[Reply]: ...

    def expects(self, method: str) -> Sequence[TensorSpec]: ...


class Group(Protocol):
    """Ranks that act together. Every member calls the same operations in the same order."""

    @property
    def ranks(self) -> Sequence[int]: ...

    def all_reduce(self, tensor: torch.Tensor) -> Operation[torch.Tensor]:
        """The sum over members, in place."""
        ...

    def mean_gradient(self, work: Any, share: float) -> Operation[Any]:
        """The sum over members of `share` times the gradient that `work` gives, sent while it is computed."""
        ...

    def all_gather(self, tensor: torch.Tensor) -> Operation[list[torch.Tensor]]: ...

    def reduce_scatter(self, tensor: torch.Tensor) -> Operation[torch.Tensor]:
        """The sum over members; each keeps its slice (`core.ranges.equal_ranges`)."""
        ...

    def broadcast(self, tensor: torch.Tensor, root: int) -> Operation[torch.Tensor]: ...

    def barrier(self) -> Operation[None]: ...


class Node(Protocol):
    """The handful of operations through which a role or a service touches the world.

    Where `peer` lends a node memory of `nbytes`, a call with `into=None` gives the reply's own tensors, to be read
    until its `release` is called.
    """

    name: str
    rank: int

    @property
    def rng(self) -> np.random.Generator: ...

    def borrows(self, peer: str, nbytes: int) -> bool: ...

    @property
    def incarnation(self) -> int:
        """How many lives this node has had before this one."""
        ...

    def compute(self, work: Work) -> Operation[Any]:
        """Do `work` on this node; its value."""
        ...

    def call(
        self,
        service: Address,
        method: str,
        *tensors: torch.Tensor,
        into: Sequence[torch.Tensor] | None = (),
        at_most: bool = False,
        timeout: float | None = None,
        **fields: Any,
    ) -> Operation[Reply]:
        """Call a service. `fields` are plain JSON values.

        The reply's tensors are received into `into`, which must fit exactly, or be longer where `at_most`. Calls from
        one node to one service arrive in the order in which they were made.

        Raises `Refused`, `PeerLost`, `CallTimeout` where awaited.
        """
        ...

    def send(self, peer: str, tensor: torch.Tensor, *, tag: int = 0) -> Operation[None]:
        """A message to `peer`, which leaves once `peer` has asked for it; done when `tensor` has left."""
        ...

    def recv(self, peer: str, into: torch.Tensor, *, tag: int = 0) -> Operation[torch.Tensor]:
        """Ask `peer` for its next message under `tag`, of as many elements as `into`.

        Messages between two nodes under one tag keep their order. Whether a wait for one who is gone ends at once is
        the runtime's: on processes `recv` raises `PeerLost`; a service of the node hears of it anyway (`lost`).
        """
        ...

    def group(self, ranks: Sequence[int]) -> Group: ...

    def first(self, *operations: Operation[Any], timeout: float | None = None) -> Operation[Operation[Any] | None]:
        """Whichever finishes first; None when `timeout` seconds pass before."""
        ...

    def spawn(self, coroutine: Coroutine[Operation[Any], None, T], name: str = "") -> Operation[T]: ...

    def sleep(self, seconds: float, *, background: bool = False) -> Operation[None]:
        """Until `seconds` have passed. In virtual time, no run goes on for the sake of a sleep in the `background`."""
        ...

    def now(self) -> float:
        """Seconds since the run began."""
        ...

    def promise(self, label: str) -> Operation[Any]:
        """An operation that the caller finishes itself: how a handler defers its reply."""
        ...

    def serve(self, name: str, service: Service) -> Address: ...

    def room_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory like `tensor`'s, not written yet; where they can, others read it in place of a message.

        For what services here answer with, and for what is sent with a call: that is then not to be written to until
        the call was answered, which is later than its end if it ended in `CallTimeout` or was cancelled.
        """
        ...


class Work(Protocol):
    """Something a node computes. `run` gives the value for real; virtual time asks `seconds` of its cluster."""

    def run(self) -> Any: ...


class CodecWork(NamedTuple):
    """What a coder does, `calls` times to `numel` values: "encode", "decode", or "combine" messages."""

    operation: str
    numel: int
    calls: int = 1


@dataclass(slots=True)
class Apply:
    """Work over `nbytes` bytes of memory on a shard: what virtual time charges `nbytes * gamma` for.

    Where it is a codec's, `codec_works` say what that does, and virtual time charges what the codec costs instead.
    """

    function: Callable[[], Any]
    nbytes: int
    codec_works: Sequence[CodecWork] = ()

    def run(self) -> Any:
        return self.function()


def taking(*codec_works: CodecWork) -> Apply:
    """What a coder is about to do, for virtual time to pass. It is then done in place, where its errors belong."""
    return Apply(nothing, 0, codec_works)


class Ghost:
    """Stands for a tensor of `numel` elements in a timing-only run: has a size, holds nothing."""

    __slots__ = ("_itemsize", "_numel", "nbytes")

    def __init__(self, numel: int, itemsize: int = 4) -> None:
        self._numel = numel
        self._itemsize = itemsize
        self.nbytes = numel * itemsize

    def numel(self) -> int:
        return self._numel

    def new_empty(self, numel: int) -> Ghost:
        return Ghost(numel, self._itemsize)

    def __getitem__(self, part: slice) -> Ghost:
        return Ghost(len(range(self._numel)[part]), self._itemsize)

    def _same(self, *_: Any, **__: Any) -> Ghost:
        return self

    __add__ = __radd__ = __iadd__ = __sub__ = __rsub__ = __isub__ = _same
    __mul__ = __rmul__ = __imul__ = __truediv__ = __itruediv__ = __neg__ = _same
    add_ = sub_ = mul_ = div_ = zero_ = copy_ = clone = lerp_ = detach = view = view_as = _same
