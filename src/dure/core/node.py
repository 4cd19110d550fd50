"""The interface between algorithms and runtimes: `Node` with its operations, and the loop that resumes coroutines.

An algorithm consists of coroutines (*roles*) and of objects that other nodes call (*services*). Its only access to the
outside is its `Node`. Two runtimes implement `Node`: one in virtual time (`runtime.virtual`), one over processes and
sockets (`runtime.process`). Both resume coroutines with the `Loop` below instead of asyncio, and no algorithm can tell
them apart.

An operation starts when it is called, and `await` waits for its end:

    reply = node.call(shard, "pull")     # the call is on its way
    await node.compute(work)             # in the meantime
    values = await reply

A tensor that is given to an operation is lent: its owner must not change it before the operation has been awaited.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import torch

T = TypeVar("T")
Fields = Mapping[str, Any]


class Operation(Generic[T]):
    """An operation that has started and will finish: await it or cancel it.

    `label` describes it in the error of a deadlock, which names the operation that each task waits for. Subclasses
    compute it only then.
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
            del self, error  # the traceback of the error refers to this frame: a reference back would be a cycle

    def result(self) -> T:
        """The value of a finished operation. Raises the error of a failed one."""
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[no-any-return]

    def resolve(self, value: Any = None) -> None:
        """Finish with `value`. Has no effect on an operation that has finished already."""
        if not self.done:
            self.done = True
            self._value = value
            if self._waiters is not None:
                self.loop.ready.extend(self._waiters)
                self._waiters = None

    def fail(self, error: BaseException) -> None:
        """Finish with `error`, which each awaiting task raises."""
        if not self.done:
            self.done = True
            self._error = error
            if self._waiters is not None:
                self.loop.ready.extend(self._waiters)
                self._waiters = None

    def cancel(self) -> None:
        """Finish with `Cancelled`, which each awaiting task raises. Work that has not begun is dropped."""
        if not self.done:
            if self.on_cancel is not None:
                self.on_cancel()
            self.fail(Cancelled(self.label))

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` from the loop when the operation has finished."""
        if self.done:
            self.loop.soon(callback)
        elif self._waiters is None:
            self._waiters = [callback]
        else:
            self._waiters.append(callback)

    def resolve_with_first(self, operations: Sequence[Operation[Any]]) -> None:
        """Finish when the first of `operations` does, with that operation as the value."""

        def won(operation: Operation[Any]) -> None:
            self.resolve(operation)
            for other, callback in callbacks:
                other.forget(callback)

        callbacks = [(each, partial(won, each)) for each in operations]
        for operation, callback in callbacks:
            operation.when_done(callback)

    def forget(self, callback: Callable[[], None]) -> None:
        """Remove a callback of `when_done`."""
        if self._waiters is not None and callback in self._waiters:
            self._waiters.remove(callback)


class Cancelled(Exception):
    """The operation was cancelled. Raised where it is awaited."""


class EndOfWork(Exception):
    """No work is left: a pending `gradient()` raises this. A method may catch it, and await further operations."""


class Suspend(BaseException):
    """The run is suspended for a checkpoint. Thrown into a role at a step boundary; methods must not catch it."""


class Task(Operation[T]):
    """A running coroutine, as an operation that finishes with the coroutine's value or error."""

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
        except BaseException as error:  # noqa: BLE001  (it is raised where the task is awaited)
            self._end(None, error)
        else:
            self.waits_for = operation
            if operation._waiters is None and not operation.done:  # when_done, inlined: the most frequent call of a run
                operation._waiters = [self.advance]
            else:
                operation.when_done(self.advance)

    def throw(self, error: BaseException) -> None:
        """Raise `error` in the coroutine at its `await`, and cancel the operation that it waits for."""
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
        """Close the coroutine at its `await`, as a crash would. Neither waiters nor `on_cancel` are called."""
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
            unheard = not self._waiters  # None, or an empty list
            self.fail(error)
            if unheard:
                self.loop.unheard(self, error)


class Loop:
    """Runs ready tasks. A runtime finishes the operations that tasks wait for."""

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
        """Kill all tasks and drop all ready callbacks."""
        self.ready.clear()
        for task in list(self.tasks):
            task.kill()

    def unheard(self, task: Task[Any], error: BaseException) -> None:
        """Handle the failure of a task that no other task awaits. Raises the error; a runtime may override this."""
        raise error


class Address(NamedTuple):
    """Address of a service: the name of its node ("worker 3", "server 0") and its name on that node."""

    node: str
    service: str


def nothing() -> None:
    """Do nothing."""


@dataclass(slots=True)
class Call:
    """A call as its handler receives it. `tensors` are valid until the handler returns; copy them to keep them.

    A handler calls `release` before it waits for other messages. Otherwise waiting handlers could hold all of the
    memory that the awaited messages need.
    """

    caller: str
    method: str
    fields: Fields
    tensors: Sequence[torch.Tensor]
    release: Callable[[], None] = nothing


@dataclass(slots=True)
class Reply:
    """The reply of a handler. `tensors` are lent to the runtime, which calls `release` after sending them."""

    fields: Fields = field(default_factory=dict)
    tensors: Sequence[torch.Tensor] = ()
    release: Callable[[], None] = nothing


class TensorSpec(NamedTuple):
    """Expected dtype ("float32") and number of elements of a tensor; `at_most` permits fewer elements."""

    dtype: str
    numel: int
    at_most: bool = False


class Service(Protocol):
    """An object on a node that other nodes call.

    `handle` is a plain or an `async` method. It is atomic between its awaits, and defers its reply by awaiting
    `node.promise()`. `expects` returns the tensors of a call of `method`, without seeing the call; a runtime compares
    them with the announced tensors before it receives any of their bytes.
    """

    def handle(self, call: Call) -> Reply | Awaitable[Reply]: ...

    def expects(self, method: str) -> Sequence[TensorSpec]: ...


class Group(Protocol):
    """A group of ranks for collectives. Every member calls the same operations in the same order."""

    @property
    def ranks(self) -> Sequence[int]: ...

    def all_reduce(self, tensor: torch.Tensor) -> Operation[torch.Tensor]:
        """Sum `tensor` over the members, in place."""
        ...

    def mean_gradient(self, work: Any, share: float) -> Operation[Any]:
        """Sum `share` times the gradient of `work` over the members, sending slices during its computation."""
        ...

    def all_gather(self, tensor: torch.Tensor) -> Operation[list[torch.Tensor]]: ...

    def reduce_scatter(self, tensor: torch.Tensor) -> Operation[torch.Tensor]:
        """Sum over the members; each gets its slice of the sum (`core.vectors.equal_ranges`)."""
        ...

    def broadcast(self, tensor: torch.Tensor, root: int) -> Operation[torch.Tensor]: ...

    def barrier(self) -> Operation[None]: ...


class Node(Protocol):
    """The operations of a node, the only access of roles and services to the outside.

    `borrows(peer, nbytes)`: a call to `peer` with `into=None` returns tensors of `nbytes` in memory that `peer` lends.
    The caller may read them until it calls the reply's `release`.
    """

    name: str
    rank: int

    @property
    def rng(self) -> np.random.Generator: ...

    def borrows(self, peer: str, nbytes: int) -> bool: ...

    def reaches(self, peer: str) -> bool:
        """Whether the machine of a node that calls this one answers; False while the link to it is down."""
        ...

    def overlapped(self, *values: torch.Tensor) -> AbstractContextManager[None]:
        """While open, operations on a device overlap those of the caller's stream, after those so far.

        They may read `values`; their results are for messages.
        """
        ...

    @property
    def incarnation(self) -> int:
        """The number of starts of this node before the present one."""
        ...

    @property
    def engine_inside(self) -> bool:
        """Whether collectives inside of a computation go by the engine of `group`, and not in messages."""
        ...

    def compute(self, work: Work) -> Operation[Any]:
        """Do `work` on this node, and return its value."""
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
        """Call a method of a service. `fields` are plain JSON values, `timeout` is in seconds.

        The tensors of the reply are received into `into`, whose sizes must be equal to theirs, or with `at_most` at
        least theirs. Calls from one node to one service arrive in their order.

        Awaiting it raises `Refused`, `PeerLost` or `CallTimeout`.
        """
        ...

    def send(self, peer: str, tensor: torch.Tensor, *, tag: int = 0) -> Operation[None]:
        """Send `tensor` to `peer` when `peer` calls `recv`. Finishes when `tensor` may be changed again."""
        ...

    def recv(self, peer: str, into: torch.Tensor, *, tag: int = 0) -> Operation[torch.Tensor]:
        """Receive the next message from `peer` with `tag` into `into`, which has as many elements.

        Messages between two nodes with one tag keep their order. A runtime of processes raises `PeerLost` if `peer` is
        lost; virtual time may wait on. Both call `lost` of the node's services.
        """
        ...

    def group(self, ranks: Sequence[int]) -> Group: ...

    def first(self, *operations: Operation[Any], timeout: float | None = None) -> Operation[Operation[Any] | None]:
        """Return the operation that finishes first, or None after `timeout` seconds."""
        ...

    def spawn(self, coroutine: Coroutine[Operation[Any], None, T], name: str = "") -> Operation[T]: ...

    def sleep(self, seconds: float, *, background: bool = False) -> Operation[None]:
        """Wait for `seconds`. In virtual time, sleeps in the `background` do not keep a run alive."""
        ...

    def now(self) -> float:
        """Seconds since the start of the run."""
        ...

    def promise(self, label: str) -> Operation[Any]:
        """An operation that the caller itself resolves, by which a handler defers its reply."""
        ...

    def serve(self, name: str, service: Service) -> Address: ...

    def room_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Uninitialized memory like `tensor`, which nodes on this machine can read without a message.

        Use it for the tensors of replies and calls. The tensors of a call must not be changed before its reply, even if
        the call ended earlier by `CallTimeout` or was cancelled.
        """
        ...


class Work(Protocol):
    """Work for a node. `run` computes its value; virtual time takes its duration from the cluster's model."""

    def run(self) -> Any: ...


class CodecWork(NamedTuple):
    """Work of a coder: `calls` times the `operation` "encode", "decode" or "combine" on `numel` values."""

    operation: str
    numel: int
    calls: int = 1


@dataclass(slots=True)
class Apply:
    """Work on `nbytes` bytes of memory of a shard, which takes `nbytes * gamma` seconds in virtual time.

    Work of a codec has `codec_works` instead, and takes the codec's cost in virtual time.
    """

    function: Callable[[], Any]
    nbytes: int
    codec_works: Sequence[CodecWork] = ()

    def run(self) -> Any:
        return self.function()


@dataclass(slots=True)
class StepTime:
    """The time of one whole mini-batch of `flops` operations at a node, and its `samples` where it is read.

    Virtual time draws the `seconds` when the first portion starts.
    """

    flops: float
    seconds: float | None = None
    samples: int = 0


@dataclass(slots=True)
class StepPortion:
    """A portion of a mini-batch: `forward` is its share of the forward pass, `backward` that of the backward pass.

    `function` reads parameters that may change later, so a runtime calls it when the computation starts.
    """

    function: Callable[[], Any]
    step: StepTime
    forward: float = 0.0
    backward: float = 0.0

    def run(self) -> Any:
        return self.function()


@dataclass(slots=True)
class TimedWork:
    """Work of `seconds` on a machine of speed 1 or, without them, of a step of `flops` operations, in virtual time.

    `function` is called when the time is over.
    """

    function: Callable[[], Any]
    seconds: float | None = None
    flops: float = 0.0

    def run(self) -> Any:
        return self.function()


def taking(*codec_works: CodecWork) -> Apply:
    """Work without a function, which lets the time of `codec_works` pass in virtual time.

    The caller then encodes or decodes itself, so that errors are raised in its place.
    """
    return Apply(nothing, 0, codec_works)


class Ghost:
    """A tensor without values for timing-only runs: it has a size, and its arithmetic does nothing."""

    __slots__ = ("_itemsize", "_numel", "nbytes")

    def __init__(self, numel: int, itemsize: int = 4) -> None:
        self._numel = numel
        self._itemsize = itemsize
        self.nbytes = numel * itemsize

    def numel(self) -> int:
        return self._numel

    def element_size(self) -> int:
        return self._itemsize

    def new_empty(self, numel: int, dtype: torch.dtype | None = None) -> Ghost:
        return Ghost(numel, self._itemsize if dtype is None else dtype.itemsize)

    def __getitem__(self, part: slice) -> Ghost:
        return Ghost(len(range(self._numel)[part]), self._itemsize)

    def _same(self, *_: Any, **__: Any) -> Ghost:
        return self

    __add__ = __radd__ = __iadd__ = __sub__ = __rsub__ = __isub__ = _same
    __mul__ = __rmul__ = __imul__ = __truediv__ = __itruediv__ = __neg__ = _same
    add_ = sub_ = mul_ = div_ = zero_ = copy_ = clone = lerp_ = detach = view = view_as = _same
