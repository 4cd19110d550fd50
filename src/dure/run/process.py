"""One process of a real run, a worker or a server, from its registration with the driver to its exit.

worker                                      driver (the launcher)
register(address) -------------------------->  waits until all have registered
<------------------ directory, store ---------
join the clock; ready ---------------------->  waits until all are ready
<------------------ go ----------------------
the method's work;  progress, snapshot ----->  evaluates and records
suspended, at a checkpoint ----------------->  waits until all are; shards save; commit
<------------------ go on -------------------
leave the clock; done(parameters) ---------->  the run's result
<------------------ bye ---------------------
"""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from dure.core.deployment import WORKER, NodeId
from dure.core.node import Address, Call, Operation, Reply, Suspend, Task
from dure.core.protocol import COUNT, DRIVER, NODE, PLACE, TEXT, RemoteService, remote
from dure.core.text import log
from dure.core.user_code import frames_behind
from dure.errors import CheckpointError, DureError, PeerLost, Refused
from dure.job.gradient import JobSource
from dure.partition.source import StageSource
from dure.report.metrics import VersionCounts
from dure.run import checkpoint
from dure.run.checkpoint import Parts
from dure.run.checkpoint_schedule import CHECKPOINTS
from dure.run.leases import LeasedBatches
from dure.run.membership import Membership
from dure.run.memory import check_process_memory
from dure.run.outcome import figures_of
from dure.run.servers import build_server
from dure.run.snapshots import DRIVER_ADDRESS, Snapshots
from dure.run.workers import build_worker, free_initial_values, restore_worker, state_of_worker, work_through
from dure.runtime.launch.engine_store import connected, lead_engine, one_family, without_watchdog
from dure.runtime.launch.preemption import RANK, watching
from dure.runtime.memory import memory_limit
from dure.runtime.process.node import ProcessNode
from dure.runtime.wire import Loss
from dure.sync import lifecycle
from dure.topology.parameter_server.clock import EVICT_SECONDS

if TYPE_CHECKING:
    from dure.job.gradient import Gradient
    from dure.run.config import WorkerRange
    from dure.run.setup import Setup
    from dure.runtime.process.group import ProcessGroup
    from dure.sync.worker_state import WorkerState

PROGRESS_SECONDS = 0.1
"""Period of a worker's progress reports."""

AGAIN_SECONDS = 0.01
"""Seconds until a worker asks again for a checkpoint that has to wait for the next generation."""

COUNTED = ("bytes_sent", "bytes_received", "messages")

SPANS = 4000
"""Spans per message."""

FAILURE_TEXT = 4000
"""Maximal characters of an error that is reported to the driver."""


@dataclass(frozen=True)
class FaultSettings:
    """Settings of a run's processes for workers and servers that are absent, slow or lost.

    `absent` workers join later. The clock evicts a worker without progress for `evict_seconds` (more, if it is slow).
    With `log` the shards keep a list of applied updates, for `status`. Workers wait `return_seconds` for a server that
    has failed; 0 means that no server is started again.
    """

    absent: Sequence[int] = ()
    evict_seconds: float = EVICT_SECONDS
    log: bool = False
    return_seconds: float = 0.0


class RunProcess(ABC):
    """Common part of the processes of a run: registration, the driver's commands, counters of traffic."""

    def __init__(self, setup: Setup, node: ProcessNode) -> None:
        self.setup = setup
        self.node = node
        self.bye: Operation[None] = node.promise("the end of the run")
        self.delivered = False
        node.on_lost = self._lost

    async def register(self, where: tuple[str, int]) -> Reply:
        reply = await self.node.call(DRIVER_ADDRESS, "register", host=where[0], port=where[1])
        self.node.directory.update({name: (place[0], place[1]) for name, place in reply.fields["directory"].items()})
        return reply

    @abstractmethod
    async def live(self, where: tuple[str, int], parts: Parts) -> None:
        """Take part in the run, from the `parts` of a checkpoint if there are some; this process listens at `where`."""

    @property
    def steps(self) -> int:
        """Steps of a worker; 0 for a server."""
        return 0

    def counters(self) -> dict[str, int]:
        """Payload bytes and messages exchanged with all nodes but the driver."""
        counts = dict.fromkeys(COUNTED, 0)
        for peer, traffic in self.node.wire.traffic.items():
            if peer != "driver":
                counts["bytes_sent"] += traffic.payload_nbytes_sent
                counts["bytes_received"] += traffic.payload_nbytes_received
                counts["messages"] += traffic.messages_sent
        return counts

    def _meet(self, name: str, place: Sequence[Any]) -> None:
        """Note the address of a process that has registered, for the first time or after a restart."""
        self.node.directory[name] = (place[0], place[1])

    def _lost(self, loss: Loss) -> None:
        if loss.peer != "driver":
            return
        if not self.delivered:
            raise SystemExit(1 if loss.finished else f"its connection to the launcher ended: {loss.reason}")
        self.bye.resolve()


class Control(RemoteService):
    """The service for the driver's commands. A process has `handlers` for some of them, plain or `async`."""

    def __init__(self, **handlers: Any) -> None:
        self._handlers = handlers

    def unknown(self, call: Call) -> str:
        return f"{call.caller} may not ask a process to {call.method}."

    def admit(self, call: Call) -> None:
        if call.caller != "driver" or call.method not in self._handlers:
            raise Refused(self.unknown(call))

    @remote(DRIVER)
    def _bye(self, call: Call) -> Reply | Awaitable[Reply]:
        return self._command(call)

    @remote(DRIVER)
    def _settle(self, call: Call) -> Reply | Awaitable[Reply]:
        return self._command(call)

    @remote(DRIVER)
    def _evaluate(self, call: Call) -> Reply | Awaitable[Reply]:
        return self._command(call)

    @remote(DRIVER, draft=TEXT)
    def _save(self, call: Call) -> Reply | Awaitable[Reply]:
        return self._command(call)

    @remote(DRIVER)
    def _report(self, call: Call) -> Reply | Awaitable[Reply]:
        return self._command(call)

    @remote(DRIVER, step=COUNT)
    def _suspend(self, call: Call) -> Reply | Awaitable[Reply]:
        return self._command(call)

    @remote(DRIVER, step=COUNT)
    def _stop_at(self, call: Call) -> Reply | Awaitable[Reply]:
        return self._command(call)

    @remote(DRIVER)
    def _retire(self, call: Call) -> Reply | Awaitable[Reply]:
        return self._command(call)

    @remote(DRIVER, generation=COUNT)
    def _break_up(self, call: Call) -> Reply | Awaitable[Reply]:
        return self._command(call)

    @remote(DRIVER, name=NODE)
    def _lost(self, call: Call) -> Reply | Awaitable[Reply]:
        return self._command(call)

    @remote(DRIVER, name=NODE)
    def _frozen(self, call: Call) -> Reply | Awaitable[Reply]:
        return self._command(call)

    @remote(DRIVER, name=NODE)
    def _returned(self, call: Call) -> Reply | Awaitable[Reply]:
        return self._command(call)

    @remote(DRIVER, name=NODE, place=PLACE)
    def _meet(self, call: Call) -> Reply | Awaitable[Reply]:
        return self._command(call)

    def _command(self, call: Call) -> Reply | Awaitable[Reply]:
        later = self._handlers[call.method](**call.fields)
        return Reply() if later is None else self._answer_after(later)

    async def _answer_after(self, later: Awaitable[None]) -> Reply:
        await later
        return Reply()


class ServerProcess(RunProcess):
    """A process that hosts one shard; that of the first server hosts the clock too."""

    def __init__(self, setup: Setup, node: ProcessNode, fault_settings: FaultSettings) -> None:
        super().__init__(setup, node)
        self.fault_settings = fault_settings

    async def live(self, where: tuple[str, int], parts: Parts) -> None:
        node, settings = self.node, self.fault_settings
        self.server = server = build_server(
            self.setup, node, absent=settings.absent or None, evict_seconds=settings.evict_seconds, log=settings.log
        )
        if server.clock is not None:
            server.clock.on_evicted = self._evicted
            server.clock.shard_calls.shards_return = bool(settings.return_seconds)
        if parts:
            server.restore(parts)
            if node.incarnation:
                self.setup.of_server(server.number).topology.restarted(server.shard, node.incarnation)
        server.serve()
        handlers = {
            "lost": self._worker_lost,
            "frozen": self._worker_frozen,
            "meet": self._meet,
            "returned": self._returned,
        }
        self.node.serve(
            "process", Control(bye=self.bye.resolve, settle=self.server.settled, save=self._save, **handlers)
        )
        await self.register(where)
        go = await self.node.call(DRIVER_ADDRESS, "ready")
        server.lead(self.setup.sync, go.fields["seconds"])
        await self.bye

    def _worker_lost(self, name: str) -> None:
        """Note that a worker has exited before its first call to this server."""
        if self.server.clock is not None:
            self.server.clock.lost(name)

    def _worker_frozen(self, name: str) -> None:
        """Evict a worker that sends no heartbeats. It can only join again."""
        server, rank = self.server, NodeId.of(name).rank
        if server.coordinator is not None:
            server.coordinator.lost(name)
        if server.clock is not None and rank in server.clock.live:
            server.clock.evict(rank)

    async def _returned(self, name: str) -> None:
        """Note that another server has restarted."""
        if self.server.clock is not None:
            await self.server.clock.returned(Address(name, "shard"))

    def _evicted(self, worker: int) -> None:
        self.node.call(DRIVER_ADDRESS, "evicted", worker=str(NodeId(WORKER, worker)))

    def _save(self, draft: str) -> None:
        for name, part in self.server.parts().items():
            checkpoint.write_part(Path(draft), name, part)


class WorkerProcess(RunProcess):
    """The process of one worker."""

    def __init__(self, setup: Setup, node: ProcessNode, fault_settings: FaultSettings = FaultSettings()) -> None:
        super().__init__(setup, node)
        self.fault_settings = fault_settings
        self.suspending = False
        self.leased: LeasedBatches | None = None
        self.next_checkpoint = 0
        self.snapshots = Snapshots(setup, node, self._bytes_sent)
        self.counted = dict.fromkeys(COUNTED, 0)
        self._said = 0.0
        self._began = 0
        self._role: Task[None] | None = None
        self.warnings = ExitStack()
        self.membership = Membership(setup, node) if setup.re_forms else None

    @property
    def steps(self) -> int:
        return self.worker.clock if hasattr(self, "worker") else 0

    def _control(self) -> Control:
        handlers = {"suspend": self._suspend_now, "evaluate": self._evaluate, "meet": self._meet}
        if self.setup.config.elastic is not None:
            handlers["retire"] = self._retire
        if self.membership is not None:
            handlers["break_up"] = self.membership.group.end
        return Control(bye=self.bye.resolve, stop_at=self._stop_at, frozen=self._neighbor_frozen, **handlers)

    def _neighbor_frozen(self, name: str) -> None:
        if hasattr(self, "worker") and self.worker.sessions.peer is not None:
            self.worker.sessions.peer.frozen(name)

    async def live(self, where: tuple[str, int], parts: Parts) -> None:
        node, setup = self.node, self.setup
        self.node.serve("process", self._control())  # before `register`: from then on the driver may call
        reply = await self.register(where)
        try:
            check_process_memory(setup, node.rank, memory_limit())
        except DureError as error:
            await self._fail(error)
        if setup.topology.uses_engine:
            lead_engine(where[0])
            node.collectives = self._groups(reply.fields["store"])
        start = parts["run"].plain["checkpoint"] if parts else 0
        steps = reply.fields["steps"] if self.membership is None else None  # its group brings a newcomer up to date
        self.worker = worker = build_worker(setup, node, node.rank, node.meter, start=start, steps=steps or 0)
        self._expect_others(reply.fields["directory"])
        engine = node.gradient_engine
        mapped = await setup.of_worker(node.rank).topology.map(worker)
        if mapped and engine is not None:
            engine.read_in_place(*mapped)
        if setup.config.elastic is not None:
            self._lease_from(setup.config.elastic)
        if setup.lets_go:
            self._heed_warnings(where[0])
        worker.on_step = self.on_step
        worker.on_boundary = self._on_boundary
        if worker.sessions.rows is not None:
            worker.sessions.rows.client.copies = self.snapshots.is_due
        resumed = self._restore(parts)
        if setup.zero is not None:
            free_initial_values(setup, worker, engine)
        if setup.topology.needs_everybody and engine is not None:
            engine.read_in_place(worker.params)  # no server replaces them
        self.snapshots.resume(worker.clock)
        await self._join(newcomer=reply.fields["newcomer"] or bool(parts), resumed=resumed, steps=steps)
        go = await node.call(DRIVER_ADDRESS, "ready")
        node.begin(go.fields["seconds"])
        self.snapshots.evaluates = go.fields["evaluates"]
        self.suspending = go.fields["suspending"]
        self.next_checkpoint = go.fields["checkpoint"]
        await self._work()
        await self._finish()

    def _expect_others(self, names: Sequence[str]) -> None:
        """Let the sessions know how long servers may be away, and which workers have joined so far."""
        worker = self.worker
        if worker.sessions.peer is not None:
            worker.sessions.peer.expect(names)
        if worker.over_servers:
            worker.server.client.return_seconds = self.fault_settings.return_seconds

    async def _join(self, *, newcomer: bool, resumed: bool, steps: int | None) -> None:
        """Join the others, unless this worker goes on from a checkpoint."""
        worker = self.worker
        if not resumed:
            await lifecycle.join(worker, newcomer=newcomer, period=self.setup.period, steps=steps)
        if self.membership is not None:
            self.membership.begin(worker, fresh=newcomer and not resumed)
        self._began = worker.clock

    def _groups(self, store: Sequence[Any]) -> Callable[[Sequence[int]], ProcessGroup]:
        """The function that makes groups of the engine, for the node."""
        membership = self.membership
        if membership is None:
            return engine_groups(self.node, self.setup.workers, store, torch.device(self.setup.device))
        membership.place = store
        return lambda ranks: membership.group

    def _lease_from(self, elastic: WorkerRange) -> None:
        """Work through leased mini-batches."""
        source = self.worker.source
        assert isinstance(source, JobSource)
        assert source.sampler is not None
        self.worker.boundary.leased = self.leased = LeasedBatches(source.sampler, self.node, elastic.least)

    def _heed_warnings(self, where: str) -> None:
        """Leave at a step boundary when SIGTERM comes, or the notice of a cloud.

        The launcher reads the notice of its own machine, as that concerns the whole run.
        """
        signal.signal(signal.SIGTERM, lambda *_: self._retire())
        notice = self.setup.config.preemption_notice
        if notice is not None and (RANK in notice or self.node.directory["driver"][0] != where):
            notice = notice.replace(RANK, str(self.node.rank))
            self.warnings.enter_context(watching(notice, self._retire))

    def _retire(self) -> None:
        """Leave at the next step boundary."""
        self.worker.boundary.retiring = True

    def _restore(self, parts: Parts) -> bool:
        """Go on from a checkpoint if this worker is in it; whether it was."""
        if self.setup.config.checkpoint_every:
            self.worker.boundary.suspend = self._suspend_due
            self.worker.boundary.checkpoint = lambda: self.next_checkpoint
        mine = restore_worker(self.setup, self.worker, parts)
        if mine is not None:
            with checkpoint.fitting(f"worker-{self.node.rank}"):
                self.counted = dict(mine.plain["counted"])
                self.node.meter.seconds.update(mine.plain["time"])
                self.node.meter.skew.update(VersionCounts.of(mine.plain.get("skew", {})).histogram)
        return mine is not None

    async def _work(self) -> None:
        """Run the method to the end of its work. Its coroutine is started again in each generation, and after each
        checkpoint.
        """
        while True:
            if self.membership is not None:
                await self.membership.enter(self.worker)
            role = self.node.spawn(work_through(self.setup.sync, self.worker, self.setup.period), self.node.name)
            self._role = role
            try:
                await role
            except Suspend:
                await self._checkpoint()
            except DureError as error:
                if self.membership is None or not isinstance(error, PeerLost):
                    await self._fail(error, refused=self.worker.refusals.total)
                self.membership.lost(error)
            else:
                if self.membership is None or await self.membership.through():
                    return
            del role
            self._role = None  # its error would keep the engine's works, and so its connections

    async def _fail(self, error: DureError, refused: int = 0) -> NoReturn:
        """Report an error to the driver, and end this process."""
        message = str(error)[:FAILURE_TEXT]
        self.node.on_error(error)
        frames = frames_behind(error)
        if frames:
            log.error("%s\n%s", error, frames.rstrip())
        await self.node.call(DRIVER_ADDRESS, "failed", kind=type(error).__name__, message=message, refused=refused)
        raise SystemExit(1) from error

    async def _finish(self) -> None:
        worker, node = self.worker, self.node
        retired = worker.boundary.retiring
        if self.leased is not None:
            self.leased.report()
        await lifecycle.leave(worker, finished=not retired)
        seconds = node.now()
        await self.snapshots.settled()
        await node.sent_to_wire()
        counts = self._counts()
        await self._send_spans()
        if worker.sessions.rows is not None and worker.rank == 0:
            await worker.sessions.rows.client.copy(worker.params, worker.clock)  # the run delivers its model
        values = worker.delivering(self.setup.traits.delivers)
        tensors = [values] if worker.buffers is None else [values, worker.buffers]
        done: dict[str, Any] = {
            "seconds": seconds,
            "steps": worker.clock,
            "done": worker.clock - worker.joined_at,
            "updates": self.setup.delivery.gradients_in(worker),
            "refused": worker.refusals.total,
            "retired": retired,
            **counts,
            **self._metered(),
        }
        await node.call(DRIVER_ADDRESS, "done", *tensors, stage=figures_of(worker), **done)
        self.warnings.close()
        self.delivered = True
        await self.bye

    async def _send_spans(self) -> None:
        spans = self.node.meter.spans or []
        for start in range(0, len(spans), SPANS):
            await self.node.call(DRIVER_ADDRESS, "spans", spans=[list(span) for span in spans[start : start + SPANS]])

    # ---- while it works

    def on_step(self, worker: WorkerState, gradient: Gradient) -> None:
        """Report progress if that is due, and take the snapshots that are due: called after each gradient."""
        now = self.node.now()
        if now >= self._said + PROGRESS_SECONDS or worker.clock == self.setup.steps:
            self._report(now)
        self.snapshots.at_step(worker)

    def _on_boundary(self, worker: WorkerState) -> None:
        """Take the snapshots that are due, and report this worker's steps to the driver."""
        self.snapshots.at_boundary(worker)
        if self.leased is not None:
            self.leased.report()
        if worker.clock % self.setup.eval_every == 0 and worker.clock > self._began:
            self._report(self.node.now())

    def _report(self, now: float) -> None:
        """Report this worker's steps to the driver."""
        worker, self._said = self.worker, now
        done, at = worker.clock - worker.joined_at, self.snapshots.at
        self.tell("progress", steps=worker.clock, at=at, done=done, loss=worker.loss, bytes=self._bytes_sent())

    def _counts(self) -> dict[str, int]:
        """Traffic of this worker, that before the checkpoint it was restored from included."""
        group, counts = self.worker.sessions.members, self.counters()
        return {name: self.counted[name] + counts[name] + getattr(group, name, 0) for name in COUNTED}

    def _metered(self) -> dict[str, Any]:
        """Seconds by activity, and pulls by their version skew, of this worker."""
        meter = self.node.meter
        return {"time": dict(meter.seconds), "skew": {str(skew): pulls for skew, pulls in sorted(meter.skew.items())}}

    def _bytes_sent(self) -> int:
        return self._counts()["bytes_sent"]

    def tell(self, method: str, **fields: Any) -> None:
        """Call the driver without waiting for its answer."""
        self.node.call(DRIVER_ADDRESS, method, **fields)

    def _evaluate(self) -> None:
        self.snapshots.evaluates = True

    # ---- checkpoints

    def _suspend_due(self, worker: WorkerState) -> bool:
        if self.leased is None:
            reached = min(worker.clock, self.setup.steps)
        else:  # workers that come and go have clocks of their own, unless they wait for each other
            reached = worker.clock if self.setup.lockstep else self.leased.step
        return self.suspending or self.next_checkpoint <= reached

    def _suspend_now(self, step: int) -> None:
        """Another worker has reached the scheduled clock `step`: stop at the next step boundary."""
        if step < self.next_checkpoint:
            return  # this worker has passed that checkpoint
        self.suspending = True
        if self.worker.asking and self._role is not None:
            self._role.throw(Suspend())

    def _stop_at(self, step: int) -> None:
        """Stop for a checkpoint at the clock `step`, with all other workers."""
        source = self.worker.source
        begun = source.stage.begun if isinstance(source, StageSource) else -1
        clock = max(self.worker.clock, begun)
        if step <= clock:
            raise Refused(f"{self.node.name} is at clock {clock} and cannot stop at {step}: name a later one.")
        self.next_checkpoint = step

    async def _checkpoint(self) -> None:
        if self.leased is not None:
            self.leased.report()
            self._report(self.node.now())
        reply = await self.node.call(CHECKPOINTS, "suspended", step=self.next_checkpoint)
        if reply.fields["draft"] is None:  # the group is formed again first
            await self.node.sleep(AGAIN_SECONDS)
            return
        await self.node.sent_to_wire()  # the counts below then have all messages so far
        state = state_of_worker(self.worker)
        state.plain |= {"counted": self._counts(), **self._metered()}
        problem = None
        try:
            checkpoint.write_part(Path(reply.fields["draft"]), f"worker-{self.node.rank}", state)
        except CheckpointError as error:
            problem = str(error)
        go = await self.node.call(CHECKPOINTS, "saved", problem=problem)
        self.next_checkpoint = go.fields["checkpoint"]
        self.suspending = False
        self.worker.asking = False  # the checkpoint may have ended a wait for admission


def engine_groups(
    node: ProcessNode, workers: int, store: Sequence[Any], device: torch.device
) -> Callable[[Sequence[int]], ProcessGroup]:
    """Join the engine's process group of all workers; return the function that makes a `Group` of ranks.

    Tensors on the `device` of this worker travel by the device's backend, others by Gloo.
    """
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    from dure.runtime.process.group import TIMEOUT, ProcessGroup, backends_of, place_of

    prefix = PrefixStore(f"{node.identity.job}/{node.identity.incarnation}", connected(store, workers))
    places = []
    if device.type != "cpu":  # workers may share one
        prefix.set(f"device {node.rank}", place_of(device))
        places = [prefix.get(f"device {rank}").decode() for rank in range(workers)]
    backends = backends_of(device, places)
    with one_family(), without_watchdog(device):
        dist.init_process_group(backends, store=prefix, rank=node.rank, world_size=workers, timeout=TIMEOUT)
    if device.type != "cpu":  # NCCL connects now: later, a slow rank could exceed the time limit of the store
        dist.all_reduce(torch.zeros(1, device=device))

    def group(ranks: Sequence[int]) -> ProcessGroup:
        with without_watchdog(device):
            engine = None
            if len(ranks) < workers:  # other ranks make groups of their own, and would never join this call
                engine = dist.new_group(list(ranks), timeout=TIMEOUT, use_local_synchronization=True)
        return ProcessGroup(node, ranks, engine)

    return group
