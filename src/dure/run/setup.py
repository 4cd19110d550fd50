"""One run, resolved: everything that both runtimes build their workers and servers from."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any
from weakref import proxy

import torch

from dure.codec.coder import SliceLayout
from dure.codec.fp32 import Float32
from dure.core.deployment import SERVER, Deployment
from dure.core.meter import Meter
from dure.core.node import Address, Ghost, Node
from dure.core.ranges import Ranges
from dure.errors import UsageError
from dure.job.data.batches import Batches
from dure.job.data.split import IID
from dure.job.groups import Rates, rates_of
from dure.job.optimizer import FlatOptimizer, GroupRange, OptimizerSpec, restrict
from dure.job.replica import Replica
from dure.job.schedule import schedule_of
from dure.job.source import JobSource
from dure.run.strategy import Strategy
from dure.runtime.memory import MappedMemory
from dure.sync.base import Periodic, Traits, server_rule_of, servers_have_own_rule, traits_of
from dure.sync.remedied import compares, corrections, server_optimizer
from dure.sync.worker import Boundary, Worker
from dure.topology.base import Topology, deployed
from dure.topology.collective.session import GroupSession
from dure.topology.parameter_server.batch.client import PortionClient
from dure.topology.parameter_server.batch.coordinator import Coordinator, Limits
from dure.topology.parameter_server.batch.portions import Portions
from dure.topology.parameter_server.client import ServerClient
from dure.topology.parameter_server.clock import ClockService
from dure.topology.parameter_server.fused import clocked_at
from dure.topology.parameter_server.layout import ServerLayout
from dure.topology.parameter_server.progress import EVICT_SECONDS
from dure.topology.parameter_server.session import ServerSession

if TYPE_CHECKING:
    from dure.codec.base import Codec
    from dure.job.gradients import GradientEngine
    from dure.job.job import Job
    from dure.run.config import TrainConfig
    from dure.topology.correction import Correction


@dataclass(frozen=True)
class Setup:
    """A job under a strategy, for `workers` ranks, of which some may join later.

    `steps` are mini-batches per worker, `eval_every` those between evaluations, `absent` who is not there at first.
    """

    config: TrainConfig
    job: Job
    strategy: Strategy
    workers: int
    steps: int
    eval_every: int
    absent: frozenset[int] = frozenset()

    @property
    def period(self) -> int:
        """Mini-batches of a worker between two places where all are together, and that one tick of the servers' clock
        stands for. A method whose rounds differ in length says itself where they begin (`Worker.last_sync`, `Stats`).
        """
        return self.sync.period if isinstance(self.sync, Periodic) else 1

    @property
    def synchronous(self) -> bool:
        """Whether the graded model at step t holds every worker's gradients 1..t and none later.

        All workers then are at the same clock where they meet, and discarded gradients count as steps.
        """
        return self.lockstep and not self.coordinated

    def is_common(self, worker: Worker, done: int) -> bool:
        """Whether a worker of a synchronous method has, after `done` steps, the model that all others have then.

        Where models differ between two meetings, their mean is the method's model.
        """
        if self.traits.delivers != "mean":
            return True
        if worker.boundary.alone or self.traits.streams:
            return False
        return done % self.period == 0 if worker.last_sync is None else done == worker.last_sync

    def shown(self, worker: Worker) -> torch.Tensor:
        """The model of a worker of a synchronous method at a step boundary, as the run would deliver it there."""
        common = self.is_common(worker, worker.clock)
        traits = self.traits
        return worker.delivering((traits.agreed or traits.delivers) if common else traits.delivers)

    def gradients_in(self, worker: Worker) -> int:
        """How many of a worker's own gradients are in what it delivers without a server."""
        apart = self.traits.delivers in worker.kept  # from its parameters, and told of their gradients now and then
        return (worker.given if apart else worker.clock - worker.joined_at) - worker.refused

    def gradients_in_common(self, worker: Worker) -> int:
        """How many gradients are in the model that all workers have over collectives, where this worker stands now."""
        return self.workers * self.gradients_in(worker)

    def weight(self, rank: int) -> float:
        """Weight of a worker's model in the mean of all models: its batch size, where batch sizes differ."""
        return float(self.batch_sizes[rank]) if len(set(self.batch_sizes)) > 1 else 1.0

    @property
    def sync(self) -> Any:
        return self.strategy.sync

    @cached_property
    def traits(self) -> Traits:
        """The traits of the method."""
        return traits_of(self.sync)

    @cached_property
    def topology(self) -> Topology:
        """The strategy's topology in this run."""
        return deployed(self.strategy.topology, proxy(self))  # no circle: the data of a run go with its set-up

    @cached_property
    def deployment(self) -> Deployment:
        """The nodes of this run."""
        return self.topology.deploy()

    @property
    def origin(self) -> dict[str, Any]:
        """What a checkpoint says of the run that wrote it, for `checkpoint.check_origin`."""
        sizes = {"workers": self.workers, "parameters": self.replica.numel}
        return {"job": self.job.name, **self.strategy.text(), **sizes}

    @property
    def coordinated(self) -> bool:
        """Whether a coordinator leads the method and hands out its work."""
        return self.traits.coordinated

    @property
    def lockstep(self) -> bool:
        """Whether all workers are at the same clock at a step boundary: over collectives they always are."""
        return self.topology.needs_everybody or self.traits.lockstep

    @cached_property
    def batch_sizes(self) -> tuple[int, ...]:
        """Mini-batch size of each worker."""
        given = self.config.batch_sizes
        if given and len(given) != self.workers:
            raise UsageError(f"batch_sizes gives {len(given)} sizes for {self.workers} workers. Give one per worker.")
        return given or (self.job.batch_size,) * self.workers

    @cached_property
    def _whole_batch(self) -> int:
        return sum(self.batch_sizes)

    @cached_property
    def replica(self) -> Replica:
        """A replica with the run's initial values."""
        return Replica(self.job.build(self.config.seeded))

    @property
    def initial(self) -> Any:
        """Initial parameters, flat; a `Ghost` in a timing-only run."""
        return self._ghost if self.config.timing_only else self.replica.params.detach().clone()

    @cached_property
    def _ghost(self) -> Ghost:
        """What stands for the parameters in a timing-only run: nothing changes it, so one is enough for all workers."""
        return Ghost(self.replica.numel, self.replica.params.element_size())

    @property
    def _buffers(self) -> Any:
        """Initial buffers, flat, a `Ghost` in a timing-only run; None where training changes none."""
        buffers = self.replica.buffers_flat()
        if not buffers.numel():
            return None
        return Ghost(buffers.numel(), buffers.element_size()) if self.config.timing_only else buffers

    @cached_property
    def _samplers(self) -> list[Any]:
        return self.draw_samplers()

    def draw_samplers(self) -> list[Any]:
        """Every worker's, at its first batch."""
        job = self.job
        if self.config.split is None and isinstance(job.split, IID):
            job = replace(job, split=self.traits.sampling or job.split)
        return list(job.samplers(self.batch_sizes, seed=self.config.seeded))

    def source(self, rank: int) -> JobSource:
        """Where the gradients of worker `rank` come from, from its first batch on."""
        size = self.batch_sizes[rank]
        sampler = None if self.config.timing_only else copy(self._samplers[rank])
        share = size / self._whole_batch
        flops = self.job.flops_per_sample * size if self.config.virtual else 0.0  # only a model of time asks
        return JobSource(self.job, sampler, batch_size=size, share=share, seed=self.config.seeded, flops=flops)

    @cached_property
    def rates(self) -> Rates:
        """The job's optimizer with its parameter groups and schedule. Raises `UsageError` for groups without sense."""
        job, replica = self.job, self.replica
        return rates_of(job.optimizer, job.groups, schedule_of(job.schedule), replica.layers, replica.parameters)

    @cached_property
    def servers_have_own_rule(self) -> bool:
        """Whether the method's servers step by no rate of the job, as those of BMUF and EASGD."""
        return servers_have_own_rule(self.sync)

    def server_segments(self, ranges: Ranges) -> list[GroupRange]:
        """The parameter groups of a shard that holds `ranges`."""
        if self.servers_have_own_rule:
            return []
        rule = partial(server_optimizer, self.sync, workers=self.workers)
        return restrict(self.rates.seen_by(lambda spec: rule(optimizer=spec)), ranges)

    def merge_buffers(self, snapshots: Sequence[torch.Tensor]) -> torch.Tensor:
        """Buffers of all workers, in rank order, as one: means weighted by batch size, counts by their maximum."""
        if isinstance(snapshots[0], Ghost):
            return snapshots[0]
        weights = self.batch_sizes if len(snapshots) == self.workers else None
        return self.replica.merge_buffers(snapshots, weights)

    def boundary(self) -> Boundary:
        """When a worker's work ends."""
        waiting = not self.lockstep
        return Boundary(self.steps, self.config.seconds, waiting=waiting, period=self.period, alone=self.traits.alone)

    def worker(self, node: Node, rank: int, meter: Meter) -> Worker:
        """Worker `rank` on `node`, with its replica, its data and its server or group."""
        worker = Worker(
            node=node,
            rank=rank,
            world_size=self.workers,
            params=self.initial,
            optimizer=FlatOptimizer(
                self.job.optimizer, self.replica.numel, self.replica.dtype, segments=self.rates.segments
            ),
            rates=self.rates.at if self.rates else None,
            source=self.source(rank),
            meter=meter,
            boundary=self.boundary(),
            total_weight=float(self._whole_batch),
            buffers=self._buffers,
            merge_buffers=self.merge_buffers,
        )
        topology = self.topology
        group = topology.group(node, meter)
        if group is not None:
            worker.sessions.group = GroupSession(worker, group)
        if topology.clocked:
            server = self.client(node, rank)
            worker.sessions.server = ServerSession(worker, server)
            worker.pushes_rates = not self.servers_have_own_rule
            worker.sessions.work_queue = PortionClient(server, self.batches) if self.coordinated else None
        topology.connect(worker, group)
        return worker

    @property
    def codec(self) -> Codec | None:
        """How updates are encoded; None where they travel as they are."""
        codec = self.strategy.codec
        return None if isinstance(codec, Float32) else codec

    @cached_property
    def layouts(self) -> list[SliceLayout]:
        """Those of the shards' slices, where updates are encoded."""
        return (
            []
            if self.codec is None
            else [SliceLayout.of(self.replica.layers, ranges) for ranges in self.topology.ranges]
        )

    @cached_property
    def _shards(self) -> tuple[Address, ...]:
        return tuple(Address(name, "shard") for name in self.deployment.names(SERVER))

    @cached_property
    def _reached(self) -> ServerLayout:
        """The servers, as all their clients know them."""
        policy = server_rule_of(self.sync).policy
        return ServerLayout(
            self._shards,
            self.topology.ranges,
            clock=Address("server 0", "clock"),
            ordered=policy is not None and policy.ordered,
            may_refuse=policy is not None and policy.may_refuse,
            timing_only=self.config.timing_only,
            itemsize=self.replica.params.element_size(),
            look_back=compares(self.sync),
            codec=self.codec,
            layouts=self.layouts,
            clocked=None if self.topology.in_place else clocked_at(self._shards, policy),
        )

    def client(self, node: Node, rank: int) -> ServerClient:
        """What worker `rank` reaches the shards and the clock through."""
        return ServerClient(node, rank, self._reached)

    def configure(self, engine: GradientEngine) -> None:
        """Have `engine` hand over gradients as method and topology need them."""
        engine.sparse = self.traits.sparse
        self.topology.configure(engine)

    # ---- what the topology asks of the run

    @property
    def seed(self) -> int:
        return self.config.seeded

    @property
    def timing_only(self) -> bool:
        return self.config.timing_only

    @property
    def virtual(self) -> bool:
        return self.config.virtual

    @property
    def corrections(self) -> Sequence[Correction]:
        """What servers do to stale gradients."""
        return corrections(self.sync)

    @property
    def ordered(self) -> bool:
        """Whether the method asks its servers for an order of updates."""
        policy = server_rule_of(self.sync).policy if self.topology.servers else None
        return policy is not None and policy.ordered

    @property
    def vectors(self) -> Sequence[str]:
        """What the method keeps beside the model in shared memory."""
        return self.traits.vectors

    def shared_memory(self, nbytes: int) -> MappedMemory:
        """Memory that other processes of this machine can map."""
        return MappedMemory(nbytes)

    def mapped_memory(self, path: str) -> MappedMemory:
        """Memory that another process of this machine owns."""
        return MappedMemory.of(path)

    # ---- servers

    @property
    def server_optimizer(self) -> OptimizerSpec:
        """What the shards do with an aggregate. Raises `StrategyError` where a remedy and the optimizer do not suit."""
        return server_optimizer(self.sync, self.job.optimizer, self.workers)

    def clock(
        self, node: Node, *, absent: Collection[int] | None = None, evict_seconds: float = EVICT_SECONDS
    ) -> ClockService:
        """The clock service; without a policy it only knows who is there. `absent` replaces the set-up's."""
        present = [rank for rank in range(self.workers) if rank not in (self.absent if absent is None else absent)]
        rule = server_rule_of(self.sync)
        return ClockService(
            node, rule.policy, self._shards, workers=present, reduce=rule.reduce, evict_seconds=evict_seconds
        )

    @cached_property
    def batches(self) -> Batches:
        """What a coordinator hands out; a portion is a mini-batch of the job."""
        job, sync = self.job, self.sync
        return Batches(len(job.train), portion=job.batch_size, size=sync.batch, seed=self.config.seeded)

    def coordinator(self, clock: ClockService, evict_seconds: float = EVICT_SECONDS) -> Coordinator | None:
        """The coordinator beside `clock`, where the method is led by one."""
        if not self.coordinated:
            return None
        portions = Portions(self.workers, self.sync.push_every)
        limits = Limits(self.steps * self.workers, self.config.seconds or math.inf, evict_seconds)
        return Coordinator(clock, self.batches, portions, limits=limits, timing_only=self.config.timing_only)

    def prepare(self) -> None:
        """Load and compute what all processes of a run share, before they are forked."""
        _ = self.replica, self._samplers
        self.topology.check()


def check_rates(setup: Setup) -> None:
    """Raise `UsageError` where a method cannot follow the job's parameter groups or schedule exactly."""
    rates, sync = setup.rates, setup.sync
    if not rates:
        return
    text, both = setup.strategy.text()["sync"], "parameter groups and schedules"
    if setup.coordinated:
        raise UsageError(f"{text} finds the length of its steps itself, so {both} mean nothing to it: leave them out.")
    if setup.traits.own_rate:
        raise UsageError(f"{text} has a rate of its own at the workers, local_lr, which knows no {both}: leave it out.")
    if rates.schedule is None:
        return
    _ = [rates.at(step) for step in (0, setup.steps - 1)]
    rule = server_rule_of(sync)
    members = 1 if rule.quorum is None or setup.lockstep else rule.averaged(setup.workers)
    if members > 1:
        raise UsageError(
            f"a schedule is a function of a worker's step, and an update of {text} is the mean of {members} gradients "
            "of workers at different steps, so it has no one rate. Leave the schedule out, or use k-sync or ssp."
        )
