"""A run in virtual time: roles and services of one set-up on one simulated cluster.

A run is a chain of *segments*. A segment begins with roles started on declared state and ends when the work
does, or at a scheduled checkpoint: every worker stops at its next step boundary, what is under way arrives,
and the state of all is taken. The next segment starts from that state, whether it is still in memory or was
read from the disk. So a run that was killed and resumed is, bit for bit, the run that was not.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dure.codec.cost import cost_of
from dure.core.deployment import WORKER, NodeId, WhenLost
from dure.core.node import Suspend, Task
from dure.errors import DureError, PeerLost, Quarantined
from dure.job.evaluation import Evaluator
from dure.job.gradients import GradientEngine
from dure.run.checkpoint import Part, fitting
from dure.run.gathering import Gathering
from dure.run.outcome import Outcome, Totals
from dure.run.strategy import codec_name
from dure.run.work_through import work_through
from dure.runtime.virtual.network import Network
from dure.runtime.virtual.runtime import VirtualNode, VirtualRuntime
from dure.topology.parameter_server.fused import serve_clock
from dure.topology.shared_memory.segment import SharedShard

if TYPE_CHECKING:
    from dure.job.gradient import Gradient
    from dure.run.setup import Setup
    from dure.runtime.virtual.cluster import Cluster, Event
    from dure.runtime.virtual.compute import Durations
    from dure.sync.worker import Boundary, Worker
    from dure.topology.hybrid.rows import RowShard
    from dure.topology.parameter_server.batch.coordinator import Coordinator
    from dure.topology.parameter_server.clock import ClockService
    from dure.topology.parameter_server.shard import Shard

OnStep = Callable[["Worker", "Gradient"], None]
OnWorker = Callable[["Worker"], None]

State = dict[str, Part]
Row = dict[str, Any]

WEIGHTS_STREAM = 2
"""Sets the random weights of messages apart from other streams made from the same seed."""

COLLECT_EVERY = 50_000
"""Objects made, net of those gone, between two looks of the collector of cycles during a run."""

OBJECTS_PER_WORKER = 200
"""... and at least this many for each worker: so many are alive at once where all workers have calls under way."""


@dataclass(slots=True)
class Callbacks:
    """What the run reports while it goes on."""

    row: Callable[[Row], None] = lambda row: None
    progress: Callable[[int, int, float, int], None] = lambda step, steps, loss, samples: None
    evaluating: Callable[[], AbstractContextManager[None]] = nullcontext
    checkpoint: Callable[[int, State], None] = lambda step, state: None
    rewind: Callable[[int], None] = lambda rows: None
    notice: Callable[[str], None] = lambda text: None


@contextmanager
def collecting_rarely(workers: int) -> Iterator[None]:
    """The collector of cycles looks seldom, and at nothing from before: a run makes few cycles and many objects.

    Otherwise it costs a third of a timing-only run of 1,000 or more workers. The cycles that nodes and services are to
    each other hold the job's data: they are collected at the end, as nobody would do it for long.
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
    """Train `setup` on `cluster`.

    Raises `DeadlockError`, `DivergedError`, and whatever a role raises.
    """

    def __init__(self, setup: Setup, cluster: Cluster, watch: Callbacks) -> None:
        self.setup = setup
        self.cluster = cluster
        self.watch = watch
        config = setup.config
        self.gradient_engine = None if config.timing_only else GradientEngine(setup.job, exact=config.exact)
        if self.gradient_engine is not None:
            setup.configure(self.gradient_engine)
        self.evaluator = None if config.timing_only else Evaluator(setup.job, config.eval_samples)
        self.history: list[Row] = []
        self.spans: list[Any] = []

    def run(self, state: State | None = None) -> Outcome:
        """From the start, or from the `state` of a checkpoint, to the end of the work."""
        with collecting_rarely(self.setup.workers):
            return self._run(state)

    def _run(self, state: State | None) -> Outcome:
        segment = Segment(self, None) if state is None else self._resume(state)
        while True:
            state = segment.run()
            if state is None:
                return segment.outcome()
            self.watch.checkpoint(segment.checkpoint_step, state)
            segment = Segment(self, state)

    def _resume(self, state: State) -> Segment:
        with fitting("run"):
            self.history = [dict(row) for row in state["run"].plain["history"]]
            return Segment(self, state)


class Segment:
    """One stretch of a virtual run, between two checkpoints."""

    def __init__(self, run: VirtualRun, state: State | None) -> None:
        self.whole = run
        self.setup = setup = run.setup
        self.resumed = state is not None
        plain = state["run"].plain if state is not None else {}
        self.totals = Totals.restored(plain["totals"]) if plain else Totals()
        self.crashed: set[int] = set(plain.get("crashed", ()))
        self.joined: set[int] = set(plain.get("joined", ()))
        self.finished: set[int] = set(plain.get("finished", ()))
        self.deaths: dict[str, str] = dict(plain.get("deaths", ()))
        self.refused = plain.get("refused", 0)  # gradients that held NaN or infinity, of workers that are through
        self.done = plain.get("done", 0)
        self.at: dict[int, int] = dict(plain.get("at", ()))  # of each worker, the step boundary that it has last passed
        self.passed = plain.get("passed", 0)
        self.away: set[int] = set(plain.get("away", ()))
        self.retired_updates: dict[int, int] = dict(plain.get("retired_updates", ()))
        self.gathering = Gathering(setup.merge_buffers)
        self.started = self.totals.seconds
        every = setup.config.checkpoint_every
        self.checkpoint_step = plain.get("checkpoint", 0) + every if every else 0
        self.suspending = False
        self.last_end = self.last_crash = self.started
        self.workers: dict[int, Worker] = {}
        self.retired = {} if state is None else {r: state[f"retired-{r}"] for r in plain["retired"]}
        self.first = setup.workers  # the lowest rank among them
        self.steps = [0] * setup.workers
        self.row_every = setup.eval_every * setup.workers
        self.roles: dict[int, Task[None]] = {}
        self.durations: dict[int, Durations] = {}
        self.runtime = self._runtime()
        self.shards: list[Shard | SharedShard] = []
        self.row_shards: list[RowShard] = []
        self.clock: ClockService | None = None
        self.coordinator: Coordinator | None = None
        try:
            self._build(state)
        except DureError:
            self.runtime.kernel.end()
            raise
        self._schedule_events()

    # ---- building

    def _runtime(self) -> VirtualRuntime:
        setup, run = self.setup, self.whole
        hosts = run.cluster.placed(setup.deployment.machines())
        weights = np.random.default_rng((setup.config.seeded, self.checkpoint_step, WEIGHTS_STREAM))
        return VirtualRuntime(
            run.cluster,
            lambda kernel: Network(run.cluster, kernel, hosts, weights),
            run.gradient_engine,
            seed=setup.config.seeded,
            start=self.started,
            trace=setup.config.trace,
            codec=cost_of(codec_name(setup.strategy.codec), run.cluster.codecs),
            slices=setup.topology.slices,
        )

    def _build(self, state: State | None) -> None:
        setup = self.setup
        for number in range(setup.topology.servers):
            self._build_server(number, state)
        if setup.topology.clocked:
            self.clock = setup.clock(self.runtime.nodes["server 0"])
            self.clock.on_evicted = self._evicted
            if state is not None:
                with fitting("clock"):
                    self.clock.restore(state["clock"].plain)
            serve_clock(self.runtime.nodes["server 0"], self.clock, self.shards[0])
        self.coordinator = setup.coordinator(self.clock) if self.clock is not None else None
        if self.coordinator is not None:
            if state is not None:
                with fitting("coordinator"):
                    self.coordinator.restore(state["coordinator"].plain)
            self.runtime.nodes["server 0"].serve("coordinator", self.coordinator)
            leading = self.coordinator.lead(setup.sync.coordinate, self.started)
            self.runtime.nodes["server 0"].spawn(leading, "the coordinator")
        absent = self.whole.cluster.absent - self.joined
        for rank in range(setup.workers):
            self.runtime.node(f"worker {rank}", rank)
            self._draw_durations(rank)
        for rank in range(setup.workers):
            if rank not in self.crashed and rank not in self.finished and rank not in absent:
                self._start_worker(rank, state)
            else:
                self.runtime.nodes[f"worker {rank}"].alive = False

    def _build_server(self, number: int, state: State | None) -> None:
        node = self.runtime.node(f"server {number}", number)
        topology = self.setup.topology
        shard = topology.shard(node, number)
        (self.shards if topology.clocked else self.row_shards).append(shard)
        if state is not None:
            with fitting(f"shard-{number}"):
                shard.restore(state[f"shard-{number}"].tensors, state[f"shard-{number}"].plain)
        node.serve("shard", shard)

    def _draw_durations(self, rank: int) -> None:
        durations = self.whole.cluster.durations(rank, self.setup.config.seeded)
        self.durations[rank] = durations
        self.runtime.durations[f"worker {rank}"] = durations

    @cached_property
    def _boundary(self) -> Boundary:
        """When the work of each worker ends: one for all, as many alike would fill the caches."""
        boundary = self.setup.boundary()
        if self.checkpoint_step:
            boundary.suspend = self._suspend
        return boundary

    @cached_property
    def _callbacks(self) -> tuple[OnStep, OnWorker, OnWorker | None]:
        """What each worker calls after a step, after one in vain, and at a step boundary: one each for all."""
        graded = self.whole.evaluator is not None and not self.setup.coordinated
        return self._on_step, self._on_made, self._at_boundary if graded else None

    def _start_worker(self, rank: int, state: State | None, *, newcomer: bool = False) -> None:
        node = self.runtime.nodes[f"worker {rank}"]
        worker = self.setup.worker(node, rank, node.meter)
        self.setup.topology.attach(worker, self.shards)
        worker.boundary = self._boundary
        worker.on_step, worker.on_abort, worker.on_boundary = self._callbacks
        known = state is not None and f"worker-{rank}" in state
        if known:
            assert state is not None
            part = state[f"worker-{rank}"]
            buffers = worker.buffers
            with fitting(f"worker-{rank}"):
                worker.restore(part.tensors, part.plain)
                self.durations[rank].skip(part.plain["drawn"])
            if self.setup.config.timing_only:
                worker.buffers = buffers  # of which no checkpoint has more than that they are there
        if not newcomer:
            self.at.setdefault(rank, 0)
        self.workers[rank] = worker
        self.first = min(self.first, rank)
        role = node.spawn(self._role(worker, join=not known, newcomer=newcomer), f"worker {rank}")
        role.when_done(lambda: self._ended(rank))
        self.roles[rank] = role

    # ---- what a worker does

    async def _role(self, worker: Worker, *, join: bool, newcomer: bool) -> None:
        if join:
            await worker.join(newcomer=newcomer, period=self.setup.period)
        await work_through(self.setup.sync, worker, self.setup.period)
        await worker.leave()

    def _ended(self, rank: int) -> None:
        role = self.roles[rank]
        try:
            role.result()
        except Suspend:
            return
        except PeerLost as error:
            raise DureError(f"worker {rank} cannot go on: {error}") from error
        except Quarantined as error:
            self._quarantine(rank, error)
            return
        self.refused += self.workers[rank].refused
        self.finished.add(rank)
        self.at[rank] = self.workers[rank].clock
        self.last_end = self.runtime.kernel.now

    def _quarantine(self, rank: int, error: Quarantined) -> None:
        """Go on without a worker whose gradients hold NaN, as after a crash; where all are needed, end the run."""
        if self.setup.deployment[f"worker {rank}"].when_lost is not WhenLost.GO_ON:
            raise error
        self.deaths[f"worker {rank}"] = str(error).rstrip(".")
        self.refused += self.workers[rank].refused
        self._crash(rank)

    def _crash(self, rank: int) -> None:
        self.crashed.add(rank)
        self.last_crash = self.runtime.kernel.now
        self.totals.failures_survived += 1
        self.runtime.lose(self.runtime.nodes[f"worker {rank}"])
        self._without(rank)

    def _on_step(self, worker: Worker, gradient: Gradient) -> None:
        setup = self.setup
        self.totals.counts["samples"] += worker.source.batch_size
        self._on_made(worker)
        if worker.rank == self.first:
            self.whole.watch.progress(worker.clock, setup.steps, gradient.loss, self.totals.counts["samples"])

    def _on_made(self, worker: Worker) -> None:
        """A step has been made, or begun in vain."""
        self.done += 1
        self.steps[worker.rank] += 1
        self.totals.steps = max(self.totals.steps, worker.clock)
        if self.setup.coordinated:  # the coordinator hands out the work: there are no step boundaries
            self.at[worker.rank] = worker.clock
            self._count_passed()

    def _suspend(self, worker: Worker) -> bool:
        """Whether a checkpoint is due for `worker`, at its step boundary."""
        due = worker.clock >= self.checkpoint_step and worker.clock < self.setup.steps
        if self.setup.lockstep:
            return due
        if due and not self.suspending:
            self.suspending = True
            for rank, other in self.workers.items():
                if other.asking and rank not in self.finished:
                    self.runtime.kernel.soon(lambda r=rank: self._interrupt(r))  # type: ignore[misc]
        return self.suspending

    def _interrupt(self, rank: int) -> None:
        if self.workers[rank].asking:
            self.roles[rank].throw(Suspend())

    # ---- events

    def _schedule_events(self) -> None:
        """What happens from now on; all that was due when the segment before ended has happened."""
        for event in sorted(self.whole.cluster.events, key=lambda event: event.at):
            if event.at <= self.started and self.resumed:
                self._apply_past(event)
            else:
                self.runtime.kernel.external_event(event.at, lambda e=event: self._happen(e))  # type: ignore[misc]

    def _apply_past(self, event: Event) -> None:
        """Bring what an event of an earlier segment still does into this one."""
        node = self.runtime.nodes[f"worker {event.worker}"]
        if event.kind == "slow":
            self._begin_slow(node, event)
        elif event.kind == "pause" and event.until > self.started:
            node.pause(event.until - self.started)
        elif event.kind == "join":
            node.paused_until = 0.0

    def _begin_slow(self, node: VirtualNode, event: Event) -> None:
        self._slow_down(node)
        if self.runtime.kernel.now < event.until < math.inf:
            self.runtime.kernel.external_event(event.until, lambda: self._slow_down(node))

    def _slow_down(self, node: VirtualNode) -> None:
        """As the cluster has it now: what began before, or in another segment, counts as what begins or ends."""
        factor = self.whole.cluster.slowness(node.rank, self.runtime.kernel.now)
        if factor != node.slowness:
            node.slow_down(factor)

    def _happen(self, event: Event) -> None:
        rank, runtime = event.worker, self.runtime
        node = runtime.nodes[f"worker {rank}"]
        if event.kind == "join":
            self.joined.add(rank)
            self.crashed.discard(rank)
            runtime.network.restore(node.name)
            node.revive()
            self._start_worker(rank, None, newcomer=True)
            return
        if rank in self.finished or rank in self.crashed or rank not in self.workers:
            return
        if event.kind == "crash":
            self._crash(rank)
        elif event.kind == "pause":
            assert event.duration is not None
            node.pause(event.duration)
        elif event.kind == "slow":
            self._begin_slow(node, event)

    def _evicted(self, worker: int) -> None:
        self.totals.failures_survived += 1
        self.away.add(worker)
        self._grade_means()

    def _without(self, rank: int) -> None:
        """Leave a crashed worker out of `_slowest`, and grade the means that waited for it."""
        self.at.pop(rank, None)
        self.away.discard(rank)
        self._grade_means()

    # ---- running

    def run(self) -> State | None:
        """To the end of the work (None), or to the next checkpoint (its state)."""
        kernel = self.runtime.kernel
        kernel.run()
        while self.roles.keys() <= self.crashed and not self.finished and kernel.next_external_event():
            kernel.run()
        if self.roles.keys() <= self.crashed and not self.finished:
            raise DureError(f"all workers have crashed by {self.last_crash:g} virtual seconds, and nobody joins.")
        kernel.check_deadlock([role for rank, role in self.roles.items() if rank not in self.crashed])
        suspended = [r for r in self.roles if r not in self.finished and r not in self.crashed]
        self._collect(kernel.now if suspended else self.last_end)
        if suspended:
            return self._state()
        self._row_of_now(final=True)
        return None

    # ---- rows of the history

    def _at_boundary(self, worker: Worker) -> None:
        """Called when a worker begins its next step; a boundary at which a checkpoint is taken counts once."""
        rank, clock = worker.rank, worker.clock
        before = self.at.get(rank)
        self.at[rank] = clock
        self.away.discard(rank)
        if before is None or clock <= before:
            return
        if not self.setup.synchronous:
            self._count_passed()
            return
        due = clock % self.setup.eval_every == 0 and clock > self._last_row
        if self.row_shards:
            if due and self._slowest() == clock:
                self._row_of_now()  # the last worker is here: servers have applied this step, and no later gradient
        elif due and worker.buffers is None and self.setup.is_common(worker, clock):
            updates = self._updates() if self.shards else self.setup.gradients_in_common(worker)
            self._row(self.setup.shown(worker), None, clock, updates)
        else:
            if due:
                self._gather(worker)
            self._grade_means()

    @property
    def _last_row(self) -> int:
        return self.whole.history[-1]["step"] if self.whole.history else 0

    def _slowest(self) -> int:
        """The step that every worker has made; crashed and evicted workers are left out."""
        return min((clock for rank, clock in self.at.items() if rank not in self.away), default=self._last_row)

    def _count_passed(self) -> None:
        """Of methods without common steps: a row after every so many steps of all workers together."""
        self.passed += 1
        if self.passed % self.row_every == 0:
            self._row_of_now()

    def _gather(self, worker: Worker) -> None:
        """Add a worker's model after this step to the mean that is graded."""
        setup = self.setup
        updates = worker.clock - worker.given if self.shards else setup.gradients_in(worker)
        self.gathering.add(
            worker.clock,
            worker.rank,
            setup.shown(worker),
            updates=updates,
            weight=setup.weight(worker.rank),
            buffers=worker.buffers,
        )

    def _grade_means(self) -> None:
        """Grade the means of all steps that every worker has made."""
        if self.gathering:
            for found in self.gathering.complete(self._slowest()):
                at_servers = self._updates() if self.shards else 0
                self._row(found.values, found.buffers, found.step, at_servers + found.updates)

    def _updates(self) -> int:
        """How many gradients are in `delivered`."""
        if self.shards:
            return min(shard.gradients for shard in self.shards)
        living = (worker for rank, worker in self.workers.items() if rank not in self.crashed)
        return sum(map(self.setup.gradients_in, living)) + sum(self.retired_updates.values())

    def _row_of_now(self, *, final: bool = False) -> None:
        if self.whole.evaluator is not None:
            self._row(self.delivered(), self._buffers(), self._slowest(), self._updates(), final=final)

    def _row(
        self, values: torch.Tensor, buffers: torch.Tensor | None, step: int, updates: int, *, final: bool = False
    ) -> None:
        evaluator = self.whole.evaluator
        assert evaluator is not None
        with self.whole.watch.evaluating():
            grade = evaluator.grade(values, buffers)
        row = {
            "seconds": self.totals.seconds if final else self.runtime.kernel.now,
            "step": max(step, self._last_row),  # also where a newcomer has just begun
            "updates": updates,
            "samples": self.totals.counts["samples"],
            "loss": grade.loss,
            "accuracy": grade.accuracy,
            "bytes": self.totals.counts["bytes_sent"] + (0 if final else self._bytes_sent()),
            **self._consensus(),
        }
        self.whole.history.append(row)
        self.whole.watch.row(row)

    def delivered(self) -> torch.Tensor:
        """The parameters that the method delivers, as they are now."""
        if self.shards:
            values = self.setup.replica.params.detach().clone()
            for shard, ranges in zip(self.shards, self.setup.topology.ranges, strict=True):
                position = 0
                for start, stop in ranges:
                    values[start:stop] = shard.values[position : position + stop - start]
                    position += stop - start
            return values
        models = [tensors["params"] for tensors in self._models()]
        values = torch.stack(models).mean(dim=0) if self.setup.traits.delivers == "mean" else models[0]
        if self.row_shards:
            values = values.clone()
            for rows in self.row_shards:
                rows.part.put_into(values, rows.values)
        return values

    def _consensus(self) -> dict[str, float]:
        """Of gossip: how far the workers' models are from their mean, the root of the mean of squares."""
        if self.setup.topology.graph is None:
            return {}
        models = torch.stack([tensors["params"] for tensors in self._models()])
        apart = models - models.mean(dim=0)
        return {"consensus": math.sqrt(float(apart.square().sum(dtype=torch.float64)) / len(models))}

    def _models(self) -> list[dict[str, torch.Tensor]]:
        """What each worker delivers, in rank order, those apart that have crashed."""
        models = {rank: dict(part.tensors) for rank, part in self.retired.items()}
        for rank, worker in self.workers.items():
            if rank not in self.crashed:
                models[rank] = {"params": worker.delivering(self.setup.traits.delivers)}
                if worker.buffers is not None:
                    models[rank]["buffers"] = worker.buffers
        return [models[rank] for rank in sorted(models)]

    def _buffers(self) -> torch.Tensor | None:
        found = [tensors["buffers"] for tensors in self._models() if "buffers" in tensors]
        return self.setup.merge_buffers(found) if found else None

    def _bytes_sent(self) -> int:
        return sum(node.payload_sent for name, node in self.runtime.nodes.items() if NodeId.of(name).kind == WORKER)

    def _collect(self, now: float) -> None:
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
                for key, amount in amounts.items():
                    totals.counts[key] += amount
            if node.meter.spans is not None:
                self.whole.spans.extend(node.meter.spans)
        if not self.shards:
            totals.counts["updates_applied"] = self.done

    def _state(self) -> State:
        living = {r: w for r, w in self.workers.items() if r not in self.crashed and r not in self.finished}
        retired = self._retired()
        run = {
            "totals": self.totals.state(),
            "crashed": sorted(self.crashed),
            "joined": sorted(self.joined),
            "finished": sorted(self.finished),
            "retired": sorted(retired),
            "done": self.done,
            "deaths": sorted(self.deaths.items()),
            "refused": self.refused,
            "at": sorted(self.at.items()),
            "passed": self.passed,
            "away": sorted(self.away),
            "retired_updates": sorted(self._retired_updates().items()),
            "checkpoint": self.checkpoint_step,
            "history": self.whole.history,
            "origin": self.setup.origin,
        }
        state: State = {"run": Part({}, run)} | {f"retired-{rank}": part for rank, part in retired.items()}
        for rank, worker in living.items():
            tensors, plain = worker.state()
            plain["drawn"] = self.durations[rank].drawn
            state[f"worker-{rank}"] = Part({k: v.clone() for k, v in tensors.items()}, plain)
        for number, shard in enumerate([*self.shards, *self.row_shards]):
            tensors, plain = shard.state()
            state[f"shard-{number}"] = Part(tensors, plain)
        if self.clock is not None:
            state["clock"] = Part({}, self.clock.state())
        if self.coordinator is not None:
            state["coordinator"] = Part({}, self.coordinator.state())
        return state

    def _retired(self) -> dict[int, Part]:
        """The models of those who are through, where they are part of what is delivered."""
        if self.shards or self.setup.config.timing_only:
            return {}
        retired = dict(self.retired)
        for rank in self.finished & self.workers.keys():
            worker = self.workers[rank]
            tensors = {"params": worker.params} if worker.buffers is None else worker.state()[0]
            retired[rank] = Part({name: tensors[name].clone() for name in ("params", "buffers") if name in tensors}, {})
        return retired

    def _retired_updates(self) -> dict[int, int]:
        """Number of gradients in the models of finished workers, where these models are part of the result."""
        if self.shards:
            return {}
        through = self.finished & self.workers.keys()
        return self.retired_updates | {rank: self.setup.gradients_in(self.workers[rank]) for rank in through}

    def outcome(self) -> Outcome:
        """How the run ended."""
        setup, totals = self.setup, self.totals
        for number, shard in enumerate([*self.shards, *self.row_shards]):
            totals.count("per_shard", f"server {number}", applied=shard.applied, refused=shard.refused)
            if isinstance(shard, SharedShard):
                totals.count("per_shard", f"server {number}", written=shard.segment.written)
        totals.counts["updates_refused"] = 0
        if self.shards:
            totals.count_updates([(shard.staleness, shard.applied, shard.refused) for shard in self.shards])
            totals.counts["updates_refused"] += self.clock.refused if self.clock is not None else 0
        else:
            totals.counts["updates_applied"] -= self.refused
            totals.staleness.histogram[0] = totals.counts["updates_applied"]
        totals.counts["updates_refused"] += self.refused
        notes: dict[str, Any] = {"events": totals.events, "deaths": self.deaths, "unfinished": self.deaths}
        if self.whole.gradient_engine is not None:
            notes["batching"] = self.whole.gradient_engine.rule
        notes |= setup.topology.notes()
        params = None if setup.config.timing_only else self.delivered()
        return Outcome(totals, self.whole.history, params, self.whole.spans, notes)
