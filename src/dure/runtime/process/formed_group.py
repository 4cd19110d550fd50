"""A group of processes that is formed again without members that have failed, or with new ones.

A *generation* is one formation of the group: a Gloo group of some ranks, on a part of the store that no other
generation uses. The driver numbers the generations, and says when one is over (`run.generations`).

| failure of a member | effect in the engine                                 | remedy                                  |
|---------------------|------------------------------------------------------|-----------------------------------------|
| in a collective     | at most its neighbors in the ring notice it          | no wait goes on once the generation is  |
|                     |                                                      | over                                    |
| before it connects  | the others wait for the limit of the constructor     | all members meet in the store first     |
| while it connects   | the others wait for five times the limit, and        | members connect on a thread that may be |
|                     | nothing ends that wait                               | left behind                             |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dure.core.node import Operation
from dure.errors import PeerLost
from dure.runtime.launch.engine_store import connected
from dure.runtime.process.group import EngineOperation, ProcessGroup, break_connections, lost_rank, sockets

if TYPE_CHECKING:
    from dure.runtime.process.node import ProcessNode

CONNECT_LIMIT = timedelta(seconds=10)
"""Time limit for the members of a generation to connect, once they have met in the store."""

OPERATION_LIMIT = timedelta(days=1)
"""Time limit of a collective, and so of a step. An operation that never ends keeps its threads until then."""

DRAIN_SECONDS = 0.5
"""Time limit for the operations of a generation that is over to end."""

LOOK_SECONDS = 1e-3
"""Period of the looks for members that have not come, and for operations that have not ended."""

_left_behind: list[Any] = []
"""Groups with an operation that never ends: the destruction of one would wait for it."""


class FormedGroup(ProcessGroup):
    """The group of a method, as seen by one of its processes; empty until it is formed.

    `number` is that of the present generation, `over` the highest number of a generation that is over.
    """

    def __init__(self, node: ProcessNode) -> None:
        super().__init__(node, (), None)
        self.number = self.over = -1
        self._pending: list[Any] = []
        self._connections: dict[int, str] = {}

    @property
    def is_over(self) -> bool:
        """Whether the present generation is over."""
        return self.over >= self.number

    def end(self, generation: int) -> None:
        """Note that a generation is over. It may be one that this process has not heard of yet."""
        self.over = max(self.over, generation)

    async def form(self, number: int, ranks: Sequence[int], place: Sequence[Any]) -> None:
        """Connect to the other `ranks` of generation `number`, through the store at `place`.

        Raises `PeerLost` if the generation is over before, or a member cannot be reached.
        """
        self.number, self.ranks = number, tuple(ranks)
        # A store of its own: a thread that is left behind may hold the lock of an earlier one.
        store = dist.PrefixStore(f"{self._node.identity.job}/{number}", connected(place, len(ranks)))  # type: ignore[attr-defined]
        await self._meet(store)
        before = sockets()
        connecting = _Connecting(store, self.ranks.index(self._node.rank), len(ranks))
        while connecting.is_alive():
            self._check()  # the thread is left behind then: nothing ends its wait
            await self._node.sleep(LOOK_SECONDS)
        self._engine = connecting.result(self._node.name)
        own = self._node.wire.descriptors()  # the loop has run meanwhile, and may have opened connections
        self._connections = {each: link for each, link in sockets().items() - before.items() if each not in own}

    async def dissolve(self) -> None:
        """Leave the present generation, and end its operations."""
        # Survivors wait for each other until the connections end: `abort` and `shutdown` of the group wake none.
        break_connections(self._connections)
        self._connections = {}
        if self._overlap is not None:
            self._overlap.close()  # it keeps the last works
            self._overlap = None
        last = self._node.now() + DRAIN_SECONDS
        while not all(work.is_completed() for work in self._pending) and self._node.now() < last:
            await self._node.sleep(LOOK_SECONDS)
        # An operation that had begun to receive may never end. It cannot write any more: its connections are closed.
        if not all(work.is_completed() for work in self._pending):
            _left_behind.append((self._engine, self._pending))
        self._engine, self._pending = None, []  # finished works would keep the engine's connections and threads

    async def _meet(self, store: Any) -> None:
        """Wait until every member has come to the store."""
        store.set(f"here {self._node.rank}", "")
        missing = [f"here {rank}" for rank in self.ranks]
        while not store.check(missing):
            self._check()
            await self._node.sleep(LOOK_SECONDS)

    def _check(self) -> None:
        """Raise `PeerLost` if the generation is over."""
        if self.is_over:
            raise PeerLost(f"{self._node.name} waited for the group, and a rank is gone.")

    def _reduce(self, tensor: torch.Tensor) -> Any:
        try:
            return super()._reduce(tensor)
        except RuntimeError as error:  # raised in a hook of backward: the job's own errors are no lost rank
            raise lost_rank(self._node.name, "the others' all_reduce", error) from None

    def _start(
        self, label: str, works: Sequence[Any], finish: Callable[[], Any], tensor: torch.Tensor
    ) -> Operation[Any]:
        self._pending = [work for work in self._pending if not work.is_completed()] + list(works)
        return EngineOperation(self._node, label, works, finish, in_loop=False, check=self._check)


class _Connecting(Thread):
    """Connects one member of a generation, on a thread of its own."""

    def __init__(self, store: Any, index: int, size: int) -> None:
        super().__init__(name="connecting a group", daemon=True)
        self._store, self._index, self._size = store, index, size
        self._engine: dist.ProcessGroup | None = None
        self._error: RuntimeError | None = None
        self.start()

    def run(self) -> None:
        try:
            gloo = dist.ProcessGroupGloo(self._store, self._index, self._size, CONNECT_LIMIT)
            gloo._set_default_timeout(OPERATION_LIMIT)  # the constructor's limit would be that of operations too
            engine = dist.ProcessGroup(self._store, self._index, self._size)
            engine._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            engine._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        except RuntimeError as error:
            self._error = error
        else:
            self._engine = engine

    def result(self, name: str) -> dist.ProcessGroup:
        """The group. Raises `PeerLost` if process `name` has not reached all members."""
        if self._engine is None:
            assert self._error is not None
            raise lost_rank(name, "the others to connect", self._error)
        return self._engine
