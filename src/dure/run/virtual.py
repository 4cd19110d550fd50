"""A run in virtual time: the workers and servers of one set-up on one simulated cluster.

A run is a chain of *segments*. A segment begins with roles started on declared state and ends when the work
does, or at a scheduled checkpoint: every worker stops at its next step boundary, messages under way arrive,
and the state of all is taken. The next segment starts from that state, whether it is still in memory or was
read from the disk. So a run that was killed and resumed has the result of an uninterrupted run, bit for bit.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dure.codec.cost import cost_of
from dure.core.deployment import SERVER, WORKER, NodeId, WhenLost
from dure.core.node import Suspend, Task
from dure.core.state import State
from dure.errors import DureError, PeerLost, Quarantined
from dure.job.evaluation import grader_of
from dure.job.gradient_engine import GradientEngine
from dure.partition.source import StageSource
from dure.run.checkpoint import fitting
from dure.run.history import RunCounts
from dure.run.outcome import Outcome, Totals, count_stages, figures_of
from dure.run.servers import build_server
from dure.run.step_shape import (
    completed_variables,
    delays_by_shards,
    of_shard,
    referred,
    slices_of,
    slowest,
    step_shape,
)
from dure.run.strategy import codec_name, own_cost
from dure.run.virtual_companions import VirtualCompanions
from dure.run.virtual_history import VirtualHistory, VirtualModel
from dure.run.virtual_membership import Attendance, ClusterEvents
from dure.run.workers import build_worker, restore_worker, state_of_worker, work_through
from dure.runtime.virtual.network import Network
from dure.runtime.virtual.runtime import VirtualRuntime
from dure.sync import lifecycle

if TYPE_CHECKING:
    from dure.job.gradient import Gradient
    from dure.run.checkpoint import Parts
    from dure.run.prebuilt import Callbacks, Row
    from dure.run.servers import HostedServer
    from dure.run.setup import Setup
    from dure.runtime.virtual.cluster import Cluster
    from dure.runtime.virtual.compute import Durations
    from dure.sync.worker_state import Boundary, WorkerState
    from dure.topology.parameter_server.clock import ClockService
    from dure.topology.parameter_server.coordinator import Coordinator

OnStep = Callable[["WorkerState", "Gradient"], None]
OnWorker = Callable[["WorkerState"], None]

WEIGHTS_STREAM = 2
"""Separates the random weights of messages from other streams of the same seed."""

COLLECT_EVERY = 50_000
"""Threshold of the cyclic garbage collector during a run: objects created, less those freed."""

OBJECTS_PER_WORKER = 200
"""Its minimum per worker: so many objects are alive at once if all workers have pending calls."""


@contextmanager
def collecting_rarely(workers: int) -> Iterator[None]:
    """Run the cyclic garbage collector seldom, on objects of this run only: a run makes few cycles and many objects.

    Otherwise it costs a third of a timing-only run of 1,000 or more workers. Nodes and services refer to each other and
    to the job's data. These cycles are collected at the end, as the next collection may be far off.
    """
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.set_threshold(max(COLLECT_EVERY, OBJECTS_PER_WORKER * workers), *before[1:])
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.set_threshold(*before)
        if not frozen:
            gc.unfreeze()


class VirtualRun:
    """Train `setup` on `cluster`, or only the first `simulated` workers of it, if all others do as these.

    Raises `DeadlockError`, `DivergedError`, and the errors of workers and servers.
    """

    def __init__(self, setup: Setup, cluster: Cluster, callbacks: Callbacks, simulated: int | None = None) -> None:
        self.setup = setup
        self.cluster = referred(cluster, setup.job)
        self.simulated = setup.workers if simulated is None else simulated
        self.callbacks = callbacks
        config = setup.config
        self.gradient_engine = (
            None
            if config.timing_only
            else GradientEngine(setup.job, exact=config.exact, device=setup.device, seed=config.seeded)
        )
        if self.gradient_engine is not None:
            setup.configure(self.gradient_engine)
        self.evaluator = (
            None
            if config.timing_only
            else grader_of(setup.job, config.eval_samples, device=setup.device, seed=config.seeded)
        )
        self.history: list[Row] = []
        self.spans: list[Any] = []
        self._segment: VirtualSegment | None = None
        self._ended = 0.0

    @property
    def now(self) -> float:
        """The virtual seconds of the run so far."""
        segment = self._segment  # read once: another thread may ask while the run ends
        return self._ended if segment is None else segment.runtime.kernel.now

    def run(self, parts: Parts | None = None) -> Outcome:
        """Run from the start, or from the `parts` of a checkpoint, to the end of the work."""
        with collecting_rarely(self.setup.workers):
            try:
                return self._run(parts)
            finally:  # before the collection, which frees the segment
                self._ended, self._segment = self.now, None

    def _run(self, parts: Parts | None) -> Outcome:
        segment = VirtualSegment(self, None) if parts is None else self._resume(parts)
        while True:
            self._segment = segment
            try:
                parts = segment.run()
            finally:
                segment.end()
            if parts is None:
                return segment.outcome()
            self.callbacks.checkpoint(segment.checkpoint_step, parts)
            segment = VirtualSegment(self, parts)

    def _resume(self, parts: Parts) -> VirtualSegment:
        parts = {name: part.to(torch.device(self.setup.device)) for name, part in parts.items()}
        with fitting("run"):
            self.history = [dict(row) for row in parts["run"].plain["history"]]
            return VirtualSegment(self, parts)


class VirtualSegment:
    """One stretch of a virtual run, between two checkpoints."""

    def __init__(self, run: VirtualRun, parts: Parts | None) -> None:
        self.whole = run
        self.setup = setup = run.setup
        plain = parts["run"].plain if parts is not None else {}
        self.totals = Totals.restored(plain["totals"]) if plain else Totals()
        self.attendance = Attendance.of(plain)
        self.started = self.totals.seconds
        every = setup.config.checkpoint_every
        self.checkpoint_step = plain.get("checkpoint", 0) + every if every else 0
        self.suspending = False
        self.last_end = self.last_crash = self.started
        self.servers: list[HostedServer] = []
        self.workers: dict[int, WorkerState] = {}
        self.first = setup.workers  # the lowest number among those that know a loss
        self.steps = [0] * setup.workers
        self.roles: dict[int, Task[None]] = {}
        self.durations: dict[int, Durations] = {}
        self.runtime = self._runtime()
        self.companions = VirtualCompanions(
            setup,
            self.runtime,
            run.cluster,
            absent=[setup.machine_nodes[number] for number in run.cluster.absent if number >= setup.workers],
            start=plain.get("checkpoint", 0),
            kept=plain.get("companions"),
        )
        self.model = VirtualModel(setup, self.servers, self.workers, self.attendance, parts)
        self.history = self._history(plain.get("missing", 0))
        try:
            self._build(parts)
        except DureError:
            self.runtime.kernel.end()
            raise
        self._events(resumed=parts is not None).schedule()

    # ---- parts, for tests and reports

    @property
    def shards(self) -> list[Any]:
        """The shard of each server."""
        return self.model.shards

    @property
    def clock(self) -> ClockService | None:
        """The clock of the servers; in a pipeline, that of the first stage."""
        return self.servers[0].clock if self.servers else None

    @property
    def coordinator(self) -> Coordinator | None:
        """The coordinator at server 0."""
        return self.servers[0].coordinator if self.servers else None

    def delivered(self) -> torch.Tensor:
        """The parameters that the method delivers, as they are now."""
        return self.model.delivered()

    # ---- building

    def _runtime(self) -> VirtualRuntime:
        setup, run = self.setup, self.whole
        hosts = run.cluster.placed(setup.deployment.places())
        shape, left = of_shard(setup, run.cluster, step_shape(setup, run.cluster))
        weights = np.random.default_rng((setup.config.seeded, self.checkpoint_step, WEIGHTS_STREAM))
        runtime = VirtualRuntime(
            run.cluster,
            lambda kernel: Network(
                run.cluster, kernel, hosts, weights, getattr(setup.strategy.topology, "algorithm", "engine")
            ),
            run.gradient_engine,
            seed=setup.config.seeded,
            start=self.started,
            trace=setup.config.trace,
            codec=cost_of(codec_name(setup.strategy.codec), run.cluster.codecs, own_cost(setup.strategy.codec)),
            slices=slices_of(setup, shape),
            shape=shape,
            slowest=slowest(setup, run.cluster) * left,
            variables=setup.variables if run.cluster.servers.software else None,
            together=setup.strategy.pushes_together,
            completed=completed_variables(setup, run.cluster, shape),
        )
        runtime.delays = delays_by_shards(setup, run.cluster, runtime.network)
        return runtime

    def _history(self, missing: int) -> VirtualHistory:
        run, counts, attendance = self.whole, self.totals.counts, self.attendance
        now = RunCounts(
            seconds=lambda: self.runtime.kernel.now,
            samples=lambda: counts["samples"],
            bytes_sent=lambda: counts["bytes_sent"] + self._bytes_sent(),
            slowest=lambda: attendance.slowest(run.history[-1]["step"] if run.history else 0),
        )
        more = self.companions.row
        found = VirtualHistory(
            self.setup, run.callbacks, now, more, model=self.model, attendance=attendance, grader=run.evaluator
        )
        found.restore(run.history, missing)
        return found

    def _events(self, *, resumed: bool) -> ClusterEvents:
        return ClusterEvents(
            self.whole.cluster,
            self.runtime,
            self.started,
            resumed,
            crash=self._crash,
            join=self._join,
            is_there=self._is_there,
            names=self.setup.machine_nodes,
        )

    def _is_there(self, number: int) -> bool:
        if number >= self.setup.workers:
            return self.companions.is_there(self.setup.machine_nodes[number])
        return number in self.workers and self.attendance.works(number)

    def _build(self, parts: Parts | None) -> None:
        for name in self.setup.deployment.names(SERVER):
            self._build_server(name, parts)
        if self.servers:
            self.servers[0].lead(self.setup.sync, self.started)
        self.companions.build(parts)
        absent = self.whole.cluster.absent - self.attendance.joined
        ranks = range(self.whole.simulated)
        for rank in ranks:
            self.runtime.node(f"worker {rank}", rank)
            self._draw_durations(rank)
        for rank in ranks:
            if self.attendance.works(rank) and rank not in absent:
                self._start_worker(rank, parts)
            else:
                self.runtime.nodes[f"worker {rank}"].alive = False

    def _build_server(self, name: str, parts: Parts | None) -> None:
        node = self.runtime.node(name, NodeId.of(name).rank)
        server = build_server(self.setup, node)
        if server.coordinator is not None:
            server.coordinator.meter = node.meter
        if server.clock is not None:
            server.clock.on_evicted = self._evicted
        if parts is not None:
            server.restore(parts)
        server.serve()
        self.servers.append(server)

    def _draw_durations(self, rank: int) -> None:
        durations = self.whole.cluster.durations(rank, self.setup.config.seeded)
        self.durations[rank] = durations
        self.runtime.nodes[f"worker {rank}"].loading = self.whole.cluster.loading(rank, self.setup.parts)
        self.runtime.durations[f"worker {rank}"] = durations

    @cached_property
    def _boundary(self) -> Boundary:
        """The end of the work of each worker: one for all, as many equal objects would fill the caches."""
        boundary = self.setup.boundary()
        if self.checkpoint_step:
            boundary.suspend = self._suspend
            boundary.checkpoint = lambda: self.checkpoint_step
        return boundary

    @cached_property
    def _callbacks(self) -> tuple[OnStep, OnWorker, OnWorker | None]:
        """The functions that all workers call after a step, after a step in vain, and at a step boundary."""
        graded = self.whole.evaluator is not None and not self.setup.coordinated
        return self._on_step, self._on_made, self.history.at_boundary if graded else None

    def _start_worker(self, rank: int, parts: Parts | None, *, newcomer: bool = False) -> None:
        node = self.runtime.nodes[f"worker {rank}"]
        steps = self.attendance.steps.get(rank) if newcomer else None
        worker = build_worker(self.setup, node, rank, node.meter, start=self.companions.start, steps=steps or 0)
        self.setup.of_worker(rank).topology.attach(worker, self.shards)
        worker.boundary = self._boundary
        worker.on_step, worker.on_abort, worker.on_boundary = self._callbacks
        buffers = worker.buffers
        part = restore_worker(self.setup, worker, parts or {})
        if part is not None:
            with fitting(f"worker-{rank}"):
                self.durations[rank].skip(part.plain["drawn"])
            if self.setup.config.timing_only:
                worker.buffers = buffers  # a checkpoint of such a run has no values of them
        if not newcomer:
            self.attendance.at.setdefault(rank, 0)
        self.workers[rank] = worker
        if self.setup.reports(rank):
            self.first = min(self.first, rank)
        role = node.spawn(self._role(worker, steps, join=part is None, newcomer=newcomer), f"worker {rank}")
        role.when_done(lambda: self._ended(rank))
        self.roles[rank] = role

    # ---- work of a worker

    async def _role(self, worker: WorkerState, steps: int | None, *, join: bool, newcomer: bool) -> None:
        if join:
            await lifecycle.join(worker, newcomer=newcomer, period=self.setup.period, steps=steps)
        await work_through(self.setup.sync, worker, self.setup.period)
        await lifecycle.leave(worker)

    def _ended(self, rank: int) -> None:
        role = self.roles[rank]
        if all(each.done for each in self.roles.values()):
            self.companions.stop()
        try:
            role.result()
        except Suspend:
            return
        except PeerLost as error:
            raise DureError(f"worker {rank} cannot go on: {error}") from error
        except Quarantined as error:
            self._quarantine(rank, error)
            return
        self.attendance.refused += self.workers[rank].refusals.total
        self.attendance.finished.add(rank)
        self.attendance.at[rank] = self.workers[rank].clock
        self.last_end = self.runtime.kernel.now

    def _on_step(self, worker: WorkerState, gradient: Gradient) -> None:
        setup = self.setup
        if setup.reports(worker.number):
            self.totals.counts["samples"] += worker.source.batch_size
            self.whole.callbacks.stepped(worker, self.runtime.kernel.now, self._bytes_sent)
        self._on_made(worker)
        if worker.number == self.first:
            self.whole.callbacks.progress(worker.clock, setup.steps, gradient.loss, self.totals.counts["samples"])

    def _on_made(self, worker: WorkerState) -> None:
        """Count a step that has been made, or begun in vain."""
        self.attendance.done += 1
        self.steps[worker.number] += 1
        self.totals.steps = max(self.totals.steps, worker.clock)
        if self.setup.coordinated:  # the coordinator hands out the work: there are no step boundaries
            self.attendance.at[worker.number] = worker.clock
            self.history.count_passed()

    # ---- failures of workers

    def _quarantine(self, rank: int, error: Quarantined) -> None:
        """Remove a worker whose gradients hold NaN, as after a crash; end the run if every worker is needed."""
        if self.setup.deployment[f"worker {rank}"].when_lost is not WhenLost.GO_ON:
            raise error
        self.attendance.deaths[f"worker {rank}"] = str(error).rstrip(".")
        self.attendance.refused += self.workers[rank].refusals.total
        self._crash(rank)

    def _crash(self, rank: int) -> None:
        if rank >= self.setup.workers:
            self.totals.failures_survived += 1
            self.companions.crash(self.setup.machine_nodes[rank])
            return
        self.attendance.crashed.add(rank)
        self.attendance.steps[rank] = self.workers[rank].clock
        self.last_crash = self.runtime.kernel.now
        self.totals.failures_survived += 1
        self.runtime.lose(self.runtime.nodes[f"worker {rank}"])
        self.attendance.forget(rank)
        self.history.evaluate_means()  # some may have waited for this worker alone
        if all(each.done for each in self.roles.values()):
            self.companions.stop()

    def _join(self, rank: int) -> None:
        if rank >= self.setup.workers:
            self.companions.join(self.setup.machine_nodes[rank])
            return
        node = self.runtime.nodes[f"worker {rank}"]
        self.attendance.joined.add(rank)
        self.attendance.crashed.discard(rank)
        self.runtime.network.restore(node.name)
        node.revive()
        self._start_worker(rank, None, newcomer=True)

    def _evicted(self, rank: int) -> None:
        self.totals.failures_survived += 1
        self.attendance.away.add(rank)
        self.history.evaluate_means()

    # ---- running

    def run(self) -> Parts | None:
        """Run to the end of the work (returns None) or to the next checkpoint (returns its parts)."""
        kernel = self.runtime.kernel
        kernel.run()
        while self._all_crashed() and kernel.next_external_event():
            kernel.run()
        if self._all_crashed():
            raise DureError(
                f"all workers have crashed by {self.last_crash:g} virtual seconds, and no later event lets one join."
            )
        kernel.check_deadlock([role for rank, role in self.roles.items() if rank not in self.attendance.crashed])
        suspended = any(map(self.attendance.works, self.roles))
        self._count_nodes(kernel.now if suspended else self.last_end)
        if suspended:
            return self._parts()
        self.history.end(self.totals)
        return None

    def end(self) -> None:
        """End the threads of workers that share layers."""
        for worker in self.workers.values():
            if isinstance(worker.source, StageSource):
                worker.source.end()

    def _all_crashed(self) -> bool:
        return self.roles.keys() <= self.attendance.crashed and not self.attendance.finished

    def _suspend(self, worker: WorkerState) -> bool:
        """Whether a checkpoint is due for `worker`, at its step boundary."""
        due = self.checkpoint_step <= min(worker.clock, self.setup.steps)
        if self.setup.lockstep:
            return due
        if due and not self.suspending:
            self.suspending = True
            for rank, other in self.workers.items():
                if other.asking and rank not in self.attendance.finished:
                    self.runtime.kernel.soon(lambda r=rank: self._interrupt(r))  # type: ignore[misc]
        return self.suspending

    def _interrupt(self, rank: int) -> None:
        if self.workers[rank].asking:
            self.roles[rank].throw(Suspend())

    def _bytes_sent(self) -> int:
        return sum(node.payload_sent for name, node in self.runtime.nodes.items() if NodeId.of(name).kind == WORKER)

    def _count_nodes(self, now: float) -> None:
        """Add the traffic and the times of all nodes in this segment, which ends `now`."""
        totals, runtime = self.totals, self.runtime
        totals.seconds = now
        totals.events += runtime.kernel.events
        for name, node in runtime.nodes.items():
            amounts = {"bytes_sent": node.payload_sent, "bytes_received": node.payload_received}
            amounts["messages"] = runtime.network.counters(name).messages
            table = "per_worker" if NodeId.of(name).kind == WORKER else "per_shard"
            if table == "per_worker":
                totals.count(table, name, steps=self.steps[node.rank])
            totals.count(table, name, **amounts)
            if table == "per_worker":
                totals.add_time(node.meter.seconds)
                totals.version_skew.histogram.update(node.meter.skew)
                for key, amount in amounts.items():
                    totals.counts[key] += amount
            if node.meter.spans is not None:
                self.whole.spans.extend(node.meter.spans)
        if not self.model.at_servers:
            totals.counts["updates_applied"] = self.attendance.done // self.setup.parts

    def _parts(self) -> Parts:
        of_finished, retired = self.model.parts()
        run = {
            "totals": self.totals.state(),
            **self.attendance.plain(),
            **of_finished,
            "checkpoint": self.checkpoint_step,
            "companions": self.companions.plain(),
            "history": self.whole.history,
            "missing": self.history.missing,
            "origin": self.setup.origin,
        }
        parts = {"run": State({}, run), **retired}
        for rank, worker in self.workers.items():
            if self.attendance.works(rank):
                state = state_of_worker(worker).cloned()
                state.plain["drawn"] = self.durations[rank].drawn
                parts[f"worker-{rank}"] = state
        for server in self.servers:
            parts |= server.parts()
        return {**parts, **self.companions.parts()}

    def outcome(self) -> Outcome:
        """The outcome of the run."""
        setup, totals, attendance = self.setup, self.totals, self.attendance
        for server in self.servers:
            totals.count("per_shard", server.name, **setup.topology.counted(server.shard))
        totals.counts["updates_refused"] = 0
        if self.model.at_servers:
            totals.count_updates([(shard.staleness, shard.applied, shard.refused) for shard in self.shards])
            totals.counts["updates_refused"] += sum(server.clock.refused for server in self.servers if server.clock)
        else:
            totals.counts["updates_applied"] -= attendance.refused
            totals.staleness.histogram[0] = totals.counts["updates_applied"]
        found = {f"worker {number}": figures_of(worker) for number, worker in sorted(self.workers.items())}
        notes: dict[str, Any] = count_stages(totals, found)
        totals.counts["updates_refused"] += attendance.refused
        notes |= {"events": totals.events, "deaths": attendance.deaths, "unfinished": attendance.deaths}
        if self.whole.gradient_engine is not None:
            notes["batching"] = self.whole.gradient_engine.rule
        notes |= setup.topology.notes()
        notes |= setup.experience(self.companions.figures(), self.whole.history, totals.seconds)
        params = None if setup.config.timing_only else self.delivered()
        return Outcome(totals, self.whole.history, params, self.whole.spans, notes)
