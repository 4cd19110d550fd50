"""Leases of mini-batches: how the driver of an elastic run hands out the work, whoever joins, leaves or dies.

A run has a fixed number of mini-batches, whose samples are one shuffled order for all workers. A worker leases a short
range of them, works through it, and asks for the next one.

| event                    | consequence                                                                |
|--------------------------|----------------------------------------------------------------------------|
| a worker asks again      | its range is used up; it gets the first range that is free                 |
| a worker leaves or fails | the rest of its range, after its last report, is free again                |
| no range is free         | the worker has finished: only those that hold a range go on                |

So every mini-batch is used at least once, and only those that a dead worker used after its last report are used again.

A checkpoint has the ranges that are left, in the driver's part. All workers have stopped and reported then, so a run
that is resumed uses each of these mini-batches, and no other, whatever workers it has.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dure.core.node import Address, Reply
from dure.core.protocol import COUNT, WORKERS, remote
from dure.run.roster import DriverService

if TYPE_CHECKING:
    from dure.core.node import Call, Node
    from dure.job.data.split import BatchSampler
    from dure.run.roster import ProcessRoster

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
        self.total = total
        self._free = [(0, total)] if total else []
        self._held: dict[str, tuple[int, int]] = {}

    @property
    def left(self) -> int:
        """The mini-batches that are not reported as used."""
        return sum(stop - start for start, stop in (*self._free, *self._held.values()))

    @property
    def used(self) -> int:
        """The mini-batches that are reported as used."""
        return self.total - self.left

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

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint keeps, as plain values: the ranges that are `left`, in order."""
        left: list[list[int]] = []
        for start, stop in sorted((*self._free, *self._held.values())):
            if left and left[-1][1] == start:
                left[-1][1] = stop
            else:
                left.append([start, stop])
        return {"total": self.total, "left": left}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave: all that is left is free. A run that is longer now has more."""
        left = (*state["left"], (state["total"], self.total))
        within = [(int(start), min(int(stop), self.total)) for start, stop in left]
        self._free, self._held = [(start, stop) for start, stop in within if start < stop], {}


def reached(state: Mapping[str, Any]) -> int:
    """The mini-batch after the last that is used, in the state of leases."""
    start, stop = state["left"][-1] if state["left"] else (0, 0)
    return int(start if stop == state["total"] else state["total"])


LEASES = Address("driver", "leases")


class LeaseService(DriverService):
    """The driver's end: leases mini-batches to the workers of `roster`, and hears which they have used."""

    called = "the leases"

    def __init__(self, leases: Leases, roster: ProcessRoster) -> None:
        super().__init__(roster)
        self._leases = leases

    @remote(WORKERS)
    def _take(self, call: Call) -> Reply:
        leased = self._leases.take(call.caller, workers=max(1, len(self.roster.living())))
        return Reply({"leased": [leased.start, leased.stop]})

    @remote(WORKERS, number=COUNT)
    def _used(self, call: Call) -> Reply:
        self._leases.report(call.caller, call.fields["number"])
        return Reply()


class LeasedBatches:
    """The worker's end: it moves its `sampler` to the ranges that its `node` leases from the driver.

    A run with the least number of workers, `least`, has one step for as many mini-batches.
    """

    def __init__(self, sampler: BatchSampler, node: Node, least: int) -> None:
        self._sampler = sampler
        self._node = node
        self._least = least
        self._stop = sampler.number

    def report(self) -> None:
        """Tell the driver which mini-batches are used."""
        self._node.call(LEASES, "used", number=self._sampler.number)

    @property
    def step(self) -> int:
        """As `sync.worker_state.LeasedWork`."""
        return self._sampler.number // self._least

    async def is_left(self) -> bool:
        """As `sync.worker_state.LeasedWork`."""
        if self._sampler.number >= self._stop:
            self._sampler.number, self._stop = (await self._node.call(LEASES, "take")).fields["leased"]
        return self._sampler.number < self._stop

    def drop(self) -> None:
        """Leave the rest of the range: the driver has given it to others."""
        self._stop = self._sampler.number
