"""The model in the memory of one machine: read and written where it lies, by all workers at once.

Niu, Recht, Re and Wright, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent", NeurIPS 2011.

    worker k                    segment                                          server 0
      read  <-------------------  values   (n numbers, torn or not)                owns it: says where it is,
      add   ------------------->  values   (whole, or what a sparse update names)  answers pulls and checkpoints,
      claim ------------------->  claims   (counters that all draw from)           closes phases when the clock does
      count ------------------->  counts   (a row per worker, written by it alone)
                                  sum's mean, snapshot (of methods in phases)

In a real run the segment is mapped by every process. Reading copies nothing: the gradient is computed on the values
as they change. A process that is killed holds no lock any more and may leave one update half written. In virtual time
the same segment is plain memory: read when a computation starts, added to when it has ended and been charged for
(`gamma` seconds per byte written), in one piece.

Counting needs no locks either: a worker adds to its own row, and the version of the model, the number of updates, is
the sum over rows. Only claims take a lock, since no two workers may draw the same number.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch

from dure.core.node import Address, Apply, Call, Ghost, Node, Operation, Reply, TensorSpec
from dure.core.protocol import (
    CLOCK,
    COUNT,
    DRIVER,
    FINITE,
    TRUTH,
    WORKERS,
    RemoteService,
    carrying,
    maybe,
    nullable,
    remote,
)
from dure.core.sequence import SequenceTracker
from dure.core.state import State
from dure.core.vectors import all_finite
from dure.errors import Refused
from dure.topology.fields import CLOSED, LEFT, LIFE
from dure.topology.turns import Turns

BUCKETS = 248
"""Values of staleness that are counted apart; more stale updates count as the last.

With the `_BEHIND` columns before them a row has 256 numbers, so that no cache line has parts of two workers' rows.
"""

CLAIMS = 8
"""Counters that workers draw from."""

SMALL = 1 << 20
"""Bytes of an update that a process adds at once, without letting messages pass meanwhile."""

_UPDATES, _WRITTEN, _REFUSED, _GRADIENTS, _BEHIND = 0, 1, 2, 3, 8  # columns of a worker's row
_ALIGNMENT = 64  # bytes
_CLAIM_LOCKS = 1 << 40  # number of the first lock of a claim, beyond those of the model's ranges


class Layout(NamedTuple):
    """The contents of a segment: a model of `numel` elements, `vectors` like it, and a row for each of `workers`."""

    numel: int
    dtype: torch.dtype
    workers: int
    vectors: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return self._tables + (1 + len(self.vectors)) * self._stride

    @property
    def _tables(self) -> int:
        return 8 * (CLAIMS + self.workers * (_BEHIND + BUCKETS))

    @property
    def _stride(self) -> int:
        return -(-self.numel * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT

    def vector(self, memory: torch.Tensor, place: int) -> torch.Tensor:
        """The vector at `place` among all of them, the model first."""
        start = self._tables + place * self._stride
        return memory[start : start + self.numel * self.dtype.itemsize].view(self.dtype)

    def tables(self, memory: torch.Tensor) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """The claims, and the rows of the workers."""
        numbers = memory[: self._tables].numpy().view(np.int64)
        return numbers[:CLAIMS], numbers[CLAIMS:].reshape(self.workers, -1)


class Locks(Protocol):
    """Numbered locks that processes share (`runtime.memory`)."""

    def hold(self, first: int, count: int = 1) -> AbstractContextManager[None]: ...


class Segment:
    """A model in shared memory, and what is counted of it.

    `memory` is flat uint8, of `layout.nbytes`, zeros at first. With `locks` other processes map it too; without, it is
    this process's own, and its tasks take turns. Without `memory` the values are on `device`, and the counters on the
    CPU. `timing_only` counts, and holds no values.
    """

    def __init__(
        self,
        layout: Layout,
        memory: torch.Tensor | None = None,
        locks: Locks | None = None,
        *,
        device: torch.device | str = "cpu",
        timing_only: bool = False,
    ) -> None:
        self.layout = layout
        self.locks = locks
        # Locks order exclusive work between processes; tasks of one process take turns.
        self.turns = None if locks is not None else Turns("the shared memory")
        # Without `memory`: the tables alone, since the vectors may be on a device.
        counters = torch.zeros(layout._replace(numel=0).nbytes, dtype=torch.uint8) if memory is None else memory
        self.claims, self.rows = layout.tables(counters)
        self._updates = self.rows[:, _UPDATES]
        if timing_only:
            ghost = cast(torch.Tensor, Ghost(layout.numel, layout.dtype.itemsize))
            self.values, self.vectors = ghost, dict.fromkeys(layout.vectors, ghost)
            return
        count = 1 + len(layout.vectors)
        if memory is None:
            parts = [torch.zeros(layout.numel, dtype=layout.dtype, device=device) for _ in range(count)]
        else:
            parts = [layout.vector(memory, place) for place in range(count)]
        self.values, *vectors = parts
        self.vectors = dict(zip(layout.vectors, vectors, strict=True))

    @property
    def version(self) -> int:
        """Updates made so far."""
        updates: list[int] = self._updates.tolist()
        return sum(updates)  # for a few workers, in a tenth of the time of numpy's sum

    @property
    def written(self) -> int:
        """Numbers of the model that have been written, by all updates together."""
        return int(self.rows[:, _WRITTEN].sum())

    @property
    def refused(self) -> int:
        return int(self.rows[:, _REFUSED].sum())

    @property
    def gradients(self) -> int:
        """Gradients in all updates made so far."""
        return int(self.rows[:, _GRADIENTS].sum())

    @property
    def staleness(self) -> dict[int, int]:
        """Updates by their staleness: the number of others between their reading and their writing."""
        total = self.rows[:, _BEHIND:].sum(axis=0)
        return {int(behind): int(total[behind]) for behind in np.flatnonzero(total)}

    def add(
        self, worker: int, update: torch.Tensor, scale: float, *, seen: int, locks: int = 0, gradients: int = 1
    ) -> int:
        """Add `scale` times `update` (whole, or sparse and coalesced) to the values; the version that this made.

        `seen` is the version that it was computed on. With `locks`, each of so many ranges is written under its lock;
        then the version is exact if there is one range, else others may have counted theirs in between.
        """
        if not isinstance(self.values, Ghost):
            if locks == 1:
                with self.hold(0):  # counted under the same lock, so that the version is exact
                    self._add(update, scale)
                    return self.count(worker, update, seen, gradients)
            self._add_under_locks(update, scale, locks) if locks else self._add(update, scale)
        return self.count(worker, update, seen, gradients)

    def _add(self, update: torch.Tensor, scale: float) -> None:
        if update.is_sparse:
            self.values.index_add_(0, update.indices()[0], update.values(), alpha=scale)
        else:
            self.values.add_(update, alpha=scale)

    def _add_under_locks(self, update: torch.Tensor, scale: float, locks: int) -> None:
        edges = torch.arange(locks + 1) * self.values.numel() // locks
        indices = update.indices()[0] if update.is_sparse else None
        cuts = edges if indices is None else torch.searchsorted(indices, edges.to(indices.device))
        # One lock at a time: no worker holds one while it waits for another, so workers cannot deadlock.
        for lock, (start, stop) in enumerate(zip(cuts.tolist(), cuts.tolist()[1:], strict=False)):
            if start == stop:
                continue
            with self.hold(lock):
                if indices is None:
                    self.values[start:stop].add_(update[start:stop], alpha=scale)
                else:
                    self.values.index_add_(0, indices[start:stop], update.values()[start:stop], alpha=scale)

    def count(self, worker: int, update: torch.Tensor, seen: int, gradients: int = 1) -> int:
        """One more update of `worker`, of `gradients` mini-batches, computed on version `seen`; the version it made."""
        # Without a lock: no other worker writes to this row. Others may count meanwhile, so `behind` may be short of
        # updates that are written already.
        row = self.rows[worker]
        behind = self.version - seen
        row[_BEHIND + min(max(behind, 0), BUCKETS - 1)] += 1
        row[_WRITTEN] += touched(update)
        row[_UPDATES] += 1
        row[_GRADIENTS] += gradients
        return seen + behind + 1

    def refuse(self, worker: int) -> None:
        self.rows[worker, _REFUSED] += 1

    def claim(self, counter: int, amount: int, limit: int) -> int | None:
        """Advance a counter by `amount` unless it has reached its `limit`; its value before, None if it has."""
        with self.hold(_CLAIM_LOCKS + counter):
            at = int(self.claims[counter])
            if at >= limit:
                return None
            self.claims[counter] = at + amount
            return at

    def hold(self, first: int, count: int = 1) -> AbstractContextManager[None]:
        """Hold `count` locks from number `first` on; no effect on memory that other processes do not map."""
        return nullcontext() if self.locks is None else self.locks.hold(first, count)

    # ---- checkpoints

    def state(self) -> State:
        """The state that a checkpoint keeps, while no worker writes; a copy."""
        tensors = {} if isinstance(self.values, Ghost) else {"values": self.values, **self.vectors}
        return State(tensors, {"claims": self.claims.tolist(), "rows": self.rows.tolist()}).cloned()

    def restore(self, state: State) -> None:
        """Continue from `state`."""
        if not isinstance(self.values, Ghost):
            self.values.copy_(state.tensors["values"])
            for name, vector in self.vectors.items():
                vector.copy_(state.tensors[name])
        self.claims[:] = state.plain["claims"]
        self.rows[:] = state.plain["rows"]


def touched(update: torch.Tensor) -> int:
    """The number of elements of the model that an update writes."""
    if isinstance(update, Ghost):
        return update.numel()
    return update.values().numel() if update.is_sparse else update.numel()


def on_device(values: torch.Tensor) -> bool:
    """Whether `values` lie on an accelerator."""
    return not isinstance(values, Ghost) and not values.is_cpu


class Access:
    """Reads and writes of one worker. `locks` is 0 in racy mode. Operations that are `alone` exclude each other."""

    def __init__(self, node: Node, worker: int, segment: Segment, *, owner: Address, locks: int = 0) -> None:
        self.node = node
        self.worker = worker
        self.segment = segment
        self.owner = owner
        self._locks = locks

    async def read(self, into: torch.Tensor, *, alone: bool = False) -> tuple[torch.Tensor, int]:
        """The parameters and their version: where they lie if other processes write them, else copied to `into`.

        A replica on a device gets a copy, since its device does not read the memory of the host.
        """
        segment = self.segment
        if not alone:
            # Before the values: an update that is written in between counts in the staleness of this worker's next.
            version = segment.version
            in_place = segment.locks is not None and not on_device(into)
            return segment.values if in_place else into.copy_(segment.values), version
        return cast(tuple[torch.Tensor, int], await self._in_turn(partial(self._copy, into), 0))

    async def add(
        self, update: torch.Tensor, scale: float, *, seen: int, alone: bool = False, gradients: int = 1
    ) -> int:
        """Add `scale` times `update`, made of `gradients`, to the parameters; the version that this made.

        Raises `Refused` for an update with NaN or infinity.
        """
        if self.segment.locks is not None and on_device(update):
            update = update.cpu()  # the shared memory is the host's
        if not isinstance(update, Ghost) and not all_finite(update):
            self.segment.refuse(self.worker)
            raise Refused(f"an update of worker {self.worker} holds NaN or infinity: its training diverged.")
        locks, segment = 1 if alone else self._locks, self.segment
        nbytes = touched(update) * segment.layout.dtype.itemsize
        if segment.locks is not None and nbytes < SMALL:
            return segment.add(self.worker, update, scale, seen=seen, locks=locks, gradients=gradients)
        work = partial(segment.add, self.worker, update, scale, seen=seen, locks=locks, gradients=gradients)
        if locks == 1:
            return int(await self._in_turn(work, nbytes))
        return int(await self.node.compute(Apply(work, nbytes)))

    async def _in_turn(self, work: Callable[[], Any], nbytes: int) -> Any:
        """Do `work` while no other worker does exclusive work. Between processes the locks in `work` ensure that."""
        turns = self.segment.turns
        if turns is None:
            return await self.node.compute(Apply(work, nbytes))
        if turns.busy:
            await turns.wait(self.node)
        turns.busy = True
        try:
            return await self.node.compute(Apply(work, nbytes))
        finally:
            turns.end()

    def _copy(self, into: torch.Tensor) -> tuple[torch.Tensor, int]:
        with self.segment.hold(0):
            return into.copy_(self.segment.values), self.segment.version

    def vector(self, name: str) -> torch.Tensor:
        """A vector beside the model that no worker writes while a phase lasts."""
        return self.segment.vectors[name]

    def claim(self, counter: int, amount: int, *, limit: int) -> int | None:
        """Advance a counter that starts at 0 in each phase; its value before, None once that is at `limit`."""
        return self.segment.claim(counter, amount, limit)

    def contribute(self, total: torch.Tensor, weight: float, *, incarnation: int) -> Operation[Reply]:
        """Send a weighted sum to the owner, which makes a mean of all sums at the end of this phase."""
        fields: dict[str, Any] = {"worker": self.worker, "incarnation": incarnation, "weight": weight}
        return self.node.call(self.owner, "contribute", total, **fields)


class SharedShard(RemoteService):
    """A service that owns a segment, in the place of a shard.

    A method in phases has a clock that closes a group at the end of each. Odd versions end a phase of contributions:
    their sum, divided by their weights, becomes the vector `mean`. Even ones end a phase of updates: `snapshot` becomes
    a copy of the model. Claims then start at 0 again.
    """

    called = "shared memory"

    def __init__(self, node: Node, segment: Segment, initial: torch.Tensor, *, path: str = "") -> None:
        self.node = node
        self.segment = segment
        self.path = path
        self.sequences = SequenceTracker()
        self.closed = 0
        self.weight = 0.0
        self.total: torch.Tensor | None = None
        if not isinstance(initial, Ghost):
            segment.values.copy_(initial)
            if "snapshot" in segment.vectors:
                segment.vectors["snapshot"].copy_(initial)
        self._specs = (TensorSpec(str(segment.layout.dtype).removeprefix("torch."), segment.layout.numel),)

    @property
    def values(self) -> torch.Tensor:
        """The model as it is now."""
        return self.segment.values

    @property
    def applied(self) -> int:
        return self.segment.version

    @property
    def refused(self) -> int:
        return self.segment.refused

    @property
    def gradients(self) -> int:
        return self.segment.gradients

    @property
    def staleness(self) -> dict[int, int]:
        return self.segment.staleness

    @remote(WORKERS)
    def _where(self, call: Call) -> Reply:
        """The path by which other processes map the segment."""
        return Reply({"path": self.path})

    @remote(DRIVER, WORKERS, counted=maybe(TRUTH), version=maybe(nullable(COUNT)))
    def _pull(self, call: Call) -> Reply:
        """Version and a copy of the values; `counted`: and the gradients in them."""
        counts = {"gradients": self.gradients} if "counted" in call.fields else {}
        return Reply({"version": self.segment.version, **counts}, (self.values.clone(),))

    @remote(WORKERS, **LIFE, weight=FINITE)
    @carrying(lambda owner: owner._specs)
    def _contribute(self, call: Call) -> Reply:
        """Add a sum to those of this phase."""
        self.sequences.check(call.fields["worker"], call.fields["incarnation"])
        weight, (given,) = float(call.fields["weight"]), call.tensors
        self.weight += weight
        if not isinstance(given, Ghost):
            # The first is copied: the memory of a request is used for others once it is answered.
            self.total = given.clone() if self.total is None else self.total.add_(given)
        return Reply()

    @remote(CLOCK, **CLOSED)
    def _close(self, call: Call) -> Reply:
        """End the phase."""
        version = call.fields["version"]
        if version > self.closed:  # else the clock has repeated an order
            self.closed = version
            # No lock: the clock is on this node, and its call runs here before it admits a worker to the next phase.
            self.segment.claims[:] = 0
            if version % 2:
                self._take_mean()
            elif "snapshot" in self.segment.vectors:
                self.segment.vectors["snapshot"].copy_(self.values)
        return Reply({"version": self.segment.version})

    def _take_mean(self) -> None:
        """Make the vector `mean` of this phase's contributions; zero if every worker was lost before its own."""
        mean = self.segment.vectors["mean"]
        if self.total is not None and self.weight:
            torch.div(self.total, self.weight, out=mean)
        else:
            mean.zero_()
        self.total, self.weight = None, 0.0

    @remote(CLOCK, **LEFT)
    def _leave(self, call: Call) -> Reply:
        """Refuse further contributions of an incarnation that is over."""
        self.sequences.fence(call.fields["worker"], call.fields["incarnation"] + 1)
        return Reply()

    @remote(DRIVER, WORKERS)
    def _status(self, call: Call) -> Reply:
        """The counters."""
        segment = self.segment
        counters: dict[str, Any] = {"version": segment.version, "applied": segment.version, "refused": segment.refused}
        counters["gradients"] = segment.gradients
        counters["written"] = segment.written
        counters["staleness"] = {str(behind): count for behind, count in segment.staleness.items()}
        return Reply({**counters, "phases": self.closed, "log": []})

    # ---- checkpoints

    def state(self) -> State:
        """The state that a checkpoint keeps, while no worker writes; a copy."""
        tensors = {} if self.total is None else {"total": self.total.clone()}
        plain = {"closed": self.closed, "weight": self.weight, "ledger": self.sequences.state()}
        return self.segment.state() | State(tensors, plain)

    def restore(self, state: State) -> None:
        """Continue from `state`, on a fresh segment."""
        self.segment.restore(state)
        tensors, plain = state.tensors, state.plain
        self.total = tensors["total"].clone() if "total" in tensors else None
        self.closed, self.weight = int(plain["closed"]), float(plain["weight"])
        self.sequences.restore(plain["ledger"])
