"""Leases of mini-batches: how the driver of an elastic run hands out the work, whoever joins, leaves or dies.

A run has a fixed number of mini-batches, whose samples are one shuffled order for all workers. A worker leases a short
range of them, works through it, and asks for the next one.

| event                    | consequence                                                                |
|--------------------------|----------------------------------------------------------------------------|
| a worker asks again      | its range is used up; it gets the first range that is free                 |
| a worker leaves or fails | the rest of its range, after its last report, is free again                |
| no range is free         | the worker has finished: only those that hold a range go on                |

So every mini-batch is used at least once, and only those that a dead worker used after its last report are used again.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dure.job.data.split import BatchSampler

MOST = 16
"""Mini-batches of a lease at most."""

SHARES = 4
"""Leases that each worker would get if the free mini-batches were dealt out now: at the end they become short."""


class Leases:
    """The mini-batches 0 to `total` - 1 of a run, by their state: free, held by a worker, or used.

    >>> leases = Leases(10)
    >>> leases.take("worker 0", workers=1), leases.take("worker 1", workers=2)
    (range(0, 3), range(3, 4))
    >>> leases.report("worker 0", 1)
    >>> leases.give_back("worker 0")
    >>> leases.take("worker 1", workers=1), leases.left
    (range(1, 3), 8)
    """

    def __init__(self, total: int) -> None:
        self._free = [(0, total)] if total else []
        self._held: dict[str, tuple[int, int]] = {}

    @property
    def left(self) -> int:
        """The mini-batches that are not reported as used."""
        return sum(stop - start for start, stop in (*self._free, *self._held.values()))

    @property
    def free(self) -> int:
        """The mini-batches that no worker holds."""
        return sum(stop - start for start, stop in self._free)

    def take(self, name: str, *, workers: int) -> range:
        """Lease the next range to a worker, one of `workers`, that has used up its last; empty if none is free."""
        self._held.pop(name, None)
        if not self._free:
            return range(0)
        size = min(MOST, -(-self.free // (SHARES * workers)))
        start, stop = self._free.pop(0)
        middle = min(stop, start + size)
        if middle < stop:
            self._free.insert(0, (middle, stop))
        self._held[name] = start, middle
        return range(start, middle)

    def report(self, name: str, position: int) -> None:
        """Note that a worker has used its mini-batches before `position`."""
        start, stop = self._held.get(name, (0, 0))
        if start < position <= stop:
            self._held[name] = position, stop

    def give_back(self, name: str) -> None:
        """Free what a worker has not reported as used."""
        start, stop = self._held.pop(name, (0, 0))
        if start < stop:
            insort(self._free, (start, stop))


class LeasedBatches:
    """The worker's end: it moves its `sampler` to the ranges that it leases by `ask`, until it is told to `retire`.

    A run with the least number of workers, `least`, has one step for as many mini-batches.
    """

    def __init__(self, sampler: BatchSampler, ask: Callable[[], Awaitable[range]], least: int) -> None:
        self.retiring = False
        self._sampler = sampler
        self._ask = ask
        self._least = least
        self._stop = sampler.number

    @property
    def number(self) -> int:
        """The number of the next mini-batch of this worker in the run."""
        return self._sampler.number

    @property
    def step(self) -> int:
        """As `sync.worker_state.LeasedWork`."""
        return self._sampler.number // self._least

    async def is_left(self) -> bool:
        """As `sync.worker_state.LeasedWork`."""
        if self.retiring:
            return False
        if self._sampler.number >= self._stop:
            found = await self._ask()
            self._sampler.number, self._stop = found.start, found.stop
        return self._sampler.number < self._stop

    def drop(self) -> None:
        """Leave the rest of the range: the driver has given it to others."""
        self._stop = self._sampler.number
