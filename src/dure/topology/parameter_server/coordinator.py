"""The coordinator of a batch method: it holds numbers, commands vectors on shards, and hands out work.

Dean et al., "Large Scale Distributed Deep Networks", NeurIPS 2012, section 4.2. What goes where:

    worker                          shards 0..S-1                      coordinator (on server 0)
      ask ------------------------------------------------------------->  is there a portion?
      <----------------------------------- portions, of which batch, and which point --
      fetch the point, once per evaluation
      (the gradients of its portions, added up)
      the sum ------------------------> staged, not added
      ask, with the report of it --------------------------------------->  does it count?
                                        <--- accumulate, or drop ----------
      <----------------------------------- the next portions --
                                        <--- dot, axpy, ... -------------  the method goes on

A sum counts if none of its portions has been counted before, so each portion counts once, on all shards alike, however
often it was evaluated. Sums for an earlier point never count. If a worker fails, others repeat the portions that it has
not reported. The coordinator waits for a worker without progress only at a checkpoint and at the end, where it evicts
the worker (`Limits.evict_seconds`).
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from dure.core.deployment import rank_of_worker
from dure.core.node import Address, Call, EndOfWork, Operation, Reply
from dure.core.protocol import CLOCK, COUNT, OWN, TRUTH, WORKERS, RemoteService, listed, nullable, remote
from dure.errors import DureError, Evicted, PeerLost
from dure.topology.fields import COMMAND, REPORT
from dure.topology.parameter_server.clock import EVICT_SECONDS, ProgressMonitor
from dure.topology.parameter_server.shard import Shard

if TYPE_CHECKING:
    from dure.core.meter import Meter
    from dure.core.node import Node
    from dure.job.data.split import Batches
    from dure.topology.parameter_server.clock import ClockService


Run = tuple[int, int]
"""Portions from the first up to but without the second."""


class Portions:
    """The portions of one batch after another, for `workers` ranks; at most `most` are given out at a time.

    Many small portions, so that no worker waits long for a slow one:

        free        |0 ---------- 9|10 -------- 19|20 -------- 29|     each worker begins at a place of its own
        worker 0     ==>            |              |                    and goes on where it left off (affinity)
        worker 1                     ======>       |
        worker 2                                    =============|      has no more: goes to the middle of the
                                        x=>                             longest stretch that is left
        nothing is free             portions without a result are given out again; the first result counts

    A worker gets several portions at once, as many as it can do in half of the time that is left, judging by its last
    ones: so the last ones are given out one by one. All of this is decided here, without input or output.

    `left` counts those that have no result yet. Times are in seconds, of any clock.
    """

    def __init__(self, workers: int, most: int = 1) -> None:
        self.workers = workers
        self.most = most
        self._pace: dict[int, float] = {}
        self.begin(0)

    def begin(self, count: int) -> None:
        """A new batch of `count` portions. What was given out of the last one is forgotten."""
        self.count = self.left = count
        self._free: list[Run] = [(0, count)] if count else []
        self._finished = bytearray(count)
        self._copies: Counter[int] = Counter()
        self._given: dict[int, tuple[Run, float]] = {}
        self._next: dict[int, int] = {}

    def give(self, worker: int, now: float) -> Run | None:
        """The next portions of `worker`, in place of those that it had; None if there are none."""
        self.drop(worker)
        run = self._take(worker) if self._free else self._backup()
        if run is not None:
            self._given[worker] = (run, now)
            self._copies.update(range(*run))
            self._next[worker] = run[1]
        return run

    def finish(self, worker: int, run: Run, now: float) -> bool:
        """Take a worker's sum over `run`; returns False if it does not count, as a part of it counts already."""
        given = self._given.get(worker)
        if given is not None and given[0] == run:
            self._pace[worker] = max((now - given[1]) / (run[1] - run[0]), 1e-9)
        if any(self._finished[portion] for portion in range(*run)):
            return False
        for portion in range(*run):
            self._finished[portion] = 1
        self.left -= run[1] - run[0]
        return True

    def drop(self, worker: int) -> None:
        """Take the unfinished portions of `worker` back. Those that no other worker has are free again."""
        run, _ = self._given.pop(worker, ((0, 0), 0.0))
        for portion in range(*run):
            self._copies[portion] -= 1
            if not self._copies[portion] and not self._finished[portion]:
                self._put_back(portion)

    def leave(self, worker: int) -> None:
        """Take the portions of a lost worker back, and forget its pace."""
        self.drop(worker)
        self._pace.pop(worker, None)
        self._next.pop(worker, None)

    def _put_back(self, portion: int) -> None:
        joined: list[Run] = []
        for low, high in sorted([*self._free, (portion, portion + 1)]):
            if joined and joined[-1][1] == low:
                joined[-1] = (joined[-1][0], high)
            else:
                joined.append((low, high))
        self._free = joined

    def _take(self, worker: int) -> Run:
        """Free portions: from where it left off, else from the middle of the longest stretch."""
        start = self._next.get(worker, worker % self.workers * self.count // self.workers)
        place = next((i for i, (low, high) in enumerate(self._free) if low <= start < high), None)
        if place is None:
            place = max(range(len(self._free)), key=lambda i: self._free[i][1] - self._free[i][0])
            start = sum(self._free[place]) // 2
        low, high = self._free[place]
        stop = min(start + self._share(worker), high)
        self._free[place : place + 1] = [run for run in ((low, start), (stop, high)) if run[0] < run[1]]
        return start, stop

    def _share(self, worker: int) -> int:
        """Portions that a worker can do in half of the time that all need for the free ones; 1 if no pace is known."""
        pace = self._pace.get(worker)
        if pace is None:
            return 1
        free = sum(high - low for low, high in self._free)
        seconds = free / sum(1 / each for each in self._pace.values())
        return max(1, min(self.most, int(seconds / 2 / pace)))

    def _backup(self) -> Run | None:
        """A portion that others work on: one with the fewest copies, the oldest first."""
        out = [p for run, _ in self._given.values() for p in range(*run) if not self._finished[p]]
        portion = min(out, key=lambda portion: self._copies[portion], default=None)
        return None if portion is None else (portion, portion + 1)


Command = tuple[Any, ...]
"""A command to the shards (`vectors`): its name and its arguments."""

COORDINATOR = Address("server 0", "coordinator")

ASK = {"worker": OWN, "incarnation": COUNT, "due": TRUTH, "report": nullable(REPORT)}
"""Fields of a worker's question for something to do."""


class Limits(NamedTuple):
    """When the work ends: after so many portions, all workers together, or so many seconds.

    At a checkpoint and at the end, a worker that shows no progress for `evict_seconds` is left behind.
    """

    portions: int
    seconds: float = math.inf
    evict_seconds: float = EVICT_SECONDS


class Coordinator(RemoteService):
    """The operations of a batch method (`order`, `evaluate`, `boundary`, `kept`), and a service to its workers.

    What must survive a restart is `kept` (values that JSON has) and the vectors on the shards, as they are at a
    `boundary`. `timing_only` runs have no numbers: losses are 0, and every dot product is 1. It is on the clock's node
    and commands the clock's shards, unless `node` and `shards` replace them.
    """

    called = "a coordinator"

    def __init__(
        self,
        clock: ClockService,
        batches: Batches,
        portions: Portions,
        *,
        limits: Limits,
        timing_only: bool = False,
        node: Node | None = None,
        shards: Sequence[Address] | None = None,
    ) -> None:
        self.node = node = node or clock.node
        self.clock = clock
        self.shards = shards or clock.shards
        self.batches = batches
        self.portions = portions
        self.limits = limits
        self.timing_only = timing_only
        self.kept: dict[str, Any] = {}
        self.meter: Meter | None = None  # of the node, where a trace has the rounds of commands
        self.evaluations = 0
        self.spent = 0
        self._began = 0.0
        self._task: Mapping[str, Any] | None = None
        self._into = ""
        self._losses: dict[int, float] = {}
        self._complete: Operation[bool] = node.promise("")
        self._asking: dict[int, Operation[Reply]] = {}
        self._reports: dict[int, Any] = {}
        self._present: dict[int, int] = {}
        self._fenced: dict[int, int] = {}
        self._outstanding: list[Operation[Reply]] = []
        self._progress = ProgressMonitor.at(node, limits.evict_seconds, self.shards)
        self._due = self._past_the_first = False
        self._resumed: Operation[None] | None = None
        self._told: set[int] = set()
        self._final: Mapping[str, Any] | None = None

    # ---- operations of a method

    async def lead(self, method: Callable[[Coordinator], Awaitable[None]], seconds: float = 0.0) -> None:
        """Run the method, which begins `seconds` after the start of the run; then end the work of all workers."""
        self._began = self.node.now() - seconds
        final: Mapping[str, Any] = {"end": True}
        try:
            await method(self)
        except EndOfWork:
            pass
        except PeerLost:
            return  # a server has failed, and the run goes back to its last checkpoint or ends: no worker is to end it
        except DureError as error:
            final = {"failed": str(error)}
        self._task, self._final = None, final
        self._told.clear()
        self._answer_all()
        await self._wait_for_all(None)

    async def boundary(self) -> None:
        """Between two iterations: where all state is declared. Waits while a checkpoint is taken."""
        if self._due and self._past_the_first:
            resumed = self._resumed = self.node.promise("the checkpoint to be complete")
            self._answer_all()
            self.node.spawn(self._wait_for_all(resumed), "the coordinator's watch of workers without progress")
            await resumed
            self._told.clear()
        self._past_the_first = True

    async def order(self, *commands: Command) -> list[float]:
        """Have all shards carry out `commands`; the dot products among them, summed over shards."""
        program, started = [list(command) for command in commands], self.node.now()
        calls = [self.node.call(shard, "order", commands=program) for shard in self.shards]
        parts = [(await call).fields["dots"] for call in calls]
        if self.meter is not None:
            self.meter.add("communicate", started, self.node.now(), "order")
        return [math.fsum(part) for part in zip(*parts, strict=True)]

    async def evaluate(
        self, point: str, into: str, *, batch: int = 0, first: Sequence[Command] = (), then: Sequence[Command] = ()
    ) -> tuple[float, list[float]]:
        """The mean loss of a batch at the vector `point`; its gradient becomes the vector `into`.

        `first` and `then` are commands before and after, in the same messages. A loss that is no number is infinite,
        and then there is neither a gradient nor what `then` gives. Raises `EndOfWork` at the end of the work.
        """
        if self.spent >= self.limits.portions or self.node.now() - self._began >= self.limits.seconds:
            raise EndOfWork
        await self.order(*first, ("zero", into))
        self.evaluations += 1
        self.portions.begin(self.batches.count)
        self._losses, self._into = {}, into
        self._task = {"evaluation": self.evaluations, "batch": batch, "point": point}
        self._complete = self.node.promise(f"evaluation {self.evaluations}")
        self._answer_all()
        finite = await self._complete
        self._task = None
        await self.settled()  # raises the error of a shard that has refused an order
        if not finite:
            return math.inf, []
        total = self.batches.size
        dots = await self.order(("scale", into, 1.0 / total), *then)
        return math.fsum(self._losses.values()) / total, dots

    # ---- calls of workers

    @remote(WORKERS, **ASK)
    def ask(self, call: Call) -> Operation[Reply]:
        """The next portions, once there are some; or `suspend`, or `end`.

        `due`: the worker is to stop for a checkpoint. `report` is of the portions that it has just done, or None.
        """
        fields = call.fields
        worker, incarnation = fields["worker"], fields["incarnation"]
        if incarnation < self._fenced.get(worker, 0):
            raise Evicted(f"worker {worker} is no member under incarnation {incarnation}: join first.")
        self._present[worker] = incarnation
        self._progress.step(worker)
        # A question that is repeated, as its answer was late, brings the same report, which counts once.
        if fields["report"] is not None and self._reports.get(worker) != (incarnation, fields["report"]):
            self._reports[worker] = (incarnation, fields["report"])
            self._take(worker, incarnation, **fields["report"])
        if self._resumed is not None and worker in self._told:
            self._resumed.resolve()  # it comes back: the checkpoint is complete
            self._resumed, self._due = None, False
        self._due = self._due or fields["due"]
        waiting = self._asking.get(worker)
        if waiting is None:
            waiting = self._asking[worker] = self.node.promise(f"something for worker {worker} to do")
        self._answer_all()
        return waiting

    def _take(
        self, worker: int, incarnation: int, evaluation: int, run: Run, seq: int | None, losses: Sequence[float]
    ) -> None:
        """Count the portions in `run`, whose sum a worker has staged as `seq`. No `losses`: the sum is not finite."""
        run = run[0], run[1]
        self.spent += run[1] - run[0]
        counts = False
        if evaluation == self.evaluations and not self._complete.done:
            if losses:
                counts = self.portions.finish(worker, run, self.node.now())
            else:
                self._complete.resolve(False)
        if seq is not None:
            staged = worker, incarnation, seq
            self._tell(("accumulate", self._into, *staged) if counts else ("drop", *staged))
        if counts:
            self._losses.update(zip(range(*run), losses, strict=True))
            if not self.portions.left:
                self._complete.resolve(True)

    def _tell(self, command: Command) -> None:
        """Send an order to all shards without waiting for it. They carry out orders as these were sent."""
        for shard in self.shards:
            self._outstanding.append(self.node.call(shard, "order", commands=[list(command)]))

    def lost(self, node: str) -> None:
        """Remove the worker of a lost node, and give its portions to other workers."""
        worker = rank_of_worker(node)
        if worker is not None:
            self._remove(worker)
            self._answer_all()

    def _remove(self, worker: int) -> None:
        self.portions.leave(worker)
        self._fenced[worker] = self._present.pop(worker, -1) + 1
        self._tell(("fence", worker, self._fenced[worker]))
        waiting = self._asking.pop(worker, None)
        if waiting is not None:
            waiting.fail(Evicted(f"worker {worker} was taken off the clock: join again."))

    async def _wait_for_all(self, resumed: Operation[None] | None) -> None:
        """Wait until all live workers have their answer to suspend or to end; evict workers without progress."""
        while self._resumed is resumed:
            missing = [worker for worker in sorted(self.clock.live) if worker not in self._told]
            if not missing:
                return
            for worker in self._progress.late(missing):
                self._remove(worker)
                self.clock.evict(worker)
            # Never 0 seconds: `missing` still has workers that were evicted just now, and their limit is over.
            await self.node.sleep(self._progress.wait(missing) or 0.01, background=True)

    # ---- checkpoints

    async def settled(self) -> None:
        """Wait until the shards have carried out all orders."""
        told, self._outstanding = self._outstanding, []
        for each in told:
            await each

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint keeps, as plain values, at a boundary."""
        counts = {"evaluations": self.evaluations, "spent": self.spent}
        return {"kept": copy.deepcopy(self.kept), "fenced": sorted(self._fenced.items()), **counts}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.kept = copy.deepcopy(state["kept"])
        self.evaluations, self.spent = int(state["evaluations"]), int(state["spent"])
        self._fenced = {int(worker): int(incarnation) for worker, incarnation in state["fenced"]}

    # ---- answers to workers

    def _answer_all(self) -> None:
        for worker in list(self._asking):
            answer = self._answer(worker)
            if answer is not None:
                self._asking.pop(worker).resolve(Reply(answer))

    def _answer(self, worker: int) -> Mapping[str, Any] | None:
        """The answer to a `worker` that asks; None if it has to wait."""
        if self._resumed is not None:
            self._told.add(worker)
            return {"suspend": True}
        if self._final is not None:
            self._told.add(worker)
            return self._final
        if self._task is None or self._complete.done:
            return None
        run = self.portions.give(worker, self.node.now())
        if run is None:
            return None
        self._progress.begin(worker)
        return {**self._task, "run": run}


class _JointAsk(NamedTuple):
    """Calls of the workers of a copy, by their numbers in it. `answer` is the coordinator's, once all have called."""

    calls: dict[int, Call]
    answer: Operation[Operation[Reply]]


class JointAsks(RemoteService):
    """The service of a coordinator to copies of the model with `size` workers each, on `node`, as DistBelief's are.

        workers of a copy                                     server 0
          each asks, with its report ------------------------>  JointAsks: once all have, one ask of the copy
          <----------------------------- the same portions ---  the coordinator
          each computes its part of the gradients
          each stages its sum at the servers of its part

                                  servers of every part         the coordinator
                                  <--- commands to `orders` ---   one vector has its slices at all of them

    Each part of the model has servers of its own, whose callers are known by their numbers among the workers of the
    part. The coordinator is outside of that, so it calls a service of its own on them.

    The coordinator knows copies: copy number i is worker i to it. Worker j of copy i is number `i * size + j`.
    """

    called = Coordinator.called

    def __init__(self, coordinator: Coordinator, node: Node, size: int) -> None:
        self._coordinator = coordinator
        self._node = node
        self._size = size
        self._open: dict[int, _JointAsk] = {}

    @remote(WORKERS, **ASK)
    def _ask(self, call: Call) -> Awaitable[Reply]:
        """As a coordinator's, to all workers of a copy alike, once all have asked."""
        copy, worker = divmod(call.fields["worker"], self._size)
        if copy not in self._open:
            self._open[copy] = _JointAsk({}, self._node.promise(f"the asks of all workers of copy {copy} of the model"))
        ask = self._open[copy]
        again = worker in ask.calls
        ask.calls[worker] = call
        if len(ask.calls) == self._size and not again:
            calls = [each for _, each in sorted(ask.calls.items())]
            answer = self._coordinator.ask(replace(call, fields=joint_fields(copy, calls)))
            answer.when_done(lambda: self._open.__delitem__(copy))
            ask.answer.resolve(answer)
        return self._answered(ask)

    async def _answered(self, ask: _JointAsk) -> Reply:
        answer: Operation[Reply] = await ask.answer
        return await answer


def joint_fields(copy: int, asks: Sequence[Call]) -> dict[str, Any]:
    """The fields of the one ask. A sum counts only if all of its parts are staged and finite."""
    fields = {**asks[0].fields, "worker": copy, "due": any(call.fields["due"] for call in asks)}
    reports = [call.fields["report"] for call in asks]
    if reports[0] is not None and not all(report["losses"] for report in reports):
        fields["report"] = {**reports[0], "losses": []}
    return fields


class ShardOrders(RemoteService):
    """The service `orders` of a server: a coordinator's commands to its `shard`."""

    called = "a coordinator's service of a shard"

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    @remote(CLOCK, commands=listed(COMMAND))
    def _order(self, call: Call) -> Awaitable[Reply]:
        """As a shard's."""
        return self._shard.order(call)
