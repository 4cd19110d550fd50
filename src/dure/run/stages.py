"""The parts of a model in a run: the set-up of each part, and the whole.

Worker `replica * P + part` of a run whose copies of the model have P workers holds part `part` of copy `replica`: the
stages of one worker of a pipeline, or with W ways of sharing layers (P = K * W) one of W parts of them. The workers of
one part, one in each copy, are a set of data-parallel workers of their own: they have a set-up in which the model is
their part of it, and the method and the topology of the strategy run among them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import TYPE_CHECKING, Any, Protocol

import torch

from dure.core.deployment import SERVER, WORKER, Deployment, NodeId, NodeSpec, WhenLost
from dure.core.node_view import Names, NodeView
from dure.core.shards import Shards
from dure.core.vectors import equal_ranges
from dure.job.initial_model import InitialModel
from dure.partition.blockwise import Blockwise
from dure.partition.layout import StageLayout
from dure.partition.messages import PortionBatches, StageBatches
from dure.partition.sharded_stage import ShardedStage, ranges_of, units_of
from dure.partition.shared_stage import SharedStage
from dure.partition.source import StageSource
from dure.partition.stage import Stage
from dure.partition.stage_module import StageModule
from dure.topology.base import RunPlan, Topology

if TYPE_CHECKING:
    from dure.core.meter import Meter
    from dure.core.node import Node
    from dure.job.data.split import Batches
    from dure.job.job import Job
    from dure.partition.cut import Speeds
    from dure.partition.pipeline import Pipeline
    from dure.partition.shared_layers import SharedLayers
    from dure.run.worker_data import Delivery, WorkerData


class StageSetup(Protocol):
    """The set-up of the workers of one part of the model."""

    @property
    def topology(self) -> Topology: ...

    @property
    def model(self) -> InitialModel: ...

    @property
    def delivery(self) -> Delivery: ...

    @property
    def coordinated(self) -> bool: ...

    def joined(self, models: Sequence[torch.Tensor]) -> torch.Tensor: ...

    @property
    def batches(self) -> Batches: ...


@dataclass
class Stages:
    """A job's model over the stages of `pipeline`, for a run of `workers`. `whole` are the initial values of the model.

    Layers may be `shared`. `batch_sizes` holds the mini-batch size of each copy of the model. `of` gives the set-up of
    the workers of a part, and `shard_ranks` of them share one copy of it. A `virtual` run needs the operations of each
    mini-batch, and has machines of these `speeds`. Raises `UsageError` for a model that cannot be cut.
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
    shard_ranks: int = 1

    @property
    def count(self) -> int:
        """The workers of one copy of the model."""
        return self.pipeline.stages * (1 if self.shared is None else self.shared.ways)

    @cached_property
    def layout(self) -> StageLayout:
        """The model cut into its stages."""
        return StageLayout(self.job, self.pipeline, self.whole.replica, self.speeds, self.shared, 1 / self.shard_ranks)

    @cached_property
    def modules(self) -> list[StageModule]:
        """The parts of the model."""
        device = self.device
        if self.timing_only:  # its model may have shapes only; operations of parts are compared with those of the whole
            device = "meta" if self.shared is None or self.layout.costs else str(self.whole.replica.device)
        made: dict[int, StageModule] = {}
        for part in self.layout.parts:
            first = self.layout.alike(part) if self.timing_only and self.shared is not None else part
            made[part] = made[first] if first < part else StageModule(self.layout, part, self.seed, device)
        return list(made.values())

    def _counted(self, part: int) -> StageModule:
        """The module whose operations are those of a part; of accelerators, one of shapes as the whole model is."""
        if self.timing_only or self.layout.costs is None:
            return self.modules[part]
        if part not in self._shapes:
            self._shapes[part] = StageModule(self.layout, part, self.seed, "meta")
        return self._shapes[part]

    @cached_property
    def _shapes(self) -> dict[int, StageModule]:
        return {}

    @property
    def sharded(self) -> bool:
        """Whether a worker holds a shard of the parameters of its part, and gathers those of a chunk at a time."""
        return isinstance(self.pipeline, Blockwise)

    def shards(self, part: int, ranks: int) -> Shards:
        """The shards of a part of the model that so many ranks hold together, by chunks."""
        return Shards([ranges_of(unit) for unit in units_of(self.layout, part)], ranks)

    def place(self, number: int) -> tuple[int, int]:
        """The copy of the model of worker `number` of the run, and its part of it."""
        return divmod(number, self.count)

    def model(self, part: int) -> InitialModel:
        """The initial values of a part of the model."""
        model = InitialModel(self.job, self.seed, timing_only=self.timing_only, device=self.device)
        model.__dict__["replica"] = self.modules[part].replica
        return model

    # ---- nodes

    def names(self, part: int) -> Names:
        """The names of the workers and servers of one part among themselves."""
        if part not in self._names:
            servers = self.of(part).topology.servers
            self._names[part] = Names(
                {
                    WORKER: range(part, self.workers, self.count),
                    SERVER: range(part * servers, (part + 1) * servers),
                }
            )
        return self._names[part]

    @cached_property
    def _names(self) -> dict[int, Names]:
        return {}

    def workers_of(self, part: int) -> list[str]:
        """The workers of one part, by name, in the order of their pipelines."""
        return [str(NodeId(WORKER, number)) for number in range(part, self.workers, self.count)]

    def view(self, node: Node, part: int) -> NodeView:
        """A node of one part, among the nodes of that part."""
        return NodeView(node, self.names(part))

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
            alike = self._counted(self.layout.alike(part))
            costs = alike.cost if self.virtual else None
            shared = SharedStage(
                self.layout, module, node, meter, part=part, holders=holders, costs=costs, kept=alike.kept
            )
        share, aliases = size / self.data.total, self.of(part).topology.needs_everybody
        kind = partial(ShardedStage, share=share) if self.sharded else Stage
        stage = kind(
            self.layout,
            module,
            node,
            meter,
            batches,
            part=part,
            holders=holders,
            aliases=aliases,
            shared=shared,
        )
        clip = self.job.optimizer.clip
        return StageSource(stage, share=share, samples=len(self.job.train), clip=clip)

    def prepare(self) -> None:
        """Measure the borders and make the set-ups of all parts, before processes are forked."""
        _ = self.modules
        self.measure()

    def measure(self) -> None:
        """Measure the borders and the blocks for all sizes of micro-batches. Raises `UsageError`, naming a block."""
        layout = self.layout
        _ = layout.shares
        for rows in self._sizes():
            layout.measured(rows)
        if self.shared is not None:
            alike = [self._counted(part) for part in sorted({layout.alike(part) for part in layout.parts})]
            for module, chunk, rows in product(alike, range(self.pipeline.chunks), self._sizes()):
                _ = module.cost(chunk, rows) if self.virtual else module.kept(chunk, rows)

    def release(self, part: int) -> None:
        """Free the memory of a part whose worker has taken its shard; shapes stay."""
        self.modules[part].replica.drop_values()

    def keep(self, part: int) -> None:
        """Free the memory of all parameters but those of one part, in the process of its worker; shapes stay."""
        self.prepare()
        own = self.modules[part].replica
        for replica in (self.whole.replica, *(module.replica for module in self.modules)):
            if replica is own:
                replica.drop_gradients()
            else:
                replica.drop_values()

    def _sizes(self) -> set[int]:
        """The sizes of micro-batches."""
        micro, sizes, setup = self.pipeline.micro_batches, set(self.batch_sizes), self.of(0)
        if setup.coordinated:
            sizes = {len(setup.batches.indices(0, portion)) for portion in (0, setup.batches.count - 1)}
        return {stop - start for size in sizes for start, stop in equal_ranges(size, micro)}

    # ---- the whole model

    @cached_property
    def reporter(self) -> int:
        """The part of the worker that knows the loss."""
        return self.layout.place_of(self.layout.depth - 1)[0] * self.layout.ways

    def reports(self, number: int) -> bool:
        """Whether worker `number` of the run knows the loss of its pipeline, and so counts its samples."""
        return self.place(number)[1] == self.reporter

    def delivered(self, models: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole model, from the models that all workers of the run deliver, by number."""
        return self.joined([self.of(part).joined(models[part :: self.count]) for part in self.layout.parts])

    def joined(self, models: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole model, from all its parts."""
        return self.layout.joined(models)

    def buffers(self, found: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
        """The buffers of the whole model, from those of the workers, by number; None where training changes none."""
        if not found:
            return None
        parts: dict[int, torch.Tensor] = {}
        for part in self.layout.parts:
            own = [found[number] for number in sorted(found) if self.place(number)[1] == part]
            if own:
                parts[part] = self.of(part).delivery.merge_buffers(own)
        return self.layout.joined_buffers({part: self.modules[part].replica for part in parts}, parts)


class StagedTopology(Topology):
    """The topology of a strategy, deployed once for each part of the model."""

    def __init__(self, choice: Any, plan: RunPlan, stages: Stages) -> None:
        super().__init__(choice, plan)
        self._stages = stages
        self._each = each = [stages.of(part).topology for part in stages.layout.parts]
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
        """The nodes of all parts under their names in the run. If a worker is lost, all roll back."""
        found: dict[str, NodeSpec] = {}
        for part, topology in enumerate(self._each):
            names = self._stages.names(part)

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
        """The consequence of a lost server: all stages are at the same mini-batch, so all go back together."""
        return WhenLost.ROLL_BACK

    def result(self, shards: Sequence[Any], models: Sequence[torch.Tensor]) -> torch.Tensor:
        count, models_of = self._stages.count, list(models)
        each = self.servers // count
        if self._stages.sharded:
            return self._stages.delivered(models)
        return self._stages.joined(
            [
                topology.result(shards[part * each : (part + 1) * each], models_of[part::count])
                for part, topology in enumerate(self._each)
            ]
        )
