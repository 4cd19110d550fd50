"""The processes of a real run: their registration, their state and progress, and the calls to them.

| state     | meaning                                                        | left by                          |
|-----------|----------------------------------------------------------------|----------------------------------|
| present   | the process has registered                                     | its failure                      |
| ready     | the process has built its part of the run                      | the start of a new incarnation   |
| evicted   | a worker that others go on without; its process still runs     | the worker's next report         |
| failed    | the process ended before its work was done                     | the start of a new incarnation   |
| finished  | a worker that has delivered its result                         |                                  |
| dismissed | the process was told to exit, or killed, at the end of the run |                                  |

A worker is living if it is neither failed, nor evicted, nor finished.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dure.core.deployment import SERVER, WORKER, NodeId, WhenLost, by_rank
from dure.core.node import Address
from dure.core.protocol import RemoteService
from dure.errors import DureError, PeerLost, Refused, RemoteError
from dure.report.metrics import VersionCounts
from dure.run.outcome import Totals
from dure.run.setup import companions_of

if TYPE_CHECKING:
    from dure.core.deployment import Deployment
    from dure.core.node import Call, Operation, Reply
    from dure.run.setup import Setup
    from dure.runtime.process.node import ProcessNode


class ProcessRoster:
    """The names of a run's processes by state. Workers of the ranks `absent` are not waited for at the start.

    `evicted` and `failed` hold a reason for each name, `finished` a worker's last report, `places` host and port,
    `incarnations` the number of the incarnation that runs.
    """

    def __init__(self, deployment: Deployment, absent: Collection[int] = ()) -> None:
        self.servers = deployment.names(SERVER)
        self.workers = [name for name in deployment.names(WORKER) if NodeId.of(name).rank not in absent]
        self._deployment = deployment
        self.companions = [str(node.id) for node in companions_of(deployment)]
        late = {str(node.id) for node in companions_of(deployment) if node.joins_after}
        self.expected = {*self.servers, *self.workers, *self.companions} - late
        self.present, self.ready, self.dismissed = set[str](), set[str](), set[str]()
        self.evicted: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self.finished: dict[str, Mapping[str, Any]] = {}
        self.places: dict[str, tuple[str, int]] = {}
        self.incarnations: dict[str, int] = {}

    @property
    def saving(self) -> list[str]:
        """The companions whose state a checkpoint has: those that the run cannot lose."""
        return [name for name in self.companions if self._deployment[name].when_lost is not WhenLost.GO_ON]

    def admit(self, name: str) -> int:
        """Expect a new incarnation of a process, which may be new to the run; returns its number."""
        self.incarnations[name] = self.incarnations.get(name, -1) + 1
        self.ready.discard(name)
        self.expected.add(name)
        if name not in (*self.workers, *self.servers, *self.companions):
            self.workers.append(name)
        return self.incarnations[name]

    def retire(self, name: str) -> None:
        """Forget a worker that has left the run before its end; another incarnation may join."""
        self.workers.remove(name)
        for names in (self.expected, self.present, self.ready):
            names.discard(name)
        self.evicted.pop(name, None)

    def begin_with(self, workers: Sequence[str]) -> None:
        """Begin with other workers than those of the deployment that are not absent."""
        self.expected = (self.expected - {*self.workers}) | {*workers}
        self.workers = list(workers)

    def restore(self, finished: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over the workers that had finished before a checkpoint: none of them is started."""
        self.finished = dict(finished)
        self.expected -= finished.keys()

    @property
    def all_present(self) -> bool:
        """Whether every expected process has registered, failed ones apart."""
        return self.expected - self.failed.keys() <= self.present

    @property
    def missing(self) -> set[str]:
        """The expected processes that are not ready, failed ones apart."""
        return self.expected - self.ready - self.failed.keys()

    @property
    def all_finished(self) -> bool:
        """Whether some worker has finished and none is living."""
        return bool(self.finished) and not self.living()

    def working(self) -> set[str]:
        """The living workers that have begun."""
        return self.living() & self.ready

    def living(self) -> set[str]:
        gone = self.failed.keys() | self.finished.keys() | self.evicted.keys()
        return {name for name in self.workers if name not in gone}

    @property
    def first_living(self) -> str | None:
        """The living worker of the lowest rank."""
        return next(iter(by_rank(self.living())), None)

    def watched(self) -> list[str]:
        """The processes that must send heartbeats."""
        return [name for name in (*self.servers, *self.workers, *self.companions) if not self.is_over(name)]

    def is_over(self, name: str) -> bool:
        """Whether the end of a process is known already, or of no interest."""
        known = name in self.failed or name in self.finished or name in self.dismissed
        return known or name not in self.expected

    def is_current(self, name: str, incarnation: int) -> bool:
        """Whether `incarnation` is the one that runs, or a later one."""
        return incarnation >= self.incarnations.get(name, incarnation)


class Commands:
    """Calls the processes of `roster` from the driver's `node`; `registered` is done once all can be called.

    `clocks` are the servers with a clock.

    Commands that tell a process of the failure of another one suppress the error of a process that has failed itself:
    the driver notices that failure by the connection.
    """

    def __init__(
        self, node: ProcessNode, roster: ProcessRoster, registered: Operation[None], clocks: Sequence[str]
    ) -> None:
        self.clocks = clocks
        self._node = node
        self._roster = roster
        self._registered = registered

    @property
    def clock(self) -> str:
        """The server that hosts the clock, in a run without a pipeline."""
        return self.clocks[0]

    def call(self, name: str, method: str, /, **fields: Any) -> Operation[Reply]:
        return self._node.call(Address(name, "process"), method, **fields)

    def meet(self, name: str, newcomer: str) -> Operation[Reply]:
        """Tell a process where a newcomer listens."""
        return self.call(name, "meet", name=newcomer, place=list(self._roster.places[newcomer]))

    def introduce(self, worker: str) -> None:
        """Tell the other workers where a new one listens: a neighbor in gossip may call it."""
        for name in self._roster.working() - {worker}:
            self.meet(name, worker)

    def bring_back(self, server: str) -> None:
        """Tell all processes where a server that was started again listens."""
        self._node.spawn(self._bring_back(server), f"introducing {server} again")

    async def _bring_back(self, server: str) -> None:
        """Tell the clock before the workers: it knows which incarnations are over."""
        with suppress(RemoteError):
            await self.meet(self.clock, server)
            await self.call(self.clock, "returned", name=server)
        for name in self._roster.present.intersection(self._roster.workers):
            self.meet(name, server)

    def evaluate(self, worker: str) -> None:
        """Make a worker the one whose snapshots are evaluated."""
        self._node.spawn(self._tell(worker, "evaluate"), "choosing the worker whose model is evaluated")

    def tell_clock(self, method: str, worker: str) -> None:
        """Tell the clock that a worker is "lost" or "frozen".

        The host of the clock notices by itself the end of a connection, where the worker has called it before.
        """
        state = "gone" if method == "lost" else method
        self._node.spawn(self._tell_clock(method, worker), f"telling the clock that {worker} is {state}")

    def retire(self, worker: str) -> None:
        """Have a worker leave at its next step boundary."""
        self._node.spawn(self._tell(worker, "retire"), f"having {worker} retire")

    def tell_neighbors(self, worker: str) -> None:
        """Tell the living workers that one is frozen."""
        for name in self._roster.living():
            self._node.spawn(self._tell(name, "frozen", name=worker), f"telling {name} that {worker} is frozen")

    def break_up(self, worker: str, generation: int) -> None:
        """Tell a member of a group that its generation is over."""
        work = self._tell(worker, "break_up", generation=generation)
        self._node.spawn(work, f"telling {worker} that generation {generation} is over")

    async def stop_at(self, step: int) -> None:
        """Have all workers stop for a checkpoint at one clock. Raises `Refused` if one has passed it.

        A worker that only starts gets that clock when it begins.
        """
        asked = [self.call(name, "stop_at", step=step) for name in self._roster.working()]
        for answer in asked:
            with suppress(PeerLost):  # it has failed
                await answer

    async def settle(self) -> None:
        """Have the clocks close the group that the last worker left open."""
        for clock in self.clocks:
            await self.call(clock, "settle")

    async def save_servers(self, draft: Path) -> None:
        """Have all servers, and the companions that the run cannot lose, write their parts of a checkpoint."""
        for name in self._roster.saving:
            await self.call(name, "save", draft=str(draft))
        if self._roster.servers:
            await self.settle()
        for name in self._roster.servers:
            await self.call(name, "save", draft=str(draft))

    async def bye(self, name: str) -> None:
        """Have a process exit."""
        with suppress(RemoteError):  # it ended when all was done
            await self.call(name, "bye")

    async def _tell_clock(self, method: str, worker: str) -> None:
        await self._registered
        await self._tell(self.clock, method, name=worker)

    async def _tell(self, name: str, method: str, /, **fields: Any) -> None:
        with suppress(RemoteError):
            await self.call(name, method, **fields)


class DriverService(RemoteService):
    """A service of the driver, for the processes in `roster`."""

    def __init__(self, roster: ProcessRoster) -> None:
        self.roster = roster

    def admit(self, call: Call) -> None:
        if call.caller not in self.roster.expected:
            raise Refused(f"{call.caller} is no process of this run.")


TRAFFIC = ("bytes_sent", "bytes_received", "messages")


class RunProgress:
    """The last report of each worker, and the totals of the run.

    `at` is the last step boundary that a worker has reported, `last_steps` are the steps that a worker has reported, a
    failed one too. `totals` counts workers that have finished or failed;
    `reports` are those of the others. `refused_of_failed` are updates that failed workers had refused before.
    """

    def __init__(self, setup: Setup, roster: ProcessRoster) -> None:
        self.totals = Totals()
        self.reports: dict[str, Mapping[str, Any]] = {}
        self.at: dict[str, int] = {}
        self.last_steps: dict[str, int] = {}
        self.refused_of_failed = 0
        self._setup = setup
        self._roster = roster

    def restore(
        self,
        totals: Mapping[str, Any],
        seconds: float,
        reports: Mapping[str, Mapping[str, Any]],
        last_steps: Mapping[str, int],
    ) -> None:
        """Go on from the counts and the reports of a checkpoint."""
        self.totals = Totals.restored(totals)
        self.totals.seconds = seconds
        self.reports = dict(reports)
        self.at = {name: int(report["at"]) for name, report in reports.items()}
        self.last_steps = dict(last_steps)

    def report(self, name: str, fields: Mapping[str, Any]) -> None:
        self.reports[name] = fields
        self.at[name] = fields["at"]
        self.last_steps[name] = int(fields["steps"])

    def steps(self, name: str) -> int:
        """The steps that a worker has last reported, in this incarnation or an earlier one."""
        return self.last_steps.get(name, 0)

    def samples(self) -> int:
        """Samples that all workers have used so far."""
        running = sum(int(report["done"]) * self._batch_size(name) for name, report in self.reports.items())
        return self.totals.counts["samples"] + running

    def bytes_sent(self) -> int:
        """Bytes that all workers have sent so far."""
        return self.totals.counts["bytes_sent"] + sum(int(report["bytes"]) for report in self.reports.values())

    def highest(self) -> int:
        """The highest step that a worker has reported."""
        return max((int(report["steps"]) for report in self.reports.values()), default=0)

    def lowest(self) -> int:
        """The last step that every worker has reported; failed and evicted workers are left out."""
        living = [self.at.get(name, 0) for name in self._roster.living()]
        return min([*living, *(int(report["steps"]) for report in self._roster.finished.values())], default=0)

    def count_lost(self, name: str) -> None:
        """Count the steps and the bytes that a failed or evicted worker has last reported."""
        report = self.reports.pop(name, {"done": 0, "bytes": 0})
        steps, nbytes = int(report["done"]), int(report["bytes"])
        self.totals.count("per_worker", name, steps=steps, bytes_sent=nbytes)
        self.totals.counts["bytes_sent"] += nbytes
        self.totals.counts["samples"] += steps * self._batch_size(name)

    def count_finished(self) -> None:
        """Count the steps, samples, seconds, pulls and messages of the workers that have finished."""
        totals, finished = self.totals, self._roster.finished
        for name, report in finished.items():
            self._count(name, report)
        totals.seconds = max(report["seconds"] for report in finished.values())
        totals.steps = max(report["steps"] for report in finished.values())

    def count_retired(self, name: str, report: Mapping[str, Any]) -> None:
        """Count the same of a worker that leaves the run before its end."""
        self._count(name, report)
        self.last_steps[name] = int(report["steps"])
        self.refused_of_failed += int(report.get("refused", 0))
        self.reports.pop(name, None)
        self.at.pop(name, None)

    def _count(self, name: str, report: Mapping[str, Any]) -> None:
        totals = self.totals
        totals.count("per_worker", name, steps=report["done"], **{key: report[key] for key in TRAFFIC})
        totals.add_time(report["time"])
        totals.version_skew.merge(VersionCounts.of(report["skew"]))
        totals.counts["samples"] += report["done"] * self._batch_size(name)
        for key in TRAFFIC:
            totals.counts[key] += report[key]

    def count_refused(self) -> None:
        """Count the updates that workers have refused themselves."""
        of_finished = sum(int(report.get("refused", 0)) for report in self._roster.finished.values())
        self.totals.counts["updates_refused"] += self.refused_of_failed + of_finished

    def _batch_size(self, name: str) -> int:
        """The samples of a mini-batch that count for a worker; in a pipeline they count for one of its workers."""
        setup, number = self._setup, NodeId.of(name).rank
        return setup.batch_sizes[setup.replica_of(number)] if setup.reports(number) else 0


START_SECONDS = 120.0
"""Seconds in which all processes must be ready."""


class Registration:
    """Lets processes wait until all are `registered`, and until all are ready and the run has `begun`.

    `begin` is called before the first process begins.
    """

    def __init__(self, node: ProcessNode, roster: ProcessRoster, begin: Callable[[], None]) -> None:
        self.registered: Operation[None] = node.promise("all processes to register")
        self.begun: Operation[None] = node.promise("all processes to be ready")
        self._node = node
        self._roster = roster
        self._begin = begin

    async def register(self, name: str, place: tuple[str, int]) -> None:
        """Note where a process listens, and wait for the others."""
        self._roster.places[name] = self._node.directory[name] = place
        self._roster.present.add(name)
        self.look()
        await self.registered

    async def ready(self, name: str) -> None:
        """Note that a process is ready, and wait for the others."""
        self._roster.ready.add(name)
        self.look()
        await self.begun

    def look(self) -> None:
        """Go on if no process is missing."""
        if self._roster.all_present:
            self.registered.resolve()
        if not self._roster.missing and not self.begun.done:
            self._begin()
            self.begun.resolve()

    def check(self) -> None:
        """Raise `DureError` if a process is missing for too long."""
        if not self.begun.done and self._node.now() > START_SECONDS:
            missing = ", ".join(sorted(self._roster.missing))
            raise DureError(f"{missing} did not come up within {START_SECONDS:g} s.")
