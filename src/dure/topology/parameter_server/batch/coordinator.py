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
often it was evaluated. Sums for an earlier point never count. A worker that dies takes only what it has not
reported with it: others do that again. One that stands still is waited for only at a checkpoint and at the end, and
there not for long (`Limits.evict_seconds`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from dure.core.deployment import rank_of_worker
from dure.core.node import Address, Call, EndOfWork, Operation, Reply, TensorSpec
from dure.core.protocol import COUNT, OWN, TRUTH, WORKERS, Method, nullable
from dure.errors import DureError, Evicted, PeerLost, Refused
from dure.topology.fields import REPORT
from dure.topology.parameter_server.batch.portions import Portions, Run
from dure.topology.parameter_server.progress import EVICT_SECONDS, ProgressMonitor

if TYPE_CHECKING:
    from dure.core.meter import Meter
    from dure.core.node import Node
    from dure.job.data.batches import Batches
    from dure.topology.parameter_server.clock import ClockService

Command = tuple[Any, ...]
"""A command to the shards (`vectors`): its name and its arguments."""

COORDINATOR = Address("server 0", "coordinator")


class Limits(NamedTuple):
    """When the work ends: after so many portions, all workers together, or so many seconds.

    At a checkpoint and at the end, a worker that shows no progress for `evict_seconds` is left behind.
    """

    portions: int
    seconds: float = math.inf
    evict_seconds: float = EVICT_SECONDS


class Coordinator:
    """What a batch method sees of the world (`order`, `evaluate`, `boundary`, `kept`), and a service to its workers.

    What must survive a restart is `kept` (values that JSON has) and the vectors on the shards, as they are at a
    `boundary`. `timing_only` runs have no numbers: losses are 0, and every dot product is 1. It is on the clock's node
    and commands the clock's shards, unless `node` and `shards` replace them.

    | method | fields                                 | reply                                                  |
    |--------|----------------------------------------|--------------------------------------------------------|
    | `ask`  | worker, incarnation, due, report       | something to do, once there is; or `suspend`, or `end` |

    `due` says that a checkpoint is. `report` is of the portions that the worker has just done, or None.
    """

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
        self._progress = ProgressMonitor(node.now, limits.evict_seconds)
        self._due = self._past_the_first = False
        self._resumed: Operation[None] | None = None
        self._told: set[int] = set()
        self._final: Mapping[str, Any] | None = None

    # ---- what a method does with it

    async def lead(self, method: Callable[[Coordinator], Awaitable[None]], seconds: float = 0.0) -> None:
        """The method's work, from when `seconds` of the run have passed; then everybody is sent home."""
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
            self.node.spawn(self._wait_for_all(resumed), "the coordinator's eye on who has stopped")
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
        await self.settled()
        if not finite:
            return math.inf, []
        total = self.batches.size
        dots = await self.order(("scale", into, 1.0 / total), *then)
        return math.fsum(self._losses.values()) / total, dots

    # ---- what workers say

    protocol: ClassVar[Mapping[str, Method]] = {
        "ask": Method(WORKERS, {"worker": OWN, "incarnation": COUNT, "due": TRUTH, "report": nullable(REPORT)}),
    }

    def handle(self, call: Call) -> Reply | Awaitable[Reply]:
        if call.method != "ask":
            raise Refused(f'a coordinator has no method "{call.method}"; it has ask.')
        return self.asked(call)

    def expects(self, method: str) -> Sequence[TensorSpec]:
        return ()

    def asked(self, call: Call) -> Operation[Reply]:
        """Take what a worker reports; return the promise of something to do."""
        fields = call.fields
        worker, incarnation = fields["worker"], fields["incarnation"]
        if incarnation < self._fenced.get(worker, 0):
            raise Evicted(f"worker {worker} is not in under incarnation {incarnation}: join first.")
        self._present[worker] = incarnation
        self._progress.step(worker)
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
        """A worker has done the portions in `run`, and staged their sum as `seq`. No `losses`: it is no number."""
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
        """An order that is not waited for; those that come after it are carried out after it."""
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
            waiting.fail(Evicted(f"worker {worker} is gone."))

    async def _wait_for_all(self, resumed: Operation[None] | None) -> None:
        """Until everybody has been told to stop, for now or for good: leave those behind who stand still."""
        while self._resumed is resumed:
            missing = [worker for worker in sorted(self.clock.live) if worker not in self._told]
            if not missing:
                return
            for worker in self._progress.late(missing):
                self._remove(worker)
                self.clock.evict(worker)
            await self.node.sleep(self._progress.wait(missing) or 0.01, background=True)

    # ---- checkpoints

    async def settled(self) -> None:
        """Once the shards have done all that they were told."""
        told, self._outstanding = self._outstanding, []
        for each in told:
            await each

    def state(self) -> dict[str, Any]:
        """What survives a restart, plain values, at a boundary."""
        counts = {"evaluations": self.evaluations, "spent": self.spent}
        return {"kept": copy.deepcopy(self.kept), "fenced": sorted(self._fenced.items()), **counts}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.kept = copy.deepcopy(state["kept"])
        self.evaluations, self.spent = int(state["evaluations"]), int(state["spent"])
        self._fenced = {int(worker): int(incarnation) for worker, incarnation in state["fenced"]}

    # ---- what they are told

    def _answer_all(self) -> None:
        for worker in list(self._asking):
            answer = self._answer(worker)
            if answer is not None:
                self._asking.pop(worker).resolve(Reply(answer))

    def _answer(self, worker: int) -> Mapping[str, Any] | None:
        """What `worker` does next; None if it has to wait."""
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
