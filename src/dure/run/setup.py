"""The set-up of one run: resolved values, from which both runtimes build workers, servers and companions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dure.codec.cost import SizeOnly, bytes_per_value, random_slices, slices_of
from dure.codec.fp32 import Float32
from dure.core.deployment import SERVER, WORKER, Deployment, NodeSpec, WhenLost
from dure.core.shards import Shards
from dure.errors import UsageError
from dure.job.companions import RunShape
from dure.job.data.split import IID, Batches
from dure.job.initial_model import InitialModel, is_on_meta
from dure.job.overlap import cut
from dure.partition.blockwise import blockwise
from dure.partition.cut import ANY, Speeds
from dure.partition.mesh import parts_of, pipeline_of, shared_of, zero_of
from dure.partition.methods.zero import Zero, shard_group_size
from dure.run.devices import CPU
from dure.run.places import is_real, is_started_outside
from dure.run.server_side import ServerSide
from dure.run.stages import StagedTopology, Stages
from dure.run.worker_data import Delivery, WorkerData
from dure.runtime.memory import MappedMemory
from dure.sync.base import Periodic, Traits, server_rule_of, traits_of
from dure.sync.worker_state import Boundary
from dure.topology.base import MethodNeeds, RunPlan, Topology, deployed
from dure.topology.parameter_server.client import ServerClient
from dure.topology.parameter_server.topology import ServerLayout

if TYPE_CHECKING:
    import torch

    from dure.codec.base import Codec
    from dure.core.node import Node
    from dure.job.companions import Companions, Figures
    from dure.job.gradient_engine import GradientEngine
    from dure.job.job import Job
    from dure.job.replica import Replica
    from dure.run.config import TrainConfig
    from dure.run.strategy import Strategy
    from dure.sync.worker_state import WorkerState


def with_companions(deployment: Deployment, companions: Companions, workers: int) -> Deployment:
    """Put companions between workers and servers.

    A worker that the others need goes back to the last checkpoint with all nodes, since a run of one worker would end
    with it otherwise.
    """
    learners = [_rolled_back(node) for node in deployment.nodes if node.id.kind == WORKER]
    others = [node for node in deployment.nodes if node.id.kind != WORKER]
    return Deployment((*learners, *companions.nodes(workers), *others))


def _rolled_back(node: NodeSpec) -> NodeSpec:
    return replace(node, when_lost=WhenLost.ROLL_BACK) if node.when_lost is WhenLost.END else node


def companions_of(deployment: Deployment) -> list[NodeSpec]:
    """The nodes that are neither workers nor servers."""
    return [node for node in deployment.nodes if node.id.kind not in (WORKER, SERVER)]


def own_machines(deployment: Deployment) -> list[str]:
    """The names of companions on machines of their own."""
    return [str(node.id) for node in companions_of(deployment) if node.beside is None]


BY_ENGINE = frozenset({"engine"})
"""The algorithm of collectives that is the engine's on CPUs."""


@dataclass(frozen=True)
class Setup:
    """A job under a strategy, for `workers` ranks on `machines`, of which the `absent` ones join later.

    `batch_sizes` holds the mini-batch size of each worker. `steps` are mini-batches per worker, `eval_every` the
    mini-batches between evaluations. `devices` holds the device of each worker's replica, all on the CPU if empty;
    `device` is that of the replicas in this process. `speeds` of a virtual cluster: for the cuts of a
    pipeline. `reduced_by_engine`: the algorithms of collectives that are the engine's.
    """

    config: TrainConfig
    job: Job
    strategy: Strategy
    workers: int
    machines: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    steps: int
    eval_every: int
    absent: frozenset[int] = frozenset()
    devices: tuple[str, ...] = ()
    device: str = CPU
    speeds: Speeds = ANY
    reduced_by_engine: frozenset[str] = BY_ENGINE

    # ---- the method

    @property
    def sync(self) -> Any:
        """The method."""
        return self.strategy.sync

    @cached_property
    def traits(self) -> Traits:
        """The traits of the method."""
        return traits_of(self.sync)

    @property
    def period(self) -> int:
        """A worker's mini-batches between two places where all workers meet: one tick of the servers' clock.

        A method whose rounds differ in length says itself where they begin (`WorkerState.last_sync`, `Stats`).
        """
        return self.sync.period if isinstance(self.sync, Periodic) else 1

    @property
    def coordinated(self) -> bool:
        """Whether a coordinator leads the method and hands out its work."""
        return self.traits.coordinated

    @property
    def lockstep(self) -> bool:
        """Whether all workers are at the same clock at a checkpoint.

        Over collectives they always are. The stages of a pipeline are, since a pipeline is drained for a checkpoint.
        """
        return self.stages is not None or self.topology.needs_everybody or self.traits.lockstep

    @property
    def synchronous(self) -> bool:
        """Whether the graded model at step t holds every worker's gradients 1..t and none later.

        All workers then are at the same clock where they meet, and discarded gradients count as steps.
        """
        return (self.topology.needs_everybody or self.traits.lockstep) and not self.coordinated

    @property
    def codec(self) -> Codec | None:
        """The codec of updates; None where they travel as they are."""
        codec = self.strategy.codec
        if isinstance(codec, Float32):
            return None
        return self._size_only if self.config.timing_only else codec

    @cached_property
    def _size_only(self) -> Codec:
        """The codec of a timing-only run."""
        codec, known = self.strategy.codec, self.model.code_rates
        # A change of the model is about as many steps of the job's rate as a period has.
        scale = self.job.optimizer.lr * self.period if self.traits.messages.changes else 1.0
        key = str(codec), scale
        if key not in known:
            slices = random_slices() if is_on_meta(self.job) else slices_of(self.job)
            known[key] = bytes_per_value(codec, slices, scale)
        return SizeOnly(codec, known[key])

    # ---- the stages of a pipeline

    @cached_property
    def stages(self) -> Stages | None:
        """The stages of the run; None where every worker has the whole model."""
        partition, config = self.strategy.partition, self.config
        pipeline, shared = pipeline_of(partition), shared_of(partition)
        if self.zero is not None and self.zero.stage == 3:
            pipeline = blockwise(self.job, self.replica, shared)
        if pipeline is None:
            return None
        return Stages(
            job=self.job,
            pipeline=pipeline,
            shared=shared,
            whole=self.model,
            data=self.data,
            workers=self.workers,
            batch_sizes=self.batch_sizes,
            seed=config.seeded,
            timing_only=config.timing_only,
            virtual=config.virtual,
            device=self.device,
            speeds=self.speeds,
            of=lambda rank: self._of_rank[rank],
            shard_ranks=1 if self.zero is None else shard_group_size(self.zero, self.machines[:: parts_of(partition)]),
        )

    @cached_property
    def _of_rank(self) -> list[Setup]:
        """The set-up of each rank of the pipelines: its workers are those of one rank, and their model is a part."""
        assert self.stages is not None
        return [self._of_stage(self.stages, rank) for rank in range(self.parts)]

    def _of_stage(self, stages: Stages, rank: int) -> Setup:
        own = replace(self, workers=self.workers // self.parts, machines=self.machines[rank :: self.parts])
        own.__dict__.update(model=stages.model(rank), data=self.data, stages=None)
        if self.zero is not None and stages.sharded:
            own.__dict__["shards"] = stages.shards(rank, shard_group_size(self.zero, own.machines))
        return own

    @property
    def parts(self) -> int:
        """The number of workers that hold one copy of the model together."""
        return 1 if self.stages is None else self.stages.count

    def of_worker(self, number: int) -> Setup:
        """The set-up of worker `number`: in a pipeline, that of its stage."""
        return self if self.stages is None else self._of_rank[number % self.parts]

    def place_of_server(self, number: int) -> int:
        """The rank in the pipelines whose workers use server `number`; 0 without a pipeline."""
        return number * self.parts // self.topology.servers

    def of_server(self, number: int) -> Setup:
        """The set-up of server `number`: in a pipeline, that of its stage."""
        return self if self.stages is None else self._of_rank[self.place_of_server(number)]

    @property
    def variables(self) -> dict[str, list[int]]:
        """The elements of each variable at each server, by name (`Topology.variables`)."""
        servers = self.deployment.names(SERVER)
        each = len(servers) // self.parts
        return {name: self.of_server(i).topology.variables(i % each) for i, name in enumerate(servers)}

    @property
    def clocks(self) -> list[str]:
        """The servers with a clock: the first; in a pipeline, the first of each stage."""
        servers = self.deployment.names(SERVER)
        return servers[:: len(servers) // self.parts] if servers else []

    def reports(self, number: int) -> bool:
        """Whether worker `number` knows the loss of its mini-batches, and counts their samples."""
        return self.stages is None or self.stages.reports(number)

    def has_common_model(self, worker: WorkerState) -> bool:
        """Whether a worker of a synchronous method has, at a step boundary, the model that all others have there."""
        common = self.stages is None and worker.buffers is None  # each worker's buffers are its own
        return common and self.delivery.is_common(worker, worker.clock)

    def replica_of(self, number: int) -> int:
        """The number of the copy of the model that worker `number` holds, or holds a stage of."""
        return number // self.parts

    # ---- shards

    @cached_property
    def zero(self) -> Zero | None:
        """The sharding of what the workers of the same part would hold alike, if there is any."""
        return zero_of(self.strategy.partition)

    @cached_property
    def shards(self) -> Shards | None:
        """The shards of the model, or of one part of it; None where a worker holds it whole."""
        if self.zero is None:
            return None
        if self.stages is not None:
            return self.of_worker(0).shards
        units = [[each] for each in reversed(cut(self.replica))]
        return Shards(units, shard_group_size(self.zero, self.machines), frees_gradients=self.zero.stage == 2)

    @property
    def keeps_shards(self) -> bool:
        """Whether a worker has the parameters of its shard alone."""
        return self.zero is not None and self.zero.stage == 3

    def shard_of(self, number: int) -> int:
        """The number of the shard of the parameters of its part that worker `number` has; 0 where it has all."""
        return 0 if not self.keeps_shards or self.shards is None else number // self.parts % self.shards.ranks

    def joined(self, models: Sequence[torch.Tensor]) -> torch.Tensor:
        """The parameters of the workers' part of the model, from those that they deliver, in rank order."""
        if not self.keeps_shards or self.shards is None:
            return self.topology.result((), models)
        whole = models[0].new_empty(self.replica.numel)
        return self.shards.join(models[: self.shards.ranks], whole)

    # ---- the nodes

    @cached_property
    def topology(self) -> Topology:
        """The strategy's topology in this run; in a pipeline, that of all stages together."""
        config, traits, side = self.config, self.traits, ServerSide(self.sync, self.workers, 0)
        needs = MethodNeeds(
            ordered=side.ordered,
            group=side.group,
            stale=traits.stale_gradients,
            coordinated=traits.coordinated,
            delivers=traits.delivers,
            vectors=traits.vectors,
            corrections=side.corrections,
            max_delay=side.max_delay,
            server_optimizer=side.optimizer,
            own_server_rule=side.own_rule,
        )
        plan = RunPlan(
            job=self.job,
            model=self.model,
            workers=self.workers,
            machines=self.machines,
            absent=self.absent,
            seed=config.seeded,
            timing_only=config.timing_only,
            virtual=config.virtual,
            reduced_by_engine=self.reduced_by_engine,
            codec=self.codec,
            method=needs,
            draw_samplers=self.data.draw_samplers,
            memory=MappedMemory,
            mapped_memory=MappedMemory.of,
        )
        if self.stages is not None:
            return StagedTopology(self.strategy.topology, plan, self.stages)
        return deployed(self.strategy.topology, plan)

    @property
    def re_forms(self) -> bool:
        """Whether workers form their group again without one that fails, and with one that joins.

        Tried with Gloo on one machine only. A codec keeps state for each rank, and a stage exists once in a pipeline.
        """
        strategy = self.topology.uses_engine and not self.topology.servers and self.codec is None
        whole = self.stages is None and self.job.companions is None and self.zero is None
        on_cpu = all(device == CPU for device in self.devices)
        started_here = is_real(self.config.on) and not is_started_outside(self.config.on)  # else an agent restarts all
        return strategy and whole and on_cpu and self.traits.regroups and started_here

    @property
    def lets_go(self) -> bool:
        """Whether a worker that is warned of preemption may leave at a step boundary, and the others go on.

        Under a coordinator workers have no such boundary.
        """
        workers = [self.deployment[name].when_lost for name in self.deployment.names(WORKER)]
        alike = self.job.companions is None and not self.coordinated and not is_started_outside(self.config.on)
        return alike and all(when_lost is WhenLost.GO_ON for when_lost in workers)

    @property
    def replaces(self) -> bool:
        """Whether workers that are killed are started again, where the others go on without them."""
        return self.config.replace and not is_started_outside(self.config.on)

    @cached_property
    def deployment(self) -> Deployment:
        """The nodes of this run: workers, companions, servers."""
        found = self.topology.deploy()
        if self.re_forms:
            return Deployment(tuple(replace(node, when_lost=WhenLost.RE_FORM) for node in found.nodes))
        if self.zero is not None:  # nobody else has the shard of a worker that is lost
            return Deployment(tuple(map(_rolled_back, found.nodes)))
        return found if self.job.companions is None else with_companions(found, self.job.companions, self.workers)

    @cached_property
    def machine_nodes(self) -> list[str]:
        """The nodes that events of a cluster name by number: workers, then companions on machines of their own."""
        names = self.deployment.names(WORKER)
        return names if self.job.companions is None else [*names, *own_machines(self.deployment)]

    def shape(self, start: int = 0) -> RunShape:
        """The values that the job's companions need; `start` is the step of the checkpoint that they start from."""
        job, config = self.job, self.config
        flops = job.flops_per_sample if config.virtual else 0.0
        return RunShape(job.build, flops, self.workers, self.batch_sizes[0], config.seeded, start, config.virtual)

    @cached_property
    def server_side(self) -> ServerSide:
        """The part of the method that the servers of this run carry out."""
        return ServerSide(self.sync, self.workers, self.topology.servers)

    @cached_property
    def _as_reached(self) -> ServerLayout:
        """The servers, one value for all their clients."""
        topology = self.topology
        return self.server_side.as_reached(
            topology.ranges,
            clocked=not topology.in_place,
            timing_only=self.config.timing_only,
            itemsize=self.replica.params.element_size(),
            codec=self.codec,
            layouts=topology.layouts,
        )

    def client(self, node: Node, rank: int) -> ServerClient:
        """The client through which worker `rank` (the driver: -1) reaches the shards and the clock."""
        return ServerClient(node, rank, self._as_reached)

    # ---- the model and the data

    @cached_property
    def model(self) -> InitialModel:
        """The model as the run starts with it."""
        return InitialModel(self.job, self.config.seeded, timing_only=self.config.timing_only, device=self.device)

    @property
    def replica(self) -> Replica:
        """A replica with the run's initial values."""
        return self.model.replica

    @cached_property
    def data(self) -> WorkerData:
        """The mini-batches of the workers. The method's own sampling replaces an i.i.d. split that no option names."""
        config = self.config
        by_method = config.split is None and isinstance(self.job.split, IID)
        split = self.traits.sampling if by_method else None
        leased = config.elastic is not None
        return WorkerData(self.job, self.batch_sizes, config.seeded, split, config.timing_only, config.virtual, leased)

    @cached_property
    def batches(self) -> Batches:
        """The batches that a coordinator hands out; a portion is a mini-batch of the job."""
        job, sync = self.job, self.sync
        return Batches(len(job.train), portion=job.batch_size, size=sync.batch, seed=self.config.seeded)

    @cached_property
    def delivery(self) -> Delivery:
        """The reader of models and counts from workers."""
        return Delivery(self.traits, self.period, self.batch_sizes, self.model)

    def boundary(self) -> Boundary:
        """The end of a worker's work."""
        waiting = not self.lockstep
        return Boundary(self.steps, self.config.seconds, waiting=waiting, period=self.period, alone=self.traits.alone)

    # ---- preparation

    def for_worker(self, rank: int) -> Setup:
        """This set-up in the process of worker `rank`, whose replica is on a device of its own."""
        device = self.devices[rank] if self.devices else CPU
        if device == self.device:
            return self
        own = replace(self, device=device)
        own.__dict__["data"] = self.data  # computed before the fork, and the same on every device
        return own

    def plain(self) -> dict[str, Any]:
        """The set-up of a real run as values that JSON has, for `resolve.rebuild` in another of its processes."""
        return {
            "config": self.config.plain(),
            "strategy": self.strategy.text(),
            "workers": self.workers,
            "machines": self.machines,
            "batch_sizes": self.batch_sizes,
            "steps": self.steps,
            "eval_every": self.eval_every,
            "devices": self.devices,
            "absent": sorted(self.absent),
        }

    def experience(
        self, figures: Mapping[str, Figures], rows: Sequence[Mapping[str, Any]], seconds: float
    ) -> Mapping[str, Any]:
        """The companions' part of the summary; empty for a job without companions."""
        companions = self.job.companions
        return {} if companions is None else {"experience": companions.summary(figures, rows, seconds)}

    @property
    def origin(self) -> dict[str, Any]:
        """The job, strategy and size that a checkpoint records of its run, for `checkpoint.check_origin`."""
        sizes = {"workers": self.workers, "parameters": self.replica.numel}
        return {"job": self.job.name, **self.strategy.text(), **sizes}

    def configure(self, engine: GradientEngine) -> None:
        """Have `engine` hand over gradients as method and topology need them."""
        engine.sparse = self.traits.sparse
        self.topology.configure(engine)

    def prepare(self) -> None:
        """Load and compute what all processes of a run share, before they are forked."""
        _ = self.replica, self.data.samplers
        self.topology.check()
        if self.stages is not None:
            self.stages.prepare()


def check_rates(setup: Setup) -> None:
    """Raise `UsageError` where a method cannot follow the job's parameter groups or schedule exactly."""
    rates, sync = setup.model.rates, setup.sync
    if not rates:
        return
    text, both = setup.strategy.text()["sync"], "parameter groups and schedules"
    if setup.coordinated:
        raise UsageError(f"{text} finds the length of its steps itself, so {both} mean nothing to it: leave them out.")
    if setup.traits.reasons.rates:
        raise UsageError(f"{text} has {setup.traits.reasons.rates}, which knows no {both}: leave it out.")
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
