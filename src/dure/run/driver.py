"""The driver of a real run: the service that all processes call, and the loop that waits for the result.

| part                  | subject                                                                    |
|-----------------------|----------------------------------------------------------------------------|
| `roster`              | the state of each process                                                  |
| `registration`        | the start: all processes register and begin together                       |
| `commands`            | calls to processes                                                         |
| `progress`, `history` | how far workers are; the rows of the run                                   |
| `checkpoints`         | when checkpoints are written                                               |
| `supervisor`          | what follows from a failure or a freeze; `failures`, `liveness`, `restarts`|
| `replacements`        | the killed workers that are started again                                  |
| `generations`         | the groups of workers that go on without a failed member                   |
| `scaling`, `leases`   | an elastic run: the number of workers, and the mini-batches of each        |
| `results`             | the model and the counts at the end                                        |
"""

from __future__ import annotations

import secrets
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dure.core.deployment import WORKER, NodeId, by_rank
from dure.core.meter import SPAN_KINDS
from dure.core.node import Call, Reply, TensorSpec
from dure.core.protocol import (
    CLOCK,
    COMPANIONS,
    COUNT,
    FINITE,
    NODE,
    NODES,
    NUMBER,
    PORT,
    TEXT,
    TRUTH,
    WORKERS,
    carrying,
    either,
    listed,
    mapping,
    maybe,
    nullable,
    one_of,
    remote,
    row,
)
from dure.core.state import State
from dure.errors import RemoteError
from dure.run import checkpoint
from dure.run.checkpoint_schedule import CHECKPOINTS, CheckpointSchedule, LastCheckpoint
from dure.run.failures import FailureTracker, LivenessLimits, LivenessMonitor, RestartPolicy
from dure.run.generations import GENERATIONS, Generations
from dure.run.history import DriverHistory
from dure.run.leases import LEASES, Leases, LeaseService, reached
from dure.run.outcome import Outcome, count_stages
from dure.run.places import Launcher
from dure.run.process import COUNTED, FaultSettings
from dure.run.replacement import Replacements
from dure.run.roster import Commands, DriverService, ProcessRoster, Registration, RunProgress
from dure.run.scaling import Scaling
from dure.run.snapshots import Delivered, Results
from dure.run.supervisor import CompanionTracker, Supervisor
from dure.runtime.launch.engine_store import EngineStore
from dure.runtime.launch.interruption import Interruption
from dure.runtime.process.node import ProcessNode
from dure.runtime.wire import Credentials, Identity, WireLimits

if TYPE_CHECKING:
    from dure.run.checkpoint import Parts
    from dure.run.prebuilt import Callbacks
    from dure.run.setup import Setup

CLOSE_SECONDS = 2.0
"""Seconds in which processes may close their connections at the end of a run."""


class Driver(DriverService):
    """Serves the processes of one run, starts them through `launcher`, and waits for the result.

    Processes of other machines reach it at the address `interface`; without it all are on this machine. Checkpoints
    are written to `folder`.
    """

    def __init__(
        self,
        setup: Setup,
        callbacks: Callbacks,
        launcher: Launcher,
        *,
        folder: Path | None,
        fault_settings: FaultSettings = FaultSettings(),  # noqa: B008
        restarts: RestartPolicy | None = None,
        interface: str | None = None,
        credentials: Credentials | None = None,
        interruption: Interruption | None = None,
    ) -> None:
        self.setup, self.callbacks = setup, callbacks
        self.launcher, self.folder = launcher, folder
        self.restarts = restarts or RestartPolicy(setup, None)
        absent = fault_settings.absent or sorted(setup.absent)
        self.fault_settings = replace(fault_settings, absent=absent, return_seconds=self.restarts.return_seconds)
        self.run_name = f"{setup.job.name}-{secrets.token_hex(4)}"
        self.credentials = credentials or Credentials.drawn(setup.config.integrity)
        self.node = ProcessNode(
            Identity(self.run_name, "driver"),
            self.credentials,
            seed=setup.config.seeded,
            limits=WireLimits(silent_seconds=setup.config.frozen_after),
        )
        address = interface or "127.0.0.1"
        self.address = (address, self.node.wire.listen(address))
        self.store = EngineStore(interface, setup.workers) if setup.topology.uses_engine else None
        self.liveness = LivenessMonitor(launcher.beats, LivenessLimits.of(setup.config), lambda: launcher.processes)
        self._compose()
        self.last_checkpoint = LastCheckpoint(
            self.checkpoints, self.registration.begun, interruption or Interruption(), setup.config.grace
        )
        self.node.on_lost = self.supervisor.disconnected
        self.node.serve("driver", self)

    def _compose(self) -> None:
        """Make the parts that share the roster."""
        setup, node = self.setup, self.node
        self.roster = roster = ProcessRoster(setup.deployment, self.fault_settings.absent)
        self.registration = Registration(node, roster, lambda: node.begin(self.progress.totals.seconds))
        self.commands = commands = Commands(node, roster, self.registration.registered, setup.clocks)
        self.progress = progress = RunProgress(setup, roster)
        self.companions = CompanionTracker(setup, lambda name: self.failures.cause(name))
        self.history = DriverHistory(setup, self.callbacks, progress, node.now, self.companions.row)
        self.results = Results(setup, node, roster, commands)
        shared: dict[str, Any] = {"progress": progress, "commands": commands}
        self.checkpoints = CheckpointSchedule(setup, node, roster, folder=self.folder, part=self._part, **shared)
        node.serve(CHECKPOINTS.service, self.checkpoints)
        self.generations = self._generations()
        given: dict[str, Any] = {"roster": roster, "folder": self.folder}
        self.failures = FailureTracker(self.launcher, node.loop, str(setup.strategy), setup.deployment, **given)
        self.replacements = Replacements(progress.steps)
        self.supervisor = Supervisor(
            setup=setup,
            launcher=self.launcher,
            roster=roster,
            failures=self.failures,
            restarts=self.restarts,
            liveness=self.liveness,
            begun=self.registration.begun,
            now=self._seconds,
            go_on_without=self._go_on_without,
            companions=self.companions,
            replacements=self.replacements,
            **shared,
        )
        self.scaling = self._scaling()

    def _generations(self) -> Generations | None:
        if not self.setup.re_forms:
            return None
        found = Generations(self.node, self.roster, self.commands, self.checkpoints)
        self.node.serve(GENERATIONS.service, found)
        self.checkpoints.may_stop = found.runs
        self.history.gradients = found.gradients
        return found

    def _scaling(self) -> Scaling | None:
        config = self.setup.config
        if config.elastic is None:
            return None
        least = config.elastic.least
        self.leases = Leases(self.setup.steps * least)
        self.node.serve(LEASES.service, LeaseService(self.leases, self.roster))
        if not self.setup.lockstep:
            self.checkpoints.reached = lambda: reached(self.leases.state()) // least
        return Scaling(
            config.elastic,
            config.out,
            leases=self.leases,
            roster=self.roster,
            commands=self.commands,
            launcher=self.launcher,
            replacements=self.replacements,
            start=self.start,
        )

    # ---- the service

    def unknown(self, call: Call) -> str:
        return f'the driver has no method "{call.method}".'

    @property
    def model(self) -> Sequence[TensorSpec]:
        """A model, with its buffers if it has some, as tensors of a call."""
        replica, of_stage = self.setup.replica, self.setup.stages is not None
        specs = [TensorSpec(str(replica.dtype).removeprefix("torch."), replica.numel, at_most=of_stage)]
        buffers = replica.buffers_flat()
        if buffers.numel():
            specs.append(TensorSpec(str(buffers.dtype).removeprefix("torch."), buffers.numel(), at_most=of_stage))
        return specs

    @remote(NODES, host=TEXT, port=PORT)
    async def _register(self, call: Call) -> Reply:
        name, newcomer = call.caller, self.registration.begun.done
        await self.registration.register(name, (call.fields["host"], call.fields["port"]))
        if newcomer and name in self.roster.servers:
            self.commands.bring_back(name)
        elif newcomer and self.setup.topology.graph is not None:
            self.commands.introduce(name)
        store = None if self.store is None else self.store.place
        directory = {name: list(place) for name, place in self.roster.places.items()}
        earlier = name in self.progress.last_steps or self.roster.incarnations[name] > 0
        steps = self.progress.steps(name) if earlier else None
        return Reply({"directory": directory, "store": store, "newcomer": newcomer, "steps": steps})

    @remote(NODES)
    async def _ready(self, call: Call) -> Reply:
        await self.registration.ready(call.caller)
        await self.checkpoints.wait()
        evaluates = call.caller == self.roster.first_living
        if evaluates:
            self.history.evaluating_worker = call.caller
        go = {"seconds": self.node.now(), "evaluates": evaluates}
        if call.caller in self.roster.companions:
            return Reply({**go, "figures": self.companions.begin(call.caller)})
        self.replacements.begin(call.caller)
        return Reply({**go, "suspending": self.checkpoints.suspending, "checkpoint": self.checkpoints.due})

    @remote(WORKERS, steps=COUNT, at=COUNT, done=COUNT, loss=nullable(NUMBER), bytes=COUNT)
    def _progress(self, call: Call) -> Reply:
        self.roster.evicted.pop(call.caller, None)
        self.progress.report(call.caller, call.fields)
        self.history.evaluate_means()
        steps, loss = self._step(call.fields["steps"]), call.fields["loss"]
        if self.setup.reports(NodeId.of(call.caller).rank):
            self.callbacks.progress(steps, self.setup.steps, loss, self.progress.samples())
        return Reply()

    @remote(WORKERS, seconds=FINITE, steps=COUNT, bytes=COUNT, updates=COUNT)
    @carrying(lambda driver: driver.model)
    def _snapshot(self, call: Call) -> Reply:
        return self.history.snapshot(call, self._missing(call.fields["steps"]))

    @remote(WORKERS, steps=COUNT, updates=COUNT, refused=COUNT, at_servers=COUNT, at=COUNT)
    @carrying(lambda driver: driver.model)
    def part(self, call: Call) -> Reply:
        return self.history.part(call)

    @remote(WORKERS)
    def _slowest(self, call: Call) -> Reply:
        return Reply({"steps": self._step(self.progress.lowest())})

    @remote(WORKERS, spans=listed(row(TEXT, one_of(*SPAN_KINDS), FINITE, FINITE, TEXT)))
    def _spans(self, call: Call) -> Reply:
        return self.history.add_spans(call)

    @remote(COMPANIONS, figures=mapping(FINITE))
    def _figures(self, call: Call) -> Reply:
        return self.companions.report(call)

    @remote(CLOCK, worker=NODE)
    def _evicted(self, call: Call) -> Reply:
        self.supervisor.evicted_by_clock(call.fields["worker"])
        return Reply()

    @remote(WORKERS, COMPANIONS, kind=TEXT, message=TEXT, refused=COUNT)
    def _failed(self, call: Call) -> Reply:
        kind, message = call.fields["kind"], call.fields["message"]
        self.progress.refused_of_failed += int(call.fields["refused"])
        if kind == "Quarantined" and self.supervisor.can_lose(call.caller):
            self.failures.because(call.caller, message.rstrip("."))  # its process ends, and the others go on
        else:
            self.failures.report(call.caller, kind, message)
        return Reply()

    @remote(
        WORKERS,
        time=mapping(FINITE),
        skew=mapping(COUNT),
        seconds=FINITE,
        retired=TRUTH,
        stage=maybe(mapping(either(COUNT, mapping(COUNT)))),
        **dict.fromkeys(("steps", "done", "updates", "refused", *COUNTED), COUNT),
    )
    @carrying(lambda driver: driver.model)
    def _done(self, call: Call) -> Reply:
        self.roster.evicted.pop(call.caller, None)
        if call.fields["retired"] and self._is_work_left(call.fields["steps"]):
            self._retired(call.caller, call.fields)
            return Reply()
        values, *buffers = [tensor.clone() for tensor in call.tensors]
        self.results.delivered[call.caller] = Delivered(values, buffers[0] if buffers else None)
        self.roster.finished[call.caller] = dict(call.fields)
        self.checkpoints.look()
        return Reply()

    def _retired(self, name: str, report: Mapping[str, Any]) -> None:
        """Let a worker go that has left before the end, as it was asked to, or after a warning."""
        self.progress.count_retired(name, report)
        if self.scaling is not None and self.scaling.is_retiring(name):
            self.roster.retire(name)
        else:
            self.supervisor.left(name)
        self.node.spawn(self.commands.bye(name), f"letting {name} go")
        self._go_on_without(name)

    def _is_work_left(self, steps: int) -> bool:
        """Whether work is left for a worker that has made so many steps."""
        return bool(self.leases.left) if self.scaling is not None else steps < self.setup.steps

    def _step(self, steps: int) -> int:
        """The step of the run where a worker has made `steps`; in an elastic run, by the mini-batches of all."""
        elastic = self.setup.config.elastic
        return steps if elastic is None else self.leases.used // elastic.least

    def _missing(self, step: int) -> int:
        """The gradients that are not in the model after `step`, as their workers were away."""
        return 0 if self.generations is None else self.setup.workers * step - self.generations.gradients(step)

    def _go_on_without(self, name: str) -> None:
        """Go on with everything that has waited for a worker."""
        if self.scaling is not None:
            self.leases.give_back(name)
        self.registration.look()
        if self.generations is not None:
            self.generations.lost(name)
        self.checkpoints.look()
        self.history.evaluate_means()
        first = self.roster.first_living
        if self.registration.begun.done and first is not None and name == self.history.evaluating_worker:
            self.history.evaluating_worker = first
            self.commands.evaluate(first)

    # ---- the loop

    def run(self, resume: Path | None = None, *, after: Driver | None = None) -> Outcome:
        """Start all processes, and wait for the result.

        `resume` is a folder of checkpoints; `after` the driver of the same run that has lost a process.
        """
        if resume is not None:
            with checkpoint.fitting("run"):
                self._resume(checkpoint.load(resume).parts, after)
        if after is not None:
            totals = self.progress.totals
            totals.seconds = after.node.now()
            totals.failures_survived = after.progress.totals.failures_survived + 1
            self.failures.causes.update(after.failures.causes)
        for name in (*self.roster.servers, *self.roster.companions, *self.roster.workers):
            if name in self.roster.expected:
                self.start(name, resume=resume)
        while not self._all_finished():
            self.turn()
        gathering = self.node.spawn(self._gather(), "gathering the results")
        gathering.when_done(lambda: None)  # its error is raised below
        while not gathering.done:
            self.turn()
        return gathering.result()

    def start(self, name: str, *, resume: Path | None = None) -> None:
        """Start a process; one that has run before is a new incarnation."""
        self.failures.restarted(name)
        self.launcher.start(
            name,
            run=self.run_name,
            incarnation=self.roster.admit(name),
            driver=list(self.address),
            credentials=self.credentials.plain(),
            fault_settings=asdict(self.fault_settings),
            resume=None if resume is None else str(resume),
            heartbeat=self.liveness.admit(name),
        )

    def turn(self) -> None:
        """Handle the messages, exits and heartbeats that have come, and the evaluations that are done."""
        self.node.loop.turn(0.1)
        self.launcher.look()
        self.callbacks.notice(self.supervisor.look_for_frozen())
        for name, status in dict(self.launcher.exited).items():
            self.supervisor.failed(name, f"exit status {status}")
        self.history.evaluator.look()
        self.failures.look()
        for name in self.restarts.due(self._seconds(), self.launcher.exited):
            self.progress.totals.failures_survived += 1
            self.start(name, resume=self.folder)
        for name in self.companions.due(self._seconds(), self.launcher.exited):
            self.start(name)
        for name in self.supervisor.due():
            self.start(name)
        if self.scaling is not None and self.registration.begun.done:
            self.scaling.look(self.node.now())
        self.failures.check(self.roster.workers, self.restarts, self.replacements.awaited)
        if self.generations is not None:
            self.generations.look()  # a checkpoint may have been complete since
            self.generations.check()
        self.last_checkpoint.look()
        self.registration.check()

    def _seconds(self) -> float:
        """Seconds of the run; 0 until it has begun."""
        return self.node.now() if self.registration.begun.done else 0.0

    def begin_again(self) -> float | None:
        """After an error: seconds until another driver may go on from the last checkpoint; None if none may."""
        if not self.registration.begun.done or self.failures.own_errors:
            return None
        return self.restarts.together(self.roster.failed, self.failures.killed())

    def close(self) -> None:
        """Release everything; if the run is not over, processes get no time to close their connections."""
        self.history.evaluator.abandon()
        if self.scaling is not None:
            self.scaling.close()
        self.node.wire.close(CLOSE_SECONDS if self.roster.dismissed else 0.1)
        self.node.loop.end()
        if self.store is not None:
            self.store.close()

    def _all_finished(self) -> bool:
        through = self.registration.begun.done and self.roster.all_finished
        through = through and (self.scaling is None or not self.leases.left)
        told = not self.failures.reported  # the next look raises one, once it is explained
        awaited = self.restarts.awaited or self.replacements.awaited
        return through and told and not awaited and self.roster.ready.issuperset(self.roster.servers)

    # ---- its part of a checkpoint, and the end

    def _part(self) -> State:
        """The driver's state, and the models of workers that have finished where no server has them."""
        assert self.checkpoints.round is not None
        plain = {
            "checkpoint": self.checkpoints.round.step,
            "history": self.history.rows,
            "totals": self.progress.totals.state(),
            "seconds": self.node.now(),
            "progress": self.progress.reports,
            "batch_sizes": self.setup.batch_sizes,
            "missing": self.history.missing,
            "last_steps": self.progress.last_steps,
            "finished": self.roster.finished,
            "origin": self.setup.origin,
            "companions": self.companions.figures(),
            "generations": [] if self.generations is None else self.generations.history,
            **({} if self.scaling is None else {"leases": self.leases.state(), "scaling": self.scaling.state()}),
        }
        tensors = {}
        for name, (values, buffers) in self.results.delivered.items() if not self.roster.servers else ():
            tensors[name] = values
            if buffers is not None:
                tensors[f"{name} buffers"] = buffers
        return State(tensors, plain)

    def _resume(self, parts: Parts, after: Driver | None) -> None:
        plain, tensors = parts["run"].plain, parts["run"].tensors
        self.progress.restore(plain["totals"], plain["seconds"], plain["progress"], plain.get("last_steps", {}))
        self.history.restore([dict(row) for row in plain["history"]], plain.get("missing", 0))
        if self.scaling is None:
            self.roster.restore(plain["finished"])
        else:
            self._resume_elastic(plain, {name for name in parts if name.startswith(WORKER)}, after)
        for name in self.roster.finished:
            if name in tensors:
                self.results.delivered[name] = Delivered(tensors[name], tensors.get(f"{name} buffers"))
        self.checkpoints.due += plain["checkpoint"]
        self.companions.restore(plain.get("companions", {}))
        if self.generations is not None:
            self.generations.history = list(plain.get("generations", []))

    def _resume_elastic(self, plain: Mapping[str, Any], saved: set[str], after: Driver | None) -> None:
        """Begin with as many of the workers in the checkpoint as the run is to have; the others have left."""
        assert self.scaling is not None
        before = None if after is None else after.scaling
        self.leases.restore(plain["leases"])
        for name, report in plain["finished"].items():
            self.progress.count_retired(name, report)
        names = self.scaling.restore(plain["scaling"], saved, before)
        for name in self.progress.reports.keys() - {*names}:
            self.progress.count_lost(name)
        self.roster.begin_with(names)
        others = [name for name in self.scaling.names if name not in names]
        self.fault_settings = replace(self.fault_settings, absent=[NodeId.of(name).rank for name in others])
        for name in others if self.roster.servers else ():
            self.commands.tell_clock("lost", name)

    async def _gather(self) -> Outcome:
        """Collect the result, end all processes, and evaluate the final model."""
        progress, finished = self.progress, self.roster.finished
        progress.count_finished()
        step, of_failed = min(report["steps"] for report in finished.values()), 0
        if self.generations is not None:
            of_failed = self.generations.gradients(step) - sum(report["done"] for report in finished.values())
        step = step if self.setup.synchronous else self._step(step)
        missing = self.history.missing
        values, updates = await self.results.collect(progress.totals, of_failed - missing)
        progress.count_refused()
        await self._collect_figures()
        await self._dismiss()
        self.history.evaluate_result(
            progress.totals, values, self.results.buffers, step=step, updates=updates + missing
        )
        self.history.evaluator.close()
        notes: dict[str, Any] = {"deaths": dict(self.failures.causes), "evicted": dict(self.roster.evicted)}
        notes["unfinished"] = self._unfinished()
        if self.generations is not None:
            notes["generations"] = self.generations.history
        notes |= count_stages(progress.totals, {name: report.get("stage", {}) for name, report in finished.items()})
        notes |= self.setup.topology.notes()
        notes |= self.setup.experience(self.companions.figures(), self.history.rows, progress.totals.seconds)
        return Outcome(progress.totals, self.history.rows, values, self.history.spans, notes)

    async def _collect_figures(self) -> None:
        """Have all companions report once more."""
        for name in self.roster.present.intersection(self.roster.companions):
            with suppress(RemoteError):  # it has failed
                await self.commands.call(name, "report")

    async def _dismiss(self) -> None:
        """End all processes."""
        for name in self.roster.evicted:
            self.progress.count_lost(name)
            self.roster.dismissed.add(name)
            self.launcher.signal(name, signal.SIGKILL)  # a stopped process would close no connection
        companions = self.roster.expected.intersection(self.roster.companions)
        for name in (*self.roster.finished, *companions, *self.roster.servers):
            self.roster.dismissed.add(name)
            await self.commands.bye(name)

    def _unfinished(self) -> dict[str, str]:
        """The workers that have not done all their work, and why."""
        missing = [name for name in by_rank(self.roster.workers) if name not in self.roster.finished]
        return {name: self.roster.evicted.get(name) or self.failures.cause(name) for name in missing}
