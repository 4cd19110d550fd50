"""A real run as its launcher sees it: who is there, how far they are, what they deliver, who died."""

from __future__ import annotations

import logging
import secrets
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from dure.core.deployment import SERVER, WORKER, NodeId, WhenLost, by_rank
from dure.core.meter import SPAN_KINDS, Span
from dure.core.node import Address, Call, Operation, Reply, TensorSpec
from dure.core.protocol import (
    CLOCK,
    COUNT,
    FINITE,
    NODE,
    NODES,
    NUMBER,
    PORT,
    TEXT,
    WORKERS,
    Method,
    listed,
    mapping,
    nullable,
    one_of,
    row,
)
from dure.errors import DureError, Refused, RemoteError
from dure.run import checkpoint
from dure.run.checkpoint_round import CheckpointRound
from dure.run.failures import FailureTracker
from dure.run.gathering import Gathering
from dure.run.grader import Grader, Snapshot
from dure.run.last_checkpoint import LastCheckpoint, stop_together
from dure.run.launcher import Launcher
from dure.run.liveness import FORK_SERVER, Limits, LivenessMonitor
from dure.run.outcome import Outcome, Totals
from dure.run.process import COUNTED, FaultSettings
from dure.run.restart_policy import RestartPolicy
from dure.runtime.launch.engine_store import EngineStore
from dure.runtime.launch.interruption import Interruption
from dure.runtime.process.node import ProcessNode
from dure.runtime.wire import Credentials, Identity, Loss

if TYPE_CHECKING:
    from dure.run.setup import Setup
    from dure.run.virtual import Callbacks, Row

START_SECONDS = 120.0
"""How long processes may take to come up."""

CLOSE_SECONDS = 2.0
"""How long processes may take to say goodbye."""

log = logging.getLogger("dure")


class Driver:
    """The service that all processes of a run talk to, and the launcher's view of them."""

    _last_round: CheckpointRound | None = None

    def __init__(
        self,
        setup: Setup,
        watch: Callbacks,
        launcher: Launcher,
        *,
        folder: Path | None,
        terms: FaultSettings = FaultSettings(),  # noqa: B008
        restarts: RestartPolicy | None = None,
        interface: str | None = None,
        credentials: Credentials | None = None,
        interruption: Interruption | None = None,
    ) -> None:
        """`interface` is the address at which processes of other machines reach this one; without it there are none."""
        self.setup, self.watch = setup, watch
        self.launcher, self.folder = launcher, folder
        self.restarts = restarts or RestartPolicy(setup, None)
        self.terms = replace(terms, return_seconds=self.restarts.return_seconds)
        self.run_name = f"{setup.job.name}-{secrets.token_hex(4)}"
        self.credentials = credentials or Credentials.drawn(setup.config.integrity)
        self.node = ProcessNode(Identity(self.run_name, "driver"), self.credentials, seed=setup.config.seeded)
        self.node.on_lost = self._lost
        address = interface or "127.0.0.1"
        self.address = (address, self.node.wire.listen(address))
        self.node.serve("driver", self)
        self.store = EngineStore(interface, setup.workers) if setup.topology.uses_engine else None
        self.totals = Totals()
        self.history: list[Row] = []
        self.spans: list[Span] = []
        self.grader = Grader(setup, self._graded, watch)
        self.incarnations: dict[str, int] = {}
        self.places: dict[str, tuple[str, int]] = {}
        self.present, self.ready = set[str](), set[str]()
        self.finished: dict[str, Mapping[str, Any]] = {}
        self.delivered: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self.liveness = LivenessMonitor(address, Limits.of(setup.config), lambda: launcher.processes)
        loop = self.node.loop
        self.casualties = FailureTracker(launcher, loop, str(setup.strategy), setup.deployment, folder=folder)
        self.evicted: dict[str, str] = {}
        self.evaluating_worker = ""
        self.progress: dict[str, Mapping[str, Any]] = {}
        self.at: dict[str, int] = {}  # of each worker, the step boundary that it has last told of
        self.gathering = Gathering(setup.merge_buffers)
        self._at_servers: dict[int, int] = {}  # gradients that are in all parts of a step
        self._last_row = self._refused_of_lost = 0  # a step; gradients of workers that have failed
        self._servers = setup.deployment.names(SERVER)
        self._workers = [name for name in setup.deployment.names(WORKER) if NodeId.of(name).rank not in terms.absent]
        self._everyone = {*self._servers, *self._workers}
        self._dismissed: set[str] = set()
        self._registering: Operation[None] = self.node.promise("all processes to register")
        self._going: Operation[None] = self.node.promise("all processes to be ready")
        self.round: CheckpointRound | None = None
        self.checkpoint_due = setup.config.checkpoint_every or 0
        self.last_checkpoint = LastCheckpoint(self, interruption or Interruption(), setup.config.grace)

    @property
    def dead(self) -> Mapping[str, str]:
        """Who died and has not come back, and what its connection said."""
        return self.casualties.dead

    # ---- the service

    protocol: ClassVar[Mapping[str, Method]] = {
        "register": Method(NODES, {"host": TEXT, "port": PORT}),
        "ready": Method(NODES),
        "progress": Method(
            WORKERS, {"steps": COUNT, "at": COUNT, "done": COUNT, "loss": nullable(NUMBER), "bytes": COUNT}
        ),
        "snapshot": Method(WORKERS, {"seconds": FINITE, "steps": COUNT, "bytes": COUNT, "updates": COUNT}),
        "part": Method(WORKERS, {"steps": COUNT, "updates": COUNT, "at_servers": COUNT, "at": COUNT}),
        "slowest": Method(WORKERS),
        "spans": Method(WORKERS, {"spans": listed(row(TEXT, one_of(*SPAN_KINDS), FINITE, FINITE, TEXT))}),
        "suspended": Method(WORKERS, {"step": COUNT}),
        "saved": Method(WORKERS, {"problem": nullable(TEXT)}),
        "evicted": Method(CLOCK, {"worker": NODE}),
        "failed": Method(WORKERS, {"kind": TEXT, "message": TEXT, "refused": COUNT}),
        "done": Method(
            WORKERS,
            {
                "time": mapping(FINITE),
                "seconds": FINITE,
                **dict.fromkeys(("steps", "done", "updates", "refused", *COUNTED), COUNT),
            },
        ),
    }

    def expects(self, method: str) -> Sequence[TensorSpec]:
        if method not in ("snapshot", "part", "done"):
            return ()
        replica = self.setup.replica
        specs = [TensorSpec(str(replica.dtype).removeprefix("torch."), replica.numel)]
        buffers = replica.buffers_flat()
        if buffers.numel():
            specs.append(TensorSpec(str(buffers.dtype).removeprefix("torch."), buffers.numel()))
        return specs

    def handle(self, call: Call) -> Any:
        handler = {
            "register": self._register,
            "ready": self._ready,
            "progress": self._progress,
            "snapshot": self._snapshot,
            "part": self._part_of_mean,
            "slowest": lambda call: Reply({"steps": self._slowest()}),
            "spans": self._spans,
            "suspended": self._suspend,
            "saved": self._save,
            "evicted": self._evicted,
            "failed": self._failed,
            "done": self._done,
        }.get(call.method)
        if handler is None:
            raise Refused(f'the driver has no method "{call.method}".')
        if call.caller not in self._everyone:
            raise Refused(f"{call.caller} is no process of this run.")
        return handler(call)

    async def _register(self, call: Call) -> Reply:
        self.places[call.caller] = self.node.directory[call.caller] = (call.fields["host"], call.fields["port"])
        newcomer = self._going.done
        self.present.add(call.caller)
        self._look_who_is_here()
        await self._registering
        if newcomer and call.caller in self._servers:
            self.node.spawn(self._bring_back(call.caller), f"introducing {call.caller} again")
        elif newcomer and self.setup.topology.graph is not None:
            self._introduce(call.caller)
        store = None if self.store is None else self.store.place
        directory = {name: list(place) for name, place in self.places.items()}
        return Reply({"directory": directory, "store": store, "newcomer": newcomer})

    def _introduce(self, newcomer: str) -> None:
        """Tell the workers where a newcomer is, who may want to call it."""
        for name in self._living() & self.ready - {newcomer}:
            self.node.call(Address(name, "process"), "meet", name=newcomer, place=list(self.places[newcomer]))

    async def _bring_back(self, server: str) -> None:
        """Tell everybody where a server is now, the clock first: it knows which incarnations are over."""
        place = list(self.places[server])
        with suppress(RemoteError):  # whoever is gone is heard of
            await self.node.call(Address(self._servers[0], "process"), "meet", name=server, place=place)
            await self.node.call(Address(self._servers[0], "process"), "returned", name=server)
        for name in self.present.intersection(self._workers):
            self.node.call(Address(name, "process"), "meet", name=server, place=place)

    def _look_who_is_here(self) -> None:
        """Go on once nobody is missing, the dead apart."""
        expected = self._everyone - self.dead.keys()
        if expected <= self.present:
            self._registering.resolve()
        if expected <= self.ready and not self._going.done:
            self.node.begin(self.totals.seconds)
            self._going.resolve()

    async def _ready(self, call: Call) -> Reply:
        self.ready.add(call.caller)
        self._look_who_is_here()
        await self._going
        if self.round is not None and self.round.all_stopped.done:
            await self.round.committed
        living = by_rank(self._living())
        evaluates = bool(living) and call.caller == living[0]
        if evaluates:
            self.evaluating_worker = call.caller
        suspending = self.round is not None and not self.round.all_stopped.done and not self.setup.lockstep
        go = {"seconds": self.node.now(), "evaluates": evaluates}
        return Reply({**go, "suspending": suspending, "checkpoint": self.checkpoint_due})

    def _progress(self, call: Call) -> Reply:
        self.evicted.pop(call.caller, None)
        self.progress[call.caller] = call.fields
        self.at[call.caller] = call.fields["at"]
        self._grade_means()
        steps = call.fields["steps"]
        self.watch.progress(steps, self.setup.steps, call.fields["loss"], self._samples())
        return Reply()

    def _samples(self) -> int:
        sizes = self.setup.batch_sizes
        going = sum(int(said["done"]) * sizes[NodeId.of(name).rank] for name, said in self.progress.items())
        return self.totals.counts["samples"] + going

    def _snapshot(self, call: Call) -> Reply:
        if call.caller == self.evaluating_worker:
            fields = call.fields
            values, *buffers = [tensor.clone() for tensor in call.tensors]
            row = self._row(fields["seconds"], fields["steps"], fields["updates"], fields["bytes"])
            self.grader.give(Snapshot(row, values, buffers[0] if buffers else None))
        return Reply()

    def _row(self, seconds: float, step: int, updates: int, nbytes: int = 0) -> Row:
        """The row of a snapshot, without its grade."""
        sent = sum(int(said["bytes"]) for said in self.progress.values())
        self._last_row = max(step, self._last_row)  # also where a newcomer has just begun
        return {
            "seconds": seconds,
            "step": self._last_row,
            "updates": updates,
            "samples": self._samples(),
            "loss": None,
            "accuracy": None,
            "bytes": max(sent, nbytes),
        }

    def _slowest(self) -> int:
        """The last step that every worker has reported; dead and evicted workers are left out."""
        living = [self.at.get(name, 0) for name in self._living()]
        return min([*living, *(int(said["steps"]) for said in self.finished.values())], default=0)

    def _part_of_mean(self, call: Call) -> Reply:
        """Add a worker's model to the mean of all workers' models at its step."""
        fields, (values, *buffers) = call.fields, call.tensors
        step, rank = fields["steps"], NodeId.of(call.caller).rank
        if step > self._last_row:
            self._at_servers[step] = fields["at_servers"]
            more: dict[str, Any] = {"updates": fields["updates"], "weight": self.setup.weight(rank)}
            self.gathering.add(step, rank, values, buffers=buffers[0] if buffers else None, **more)
        self.at[call.caller] = fields["at"]
        self._grade_means()
        return Reply()

    def _grade_means(self) -> None:
        """Grade the means of all steps that every worker has made."""
        if self.gathering:
            for found in self.gathering.complete(self._slowest()):
                updates = found.updates + self._at_servers.pop(found.step)
                row = self._row(self.node.now(), found.step, updates)
                self.grader.give(Snapshot(row, found.values, found.buffers))

    def _spans(self, call: Call) -> Reply:
        self.spans.extend(Span(*span) for span in call.fields["spans"])
        return Reply()

    def _failed(self, call: Call) -> Reply:
        kind, message = call.fields["kind"], call.fields["message"]
        self._refused_of_lost += int(call.fields["refused"])
        if kind == "Quarantined" and self._can_lose(call.caller):
            self.casualties.because(call.caller, message.rstrip("."))  # its process ends, and the others go on
        else:
            self.casualties.failed(call.caller, kind, message)
        return Reply()

    def _done(self, call: Call) -> Reply:
        self.evicted.pop(call.caller, None)
        values, *buffers = [tensor.clone() for tensor in call.tensors]
        self.delivered[call.caller] = (values, buffers[0] if buffers else None)
        self.finished[call.caller] = dict(call.fields)
        self._check_suspended()
        return Reply()

    # ---- checkpoints

    async def _suspend(self, call: Call) -> Reply:
        current = self.round or self._begin_round(self.checkpoint_due)
        current.stopped(call.caller)
        await current.all_stopped
        return Reply({"draft": str(current.draft)})

    def _begin_round(self, step: int) -> CheckpointRound:
        assert self.folder is not None
        self.round = self._last_round = CheckpointRound(self.node, self.folder, step, self._living)
        work = self.round.carry_out(self._suspend_others, self._save_servers, self._part)
        self.node.spawn(work, "the checkpoint")
        return self.round

    @property
    def can_checkpoint(self) -> bool:
        """Whether a checkpoint can be written at a step that is not scheduled."""
        saving = self.folder is not None and bool(self.setup.config.checkpoint_every)
        return saving and self._going.done and bool(self._living())

    async def checkpoint_now(self) -> None:
        """Write a checkpoint before the next one is due."""
        every = self.setup.config.checkpoint_every or 0
        before, current = self._last_round, self.round
        if current is None and self.setup.lockstep:
            await stop_together(self)
            while self._last_round is before:  # a round of a few milliseconds may be over by now
                await self.node.sleep(0.01)
            current = self._last_round
        if current is None:
            reached = max((int(said["steps"]) for said in self.progress.values()), default=0)
            current = self._begin_round(min(self.checkpoint_due, max(self.checkpoint_due - every + 1, reached)))
            current.look()
        await current.committed

    async def stop_at(self, step: int) -> None:
        """Tell all workers the clock at which to stop for a checkpoint. Raises `Refused` if one has passed it."""
        self.checkpoint_due = step
        asked = [self.node.call(Address(name, "process"), "stop_at", step=step) for name in self._living()]
        for answer in asked:
            await answer

    async def _save(self, call: Call) -> Reply:
        assert self.round is not None
        current = self.round
        current.written(call.caller, call.fields["problem"])
        await current.committed
        if self.round is current:
            self.round = None
            self.checkpoint_due += self.setup.config.checkpoint_every or 0
        return Reply({"checkpoint": self.checkpoint_due})

    async def _suspend_others(self) -> None:
        """Lockstep workers come by themselves; the others are told."""
        assert self.round is not None
        if not self.setup.lockstep:
            for name in sorted(self.round.waits_for()):  # of one that is frozen no answer comes
                self.node.call(Address(name, "process"), "suspend", step=self.checkpoint_due)

    async def _save_servers(self, draft: Path) -> None:
        if self._servers:
            await self.node.call(Address(self._servers[0], "process"), "settle")
        for name in self._servers:
            await self.node.call(Address(name, "process"), "save", draft=str(draft))

    def _part(self) -> checkpoint.Part:
        """What the driver has, and the models of those who are through where no server has them."""
        assert self.round is not None
        plain = {
            "checkpoint": self.round.step,
            "history": self.history,
            "totals": self.totals.state(),
            "seconds": self.node.now(),
            "progress": self.progress,
            "finished": self.finished,
            "origin": self.setup.origin,
        }
        tensors = {}
        for name, (values, buffers) in self.delivered.items() if not self._servers else ():
            tensors[name] = values
            if buffers is not None:
                tensors[f"{name} buffers"] = buffers
        return checkpoint.Part(tensors, plain)

    def _living(self) -> set[str]:
        gone = self.dead.keys() | self.finished.keys() | self.evicted.keys()
        return {name for name in self._workers if name not in gone}

    def _check_suspended(self) -> None:
        if self.round is not None:
            self.round.look()

    # ---- failures

    def _can_lose(self, name: str) -> bool:
        """Whether the others go on without a node."""
        return self.setup.deployment[name].when_lost is WhenLost.GO_ON

    def _lost(self, loss: Loss) -> None:
        current = self.incarnations.get(loss.peer, loss.incarnation)
        if loss.incoming and not loss.finished and loss.incarnation >= current:
            self._died(loss.peer, loss.reason)

    def _died(self, name: str, reason: str) -> None:
        if name in self.dead or name in self.finished or name not in self._everyone or name in self._dismissed:
            return
        self.casualties.died(name, reason)
        self.present.discard(name)
        self.at.pop(name, None)
        if name in self._servers and self._going.done:
            self.restarts.died(name, self.node.now())
        if not self._can_lose(name) or name in self.casualties.failures:
            return
        self.evicted.pop(name, None)
        self.totals.failures_survived += 1
        self._count_lost(name)
        if name not in self.ready and self._servers:
            self.node.spawn(self._tell_clock(name), f"telling the clock that {name} is gone")
        self._go_on_without(name)

    def _evicted(self, call: Call) -> Reply:
        """The clock has gone on without a worker that makes no progress."""
        name = call.fields["worker"]
        if name in self._living():
            log.warning("%s makes no progress: the others go on without it until it comes back.", name)
            self._evict(name, "no progress while others waited for it")
        return Reply()

    def _evict(self, name: str, reason: str) -> None:
        """Go on without a worker whose process may come back."""
        self.evicted[name] = reason
        self.totals.failures_survived += 1
        self._go_on_without(name)

    def _look_for_frozen(self) -> None:
        """Name the processes that send no heartbeats, and give up those that have sent none for long."""
        gone = self.dead.keys() | self.finished.keys() | self._dismissed
        watched = [name for name in (*self._servers, *self._workers) if name in self._everyone and name not in gone]
        if not self._going.done or self.restarts.awaited:
            watched.append(FORK_SERVER)
        self.liveness.look(watched)
        for name in self.liveness.frozen(watched):
            self._give_up(name, f"frozen: no heartbeat for {self.setup.config.frozen_after:g} s")
        self.watch.notice(self.liveness.described(watched))

    def _give_up(self, name: str, reason: str) -> None:
        """Go on without a frozen process, or end the run.

        A worker whose updates can be refused later is evicted, and may come back. Any other process is killed: one
        that others need, one that writes to shared memory, or that holds a lock on it.
        """
        if name == FORK_SERVER:
            raise DureError(f"the process that starts the others is {reason}.")
        if name in self.evicted:
            self.evicted[name] = reason
            return
        kept = self._going.done and self._can_lose(name) and not self.setup.topology.in_place
        if name in self._workers and kept:
            log.warning("%s is evicted (%s): the others go on without it until it comes back.", name, reason)
            self._evict(name, reason)
            if self.setup.topology.graph is not None:
                for neighbor in self._living():
                    self.node.spawn(self._tell_frozen(neighbor, name), f"telling {neighbor} that {name} is frozen")
            if self._servers:
                self.node.spawn(self._tell_clock(name, "frozen"), f"telling the clock that {name} is frozen")
            if not self.finished and not self._living():
                raise DureError(f"no worker is left; the last of them, {name}, is {reason}.")
            return
        self.casualties.because(name, reason)
        self.launcher.signal(name, signal.SIGKILL)
        self._died(name, reason)

    def _go_on_without(self, name: str) -> None:
        self._look_who_is_here()
        self._check_suspended()
        self._grade_means()
        living = by_rank(self._living())
        if self._going.done and living and name == self.evaluating_worker:
            self.evaluating_worker = living[0]
            self.node.spawn(self._appoint(living[0]), "choosing who is evaluated")

    async def _appoint(self, name: str) -> None:
        with suppress(RemoteError):  # whoever is gone is heard of
            await self.node.call(Address(name, "process"), "evaluate")

    async def _tell_clock(self, name: str, what: str = "lost") -> None:
        """The clock's host hears itself of those who have called it, and whose connection has ended."""
        await self._registering
        with suppress(RemoteError):
            await self.node.call(Address(self._servers[0], "process"), what, name=name)

    async def _tell_frozen(self, neighbor: str, name: str) -> None:
        with suppress(RemoteError):  # it is gone, or in another state
            await self.node.call(Address(neighbor, "process"), "frozen", name=name)

    def _count_lost(self, name: str) -> None:
        """Count the steps that a worker has last told of."""
        steps = int(self.progress.pop(name, {"done": 0})["done"])
        self.totals.count("per_worker", name, steps=steps)
        self.totals.counts["samples"] += steps * self.setup.batch_sizes[NodeId.of(name).rank]

    # ---- running

    def start(self, name: str, *, resume: Path | None = None) -> None:
        """Start a process; one that was there before comes as a new incarnation."""
        incarnation = self.incarnations.get(name, -1) + 1
        self.incarnations[name] = incarnation
        if incarnation or name not in self._everyone:
            self.casualties.returned(name)
            self.ready.discard(name)
            self._everyone.add(name)
            if name not in self._workers and name not in self._servers:
                self._workers.append(name)
        self.launcher.start(
            name,
            run=self.run_name,
            incarnation=incarnation,
            driver=list(self.address),
            credentials=self.credentials.plain(),
            terms=asdict(self.terms),
            resume=None if resume is None else str(resume),
            heartbeat=self.liveness.admit(name),
        )

    def run(self, resume: Path | None = None, *, after: Driver | None = None) -> Outcome:
        """Start everybody, and wait until the work is done; `after` a driver of the same run that has lost a server."""
        if resume is not None:
            with checkpoint.fitting("run"):
                self._resume(checkpoint.load(resume).parts["run"])
        if after is not None:
            self.totals.seconds = after.node.now()
            self.totals.failures_survived = after.totals.failures_survived + 1
            self.casualties.causes.update(after.casualties.causes)
        for name in (*self._servers, *self._workers):
            if name not in self.finished:
                self.start(name, resume=resume)
        while not self._all_finished():
            self.turn()
        gathering = self.node.spawn(self._gather(), "gathering the results")
        gathering.when_done(lambda: None)  # its error is raised below
        while not gathering.done:
            self.turn()
        return gathering.result()

    def turn(self) -> None:
        """One look at everything."""
        self.node.loop.turn(0.1)
        self.launcher.look()
        self._look_for_frozen()
        for name, status in dict(self.launcher.exited).items():
            self._died(name, f"exit status {status}")
        self.grader.look()
        self.casualties.look()
        for name in self.restarts.due(self.node.now(), self.launcher.exited):
            self.totals.failures_survived += 1
            self.start(name, resume=self.folder)
        self.casualties.check(self._workers, self.restarts)
        self.last_checkpoint.look()
        if not self._going.done and self.node.now() > START_SECONDS:
            missing = sorted(self._everyone - self.ready - self.dead.keys())
            raise DureError(f"{', '.join(missing)} did not come up within {START_SECONDS:g} s.")

    def _all_finished(self) -> bool:
        through = self._going.done and bool(self.finished) and not self._living()
        told = not self.casualties.failures  # the next look raises one, once it is explained
        return through and told and not self.restarts.awaited and self.ready.issuperset(self._servers)

    def _resume(self, part: checkpoint.Part) -> None:
        plain, tensors = part.plain, part.tensors
        self.totals = Totals.restored(plain["totals"])
        self.totals.seconds = plain["seconds"]
        self.history = [dict(row) for row in plain["history"]]
        self._last_row = self.history[-1]["step"] if self.history else 0
        self.progress = dict(plain["progress"])
        self.at = {name: int(said["at"]) for name, said in self.progress.items()}
        self.finished = dict(plain["finished"])
        self.delivered = {
            name: (tensors[name], tensors.get(f"{name} buffers")) for name in self.finished if name in tensors
        }
        self._everyone -= self.finished.keys()
        self.checkpoint_due += plain["checkpoint"]

    async def _gather(self) -> Outcome:
        totals, setup = self.totals, self.setup
        for name, said in self.finished.items():
            totals.count("per_worker", name, steps=said["done"], **{key: said[key] for key in _TRAFFIC})
            totals.add_time(said["time"])
            totals.counts["samples"] += said["done"] * setup.batch_sizes[NodeId.of(name).rank]
            for key in _TRAFFIC:
                totals.counts[key] += said[key]
        totals.seconds = max(said["seconds"] for said in self.finished.values())
        totals.steps = max(said["steps"] for said in self.finished.values())
        values, updates = await self._deliver()
        totals.counts["updates_refused"] += self._refused_of_lost
        totals.counts["updates_refused"] += sum(int(said.get("refused", 0)) for said in self.finished.values())
        for name in self.evicted:
            self._count_lost(name)
            self._dismissed.add(name)
            self.launcher.signal(name, signal.SIGKILL)  # nobody waits for a stopped process to close its connections
        for name in (*self.finished, *self._servers):
            self._dismissed.add(name)
            with suppress(RemoteError):  # it died when all was done
                await self.node.call(Address(name, "process"), "bye")
        row = {
            "seconds": totals.seconds,
            "step": max(self._last_row, min(said["steps"] for said in self.finished.values())),
            "updates": updates,
            "samples": totals.counts["samples"],
            "bytes": totals.counts["bytes_sent"],
        }
        self.grader.give(Snapshot(row, values, self._merged_buffers()))
        self.grader.close()
        notes: dict[str, Any] = {"deaths": dict(self.casualties.causes), "evicted": dict(self.evicted)}
        notes["unfinished"] = self._unfinished()
        notes |= setup.topology.notes()
        return Outcome(totals, self.history, values, self.spans, notes)

    def _unfinished(self) -> dict[str, str]:
        """The workers that have not done all their work, and why."""
        missing = [name for name in by_rank(self._workers) if name not in self.finished]
        return {name: self.evicted.get(name) or self.casualties.cause(name) for name in missing}

    async def _deliver(self) -> tuple[torch.Tensor, int]:
        """The final parameters, and how many gradients are in them; what the shards have counted."""
        setup, totals = self.setup, self.totals
        if not setup.topology.clocked:
            await self._count_shards()
            done = sum(int(said["done"]) - int(said.get("refused", 0)) for said in self.finished.values())
            totals.counts["updates_applied"] = done
            totals.staleness.histogram[0] = totals.counts["updates_applied"]
            updates = sum(int(said["updates"]) for said in self.finished.values())
            living = [self.delivered[name][0] for name in by_rank(self.delivered)]
            return living[0] if setup.topology.needs_everybody else torch.stack(living).mean(dim=0), updates
        await self.node.call(Address(self._servers[0], "process"), "settle")  # the last to leave may close a group
        totals.count_updates(await self._count_shards())
        clock = (await self.node.call(Address(self._servers[0], "clock"), "status")).fields
        totals.counts["updates_refused"] += clock["refused"]
        client = setup.client(self.node, -1)
        return await client.look(setup.replica.params.clone())

    async def _count_shards(self) -> list[tuple[dict[int, int], int, int]]:
        """Count what each shard has done: its staleness, updates applied and refused."""
        reports = []
        for name in self._servers:
            status = (await self.node.call(Address(name, "shard"), "status")).fields
            said = {key: status[key] for key in ("applied", "refused", "written") if key in status}
            self.totals.count("per_shard", name, **said)
            staleness = {int(behind): count for behind, count in status["staleness"].items()}
            reports.append((staleness, status["applied"], status["refused"]))
        return reports

    def _merged_buffers(self) -> torch.Tensor | None:
        found = [buffers for name in by_rank(self.delivered) if (buffers := self.delivered[name][1]) is not None]
        return self.setup.merge_buffers(found) if found else None

    def _graded(self, row: Row) -> None:
        self.history.append(row)
        self.watch.row(row)

    def begin_again(self) -> float | None:
        """After an error: in how many seconds another driver may go on from the last checkpoint; None if none may."""
        return self.restarts.together(self.dead) if self._going.done else None

    def close(self) -> None:
        """Let go of everything; if the run is not over, at once."""
        self.grader.abandon()
        self.node.wire.close(CLOSE_SECONDS if self._dismissed else 0.1)
        self.node.loop.end()
        self.liveness.close()
        if self.store is not None:
            self.store.close()


_TRAFFIC = ("bytes_sent", "bytes_received", "messages")
