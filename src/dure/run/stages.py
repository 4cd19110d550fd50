"""The parts of a model in a run: the set-up of each part, its mini-batches, the model that a worker shows, the whole.

Worker `replica * P + part` of a run whose copies of the model have P workers holds part `part` of copy `replica`: the
stages of one worker of a pipeline, or with W ways of sharing layers (P = K * W) one of W parts of them. The workers of
one part, one in each copy, are a set of data-parallel workers of their own: they have a set-up in which the model is
their part of it, and the method and the topology of the strategy run among them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, Protocol

import torch

from dure.core.deployment import SERVER, WORKER, Deployment, NodeId, NodeSpec, WhenLost
from dure.core.node_view import Names, NodeView
from dure.core.vectors import equal_ranges
from dure.job.gradient import JobSource
from dure.job.initial_model import InitialModel
from dure.partition.layout import StageLayout
from dure.partition.messages import PortionBatches, StageBatches
from dure.partition.shared_stage import SharedStage
from dure.partition.source import StageSource
from dure.partition.stage import Stage
from dure.partition.stage_module import StageModule
from dure.topology.base import RunPlan, Topology

if TYPE_CHECKING:
    from dure.core.meter import Meter
    from dure.core.node import Node
    from dure.job.data.split import Batches, Split
    from dure.job.job import Job
    from dure.partition.cut import Speeds
    from dure.partition.pipeline import Pipeline
    from dure.partition.shared_layers import SharedLayers
    from dure.sync.base import Traits
    from dure.sync.worker_state import WorkerState


@dataclass(frozen=True)
class Delivery:
    """How a run reads models and counts from workers of a method with `traits` that meet every `period` steps."""

    traits: Traits
    period: int
    batch_sizes: tuple[int, ...]
    model: InitialModel

    def is_common(self, worker: WorkerState, done: int) -> bool:
        """Whether a worker of a synchronous method has, after `done` steps, the model that all others have then.

        Where models differ between two meetings, their mean is the method's model.
        """
        if self.traits.delivers != "mean":
            return True
        if worker.boundary.alone or self.traits.agreed is None:
            return False
        return done % self.period == 0 if worker.last_sync is None else done == worker.last_sync

    def shown(self, worker: WorkerState) -> torch.Tensor:
        """The model of a worker of a synchronous method at a step boundary, as the run would deliver it there."""
        common = self.is_common(worker, worker.clock)
        traits = self.traits
        return worker.delivering((traits.agreed or traits.delivers) if common else traits.delivers)

    def gradients_in(self, worker: WorkerState) -> int:
        """The number of a worker's own gradients in the model that it delivers without a server."""
        # A model kept apart from the worker's parameters is told of gradients now and then only.
        apart = self.traits.delivers in worker.kept
        return (worker.given if apart else worker.clock - worker.joined_at) - worker.refusals.total

    def gradients_of_part(self, worker: WorkerState) -> int:
        """The number of a worker's own gradients in its part of the mean of models, those at servers left out."""
        return worker.clock - worker.given if worker.over_servers else self.gradients_in(worker)

    def gradients_in_common(self, worker: WorkerState) -> int:
        """The number of gradients in the model that all workers have over collectives, where this worker is now."""
        return len(self.batch_sizes) * self.gradients_in(worker)

    def weight(self, rank: int) -> float:
        """Weight of a worker's model in the mean of all models: its batch size, where batch sizes differ."""
        return float(self.batch_sizes[rank]) if len(set(self.batch_sizes)) > 1 else 1.0

    def merge_buffers(self, snapshots: Sequence[torch.Tensor]) -> torch.Tensor:
        """Merge buffers in rank order: means weighted by batch size (if all are there), counts by their maximum."""
        weights = self.batch_sizes if len(snapshots) == len(self.batch_sizes) else None
        return self.model.merge_buffers(snapshots, weights)


@dataclass(frozen=True)
class WorkerData:
    """Mini-batches of `batch_sizes` samples, one size per worker, drawn from `seed` by `split` (the job's if None).

    A `timing_only` run draws none. A run with `modelled` time needs the operations of each mini-batch.
    """

    job: Job
    batch_sizes: tuple[int, ...]
    seed: int
    split: Split | None = None
    timing_only: bool = False
    modelled: bool = False

    @property
    def total(self) -> int:
        """The samples of one mini-batch of every worker."""
        return sum(self.batch_sizes)

    def draw_samplers(self) -> list[Any]:
        """New samplers of all workers, each at its first batch."""
        job = self.job if self.split is None else replace(self.job, split=self.split)
        return list(job.samplers(self.batch_sizes, seed=self.seed))

    @cached_property
    def samplers(self) -> list[Any]:
        """The samplers of all workers, at their first batch: to be copied, not drawn from."""
        return self.draw_samplers()

    def sampler(self, rank: int) -> Any:
        """A sampler of worker `rank`, at its first batch."""
        return copy(self.samplers[rank])

    def source(self, rank: int) -> JobSource:
        """The source of the gradients of worker `rank`, at its first batch."""
        size = self.batch_sizes[rank]
        sampler = None if self.timing_only else self.sampler(rank)
        flops = self.job.flops_per_sample * size if self.modelled else 0.0
        return JobSource(self.job.train, sampler, batch_size=size, share=size / self.total, seed=self.seed, flops=flops)


class StageSetup(Protocol):
    """The set-up of the workers of one rank: the model is their part of it."""

    @property
    def topology(self) -> Topology: ...

    @property
    def model(self) -> InitialModel: ...

    @property
    def delivery(self) -> Delivery: ...

    @property
    def coordinated(self) -> bool: ...

    @property
    def batches(self) -> Batches: ...


@dataclass
class Stages:
    """A job's model over the stages of `pipeline`, for a run of `workers`. `whole` are the initial values of the model.

    Layers may be `shared`. `batch_sizes` holds the mini-batch size of each copy of the model. `of` gives the set-up of
    the workers of a part. A
    `virtual` run needs the operations of each mini-batch, and has machines of these `speeds`. Raises `UsageError` for a
    model that cannot be cut.
    """

    job: Job
    pipeline: Pipeline
    shared: SharedLayers | None
    whole: InitialModel
    data: WorkerData
    workers: int
    batch_sizes: Sequence[int]
    seed: int
    timing_only: bool
    virtual: bool
    device: str
    speeds: Speeds
    of: Callable[[int], StageSetup]

    @property
    def count(self) -> int:
        """The workers of one copy of the model."""
        return self.pipeline.stages * (1 if self.shared is None else self.shared.ways)

    @cached_property
    def layout(self) -> StageLayout:
        """The model cut into its stages."""
        return StageLayout(self.job, self.pipeline, self.whole.replica, self.speeds, self.shared)

    @cached_property
    def modules(self) -> list[StageModule]:
        """The parts of the model."""
        device = self.device
        if self.timing_only:  # its model may have shapes only; operations of parts are compared with those of the whole
            device = "meta" if self.shared is None else str(self.whole.replica.device)
        made: dict[int, StageModule] = {}
        for part in self.layout.parts:
            first = self.layout.alike(part) if self.timing_only and self.shared is not None else part
            made[part] = made[first] if first < part else StageModule(self.layout, part, self.seed, device)
        return list(made.values())

    def place(self, number: int) -> tuple[int, int]:
        """The copy of the model of worker `number` of the run, and its part of it."""
        return divmod(number, self.count)

    def model(self, rank: int) -> InitialModel:
        """The initial values of the part of the model at `rank`."""
        model = InitialModel(self.job, self.seed, timing_only=self.timing_only, device=self.device)
        model.__dict__["replica"] = self.modules[rank].replica
        return model

    # ---- nodes

    def names(self, rank: int) -> Names:
        """The names of the nodes of one rank among themselves."""
        servers = self.of(rank).topology.servers
        return Names(
            {
                WORKER: range(rank, self.workers, self.count),
                SERVER: range(rank * servers, (rank + 1) * servers),
            }
        )

    def workers_of(self, rank: int) -> list[str]:
        """The workers of one rank, by name, in the order of their pipelines."""
        return [str(NodeId(WORKER, number)) for number in range(rank, self.workers, self.count)]

    def view(self, node: Node, rank: int) -> NodeView:
        """A node of one rank, among the nodes of that rank."""
        return NodeView(node, self.names(rank))

    def source(self, node: Node, meter: Meter) -> StageSource:
        """The source of the gradients of the worker on `node`."""
        replica, part = self.place(node.rank)
        size = self.batch_sizes[replica]
        batches = (PortionBatches if self.of(part).coordinated else StageBatches)(
            self.job,
            None if self.timing_only else self.data.sampler(replica),
            replica=replica,
            batch_size=size,
            micro_batches=self.pipeline.micro_batches,
            seed=self.seed,
            flops=self.job.flops_per_sample * size if self.virtual else 0.0,
            device=self.device,
        )
        module = None if self.timing_only else self.modules[part]
        holders = [str(NodeId(WORKER, replica * self.count + other)) for other in self.layout.parts]
        shared = None
        if self.shared is not None:
            alike = self.modules[self.layout.alike(part)]
            costs = alike.cost if self.virtual else None
            shared = SharedStage(
                self.layout, module, node, meter, part=part, holders=holders, costs=costs, kept=alike.kept
            )
        stage = Stage(
            self.layout,
            module,
            node,
            meter,
            batches,
            part=part,
            holders=holders,
            aliases=self.of(part).topology.needs_everybody,
            shared=shared,
        )
        clip = self.job.optimizer.clip
        return StageSource(stage, share=size / self.data.total, samples=len(self.job.train), clip=clip)

    def prepare(self) -> None:
        """Measure the borders and make the set-ups of all ranks, before processes are forked."""
        _ = self.modules
        self.measure()

    def measure(self) -> None:
        """Measure the borders and the blocks for all sizes of micro-batches. Raises `UsageError`, naming a block."""
        layout = self.layout
        _ = layout.shares
        for rows in self._sizes():
            layout.measured(rows)
        if self.shared is not None:
            alike = [self.modules[part] for part in sorted({layout.alike(part) for part in layout.parts})]
            for module, chunk, rows in product(alike, range(self.pipeline.chunks), self._sizes()):
                _ = module.cost(chunk, rows) if self.virtual else module.kept(chunk, rows)

    def keep(self, rank: int) -> None:
        """Free the memory of all parameters but those of one rank, in the process of its worker; shapes stay."""
        self.prepare()
        own = self.modules[rank].replica
        for replica in (self.whole.replica, *(module.replica for module in self.modules)):
            replica.drop_gradients()
            if replica is not own:
                replica.move_to(replica.params.new_zeros(()).expand(replica.numel))

    def _sizes(self) -> set[int]:
        """The sizes of micro-batches."""
        micro, sizes, setup = self.pipeline.micro_batches, set(self.batch_sizes), self.of(0)
        if setup.coordinated:
            sizes = {len(setup.batches.indices(0, portion)) for portion in (0, setup.batches.count - 1)}
        return {stop - start for size in sizes for start, stop in equal_ranges(size, micro)}

    # ---- the whole model

    @cached_property
    def reporter(self) -> int:
        """The rank in a pipeline of the worker that knows the loss."""
        return self.layout.place_of(self.layout.depth - 1)[0] * self.layout.ways

    def reports(self, number: int) -> bool:
        """Whether worker `number` of the run knows the loss of its pipeline, and so counts its samples."""
        return self.place(number)[1] == self.reporter

    def delivered(self, models: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole model, from the models that all workers of the run deliver, by number."""
        each = [self.of(rank).topology.result((), models[rank :: self.count]) for rank in self.layout.parts]
        return self.joined(each)

    def joined(self, models: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole model, from the model of each rank."""
        return self.layout.joined(models)

    def buffers(self, found: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
        """The buffers of the whole model, from those of the workers, by number; None where training changes none."""
        if not found:
            return None
        parts: dict[int, torch.Tensor] = {}
        for rank in self.layout.parts:
            own = [found[number] for number in sorted(found) if self.place(number)[1] == rank]
            if own:
                parts[rank] = self.of(rank).delivery.merge_buffers(own)
        return self.layout.joined_buffers({rank: self.modules[rank].replica for rank in parts}, parts)


class StagedTopology(Topology):
    """The topology of a strategy, deployed once for each rank of the pipelines."""

    def __init__(self, choice: Any, plan: RunPlan, stages: Stages) -> None:
        super().__init__(choice, plan)
        self._stages = stages
        self._each = each = [stages.of(rank).topology for rank in stages.layout.parts]
        self.needs_everybody = each[0].needs_everybody
        self.uses_engine = each[0].uses_engine
        self.clocked = each[0].clocked
        self.one_machine = each[0].one_machine
        self.in_place = each[0].in_place
        self.colocated = each[0].colocated
        self.servers = sum(topology.servers for topology in each)
        self.graph = each[0].graph

    def check(self) -> None:
        for topology in self._each:
            topology.check()

    def deploy(self) -> Deployment:
        """The nodes of all ranks under their names in the run. Without one of its workers a pipeline goes back."""
        found: dict[str, NodeSpec] = {}
        for rank, topology in enumerate(self._each):
            names = self._stages.names(rank)

            def outside(node: NodeId | None, names: Names = names) -> NodeId | None:
                return None if node is None else NodeId.of(names.outside(str(node)))

            for node in topology.deploy().nodes:
                lost = WhenLost.ROLL_BACK if node.id.kind == WORKER else self.server_lost
                there = outside(node.id)
                assert there is not None
                found[str(there)] = NodeSpec(there, outside(node.beside), lost)
        workers = [found[str(NodeId(WORKER, number))] for number in range(self.plan.workers)]
        return Deployment((*workers, *(node for node in found.values() if node.id.kind != WORKER)))

    @property
    def server_lost(self) -> WhenLost:
        """All stages of a pipeline are at the same mini-batch, so all go back together."""
        return WhenLost.ROLL_BACK

    def result(self, shards: Sequence[Any], models: Sequence[torch.Tensor]) -> torch.Tensor:
        count, models_of = self._stages.count, list(models)
        each = self.servers // count
        return self._stages.joined(
            [
                topology.result(shards[rank * each : (rank + 1) * each], models_of[rank::count])
                for rank, topology in enumerate(self._each)
            ]
        )
