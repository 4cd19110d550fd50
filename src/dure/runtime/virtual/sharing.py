"""Queues whose members share a resource at every moment: the cores of a machine, one direction of a network card.

Both are *processor-sharing queues*. On `Cores` each of n busy processes gets min(1, cores / n) of a core. A `Process`
serves one demand after another, as the single thread of a real process does: demands made while it is busy wait in
their order. A demand that follows from the one that has just ended (the reply to a message, the step after a gradient)
is served before the waiting ones.

    one process, s seconds of work            s
    n processes at once, s seconds each       s * max(1, n / cores)
    one process asked twice, s and t          s, then s + t

In a `SharingQueue` transfers share the bandwidth of a card in proportion to their weights.

A queue counts in a time of its own: what a member of weight 1, present since the queue was last empty, would have got
of a core (seconds) or of the card (bytes). In that time the end of a member is constant, so that each change costs
O(log n) (Demers, Keshav, Shenker 1989; Parekh, Gallager 1993). `Processor` is the simpler queue of a machine's cores
that handles messages: first come, first served.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush, heapreplace
from typing import Any

from dure.runtime.virtual.kernel import Kernel, Timer

EGRESS, INGRESS, BOTH = 1, 2, 3
"""Sides of a transfer, as bits: the sender's card, the receiver's card."""

SIDES = {"uplink": 4, "line": 8, "downlink": 16}
"""Sides of a transfer on the links that machines share, by their kind, as bits."""


class Demand:
    """A request for `seconds` of a core; `done` is called at its end. `tag` is the end in the time of the cores."""

    __slots__ = ("done", "dropped", "seconds", "tag")

    def __init__(self, seconds: float, done: Callable[[], None]) -> None:
        self.seconds = seconds
        self.done = done
        self.dropped = False
        self.tag = 0.0


class Cores:
    """The cores of one machine. The demands in service share them equally."""

    def __init__(self, kernel: Kernel, cores: int) -> None:
        self.kernel = kernel
        self.cores = cores
        self._heap: list[tuple[float, int, Demand, Callable[[], None]]] = []
        self._present: set[Demand] = set()
        self._sequence = 0
        self._virtual = 0.0  # seconds of a core per demand, as of `_last`
        self._last = 0.0
        self._timer: Timer | None = None

    @property
    def rate(self) -> float:
        """Share of a core that each demand gets at present."""
        return min(1.0, self.cores / max(len(self._present), 1))

    def begin(self, demand: Demand, ended: Callable[[], None]) -> None:
        """Start to serve `demand`; `ended` is called once it has got its seconds."""
        self._advance()
        # Nobody is in service: the own time begins at 0 again, so that it keeps its precision in a long run.
        if not self._present:
            self._heap.clear()
            self._virtual = 0.0
        self._present.add(demand)
        self._sequence += 1
        demand.tag = self._virtual + demand.seconds
        heappush(self._heap, (demand.tag, self._sequence, demand, ended))
        self._schedule()

    def end(self, demand: Demand) -> float:
        """Stop serving `demand`. Return the seconds that it still needs."""
        self._advance()
        self._present.discard(demand)
        self._schedule()
        return max(demand.tag - self._virtual, 0.0)

    def _advance(self) -> None:
        now = self.kernel.now
        self._virtual += (now - self._last) * self.rate
        self._last = now

    def _first(self) -> Demand | None:
        heap = self._heap
        # Removal is lazy: a demand that has ended or begun anew leaves its old entry behind, with another tag.
        while heap and (heap[0][2] not in self._present or heap[0][0] != heap[0][2].tag):
            heappop(heap)
        return heap[0][2] if heap else None

    def _schedule(self) -> None:
        if self._timer is not None:
            self.kernel.void(self._timer)
            self._timer = None
        first = self._first()
        if first is not None:
            due = self._last + max(first.tag - self._virtual, 0.0) / self.rate
            self._timer = self.kernel.timer(due, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._advance()
        first = self._first()
        assert first is not None
        # Rounding can leave the own time just short of the tag at which the timer fired.
        self._virtual = max(self._virtual, first.tag)
        _, _, demand, ended = heappop(self._heap)
        self._present.discard(demand)
        self._schedule()
        ended()


class Process:
    """One process on `cores`: serves its demands one after another.

    A paused process serves nothing and keeps its demands.
    """

    def __init__(self, cores: Cores) -> None:
        self._cores = cores
        self._queue: deque[Demand] = deque()
        self._current: Demand | None = None
        self._following: list[Demand] | None = None  # demands made at the moment at which the last one ended
        self._paused = False

    def run(self, seconds: float, done: Callable[[], None], *, last: bool = False) -> Demand:
        """Request `seconds` of a core; `done` is called at their end. A `last` demand waits for all earlier ones."""
        demand = Demand(seconds, done)
        if self._following is None or last:
            self._queue.append(demand)
        else:
            self._following.append(demand)
        self._next()
        return demand

    def drop(self, demand: Demand) -> None:
        """Remove a demand that has not ended; its `done` is never called."""
        demand.dropped = True
        if demand is self._current:
            if not self._paused:
                self._cores.end(demand)
            self._current = None
            self._next()

    def clear(self) -> None:
        """Remove all demands after a crash of the process."""
        self._queue.clear()
        self._following = None
        self._paused = False
        if self._current is not None:
            self.drop(self._current)

    def pause(self) -> None:
        """Stop serving until `go_on`."""
        if not self._paused and self._current is not None:
            self._current.seconds = self._cores.end(self._current)
        self._paused = True

    def go_on(self) -> None:
        """End a pause."""
        if self._paused:
            self._paused = False
            if self._current is not None:
                self._cores.begin(self._current, self._ended)
            self._next()

    def stretch(self, demand: Demand, factor: float) -> None:
        """Multiply what `demand` still needs by `factor`."""
        if demand is self._current and not self._paused:
            demand.seconds = self._cores.end(demand) * factor
            self._cores.begin(demand, self._ended)
        else:
            demand.seconds *= factor

    def _next(self) -> None:
        while self._current is None and self._following is None and not self._paused and self._queue:
            demand = self._queue.popleft()
            if not demand.dropped:
                self._current = demand
                self._cores.begin(demand, self._ended)

    def _ended(self) -> None:
        demand, self._current = self._current, None
        assert demand is not None
        # The coroutines that `done` resumes run in this same virtual moment. Their requests follow from this
        # demand: a real thread goes on with it before it looks at its next message.
        self._following = []
        kernel = self._cores.kernel
        kernel.timer(kernel.now, self._followed)  # runs after the coroutines that `done` resumes
        demand.done()

    def _followed(self) -> None:
        self._queue.extendleft(reversed(self._following or ()))
        self._following = None
        self._next()


class Transfer:
    """A message on the wire. `pending` has a bit for each side that is not done; `weight` is its share of a queue."""

    __slots__ = ("message", "nbytes", "pending", "weight")

    def __init__(self, message: Any, weight: float = 1.0) -> None:
        self.message = message
        self.nbytes = message.wire
        self.weight = weight
        self.pending = BOTH


class SharingQueue:
    """One direction of a card or a shared link: transfers share `bandwidth` bytes/s in proportion to their weights.

    `bit` is the side of a `Transfer` that this queue serves; `left` is called when all sides of a transfer are done.
    """

    __slots__ = ("_due", "_fire", "_heap", "_last", "_left", "_sequence", "_total", "_virtual", "active", "bandwidth",
                 "bit", "kernel")  # fmt: skip

    def __init__(self, kernel: Kernel, bandwidth: float, bit: int, left: Callable[[Transfer], None]) -> None:
        self.kernel = kernel
        self.bandwidth = bandwidth
        self.bit = bit
        self.active = 0  # transfers in service; the heap may also hold removed ones
        self._total = 0.0  # sum of their weights
        self._left = left
        self._heap: list[tuple[float, int, Transfer]] = []
        self._sequence = 0
        self._virtual = 0.0  # bytes per transfer of weight 1, as of `_last`
        self._last = 0.0
        self._due = math.inf  # time of the next event; an event that fires earlier is stale
        self._fire = self.fire

    def add(self, transfer: Transfer) -> None:
        """Start to serve `transfer`."""
        now = self.kernel.now
        active = self.active
        # Own time: bytes that a transfer of weight 1 has got. It runs slower the more weights are in service, and the
        # tag of a transfer, once given, never changes.
        if active:
            virtual = self._virtual = self._virtual + (now - self._last) * self.bandwidth / self._total
        else:
            self._heap.clear()
            virtual = self._virtual = 0.0
            self._total = 0.0
        self._last = now
        self.active = active + 1
        self._total = total = self._total + transfer.weight
        self._sequence += 1
        heap = self._heap
        tag = virtual + transfer.nbytes / transfer.weight
        heappush(heap, (tag, self._sequence, transfer))
        # An arrival delays every other end: only a new first one can bring the next event forward.
        if heap[0][2] is transfer:
            due = now + (tag - virtual) * total / self.bandwidth
            if due < self._due:
                self._due = due
                self.kernel.at(due, self._fire)

    def remove(self, transfer: Transfer) -> None:
        """Remove an unfinished `transfer`."""
        now = self.kernel.now
        self._virtual += (now - self._last) * self.bandwidth / self._total
        self._last = now
        transfer.pending &= ~self.bit
        self.active -= 1
        self._total -= transfer.weight
        self._schedule(now)

    def fire(self) -> None:
        """Handle an event: finish the transfers that end now, and schedule the next event."""
        now = self.kernel.now
        # Events are not cancelled: one that an arrival or a removal has overtaken finds nothing due.
        if now < self._due:
            return
        self._due = math.inf
        heap, bit = self._heap, self.bit
        while heap and not heap[0][2].pending & bit:
            heappop(heap)
        if not heap:
            return
        tag, _, transfer = heap[0]
        due = self._last + (tag - self._virtual) * self._total / self.bandwidth
        # Transfers that arrived since the event was scheduled have delayed the end.
        if due > now:
            self._due = due
            self.kernel.at(due, self._fire)
            return
        self._virtual, self._last = tag, now
        if len(heap) == 1:  # the most frequent case
            heap.clear()
            self.active = 0
            transfer.pending ^= bit
            if not transfer.pending:
                self._left(transfer)
            return
        done: list[Transfer] = []
        while heap and heap[0][0] <= tag:
            transfer = heappop(heap)[2]
            if transfer.pending & bit:
                transfer.pending ^= bit
                self.active -= 1
                self._total -= transfer.weight
                if not transfer.pending:
                    done.append(transfer)
        if heap:
            self._schedule(now)
        for transfer in done:
            self._left(transfer)

    def _schedule(self, now: float) -> None:
        heap, bit = self._heap, self.bit
        while heap and not heap[0][2].pending & bit:
            heappop(heap)
        if heap:
            due = max(now, self._last + (heap[0][0] - self._virtual) * self._total / self.bandwidth)
            if due < self._due:
                self._due = due
                self.kernel.at(due, self._fire)


class Processor:
    """The cores of a host. Requests are served in order, each by the core that is free first."""

    __slots__ = ("_free",)

    def __init__(self, cores: int) -> None:
        self._free = [0.0] * cores

    def reserve(self, now: float, seconds: float) -> float:
        """Take `seconds` of a core from `now` on. Return the time at which they end."""
        free = self._free
        first = free[0]
        done = (now if now > first else first) + seconds
        heapreplace(free, done)
        return done

    def clear(self) -> None:
        """Drop all requests after a crash of the machine."""
        self._free[:] = [0.0] * len(self._free)
