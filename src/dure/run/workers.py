"""One worker of a run, on whatever node hosts it: how it is built and restored, and its loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from dure.core.node import EndOfWork, Ghost
from dure.core.state import State
from dure.core.vectors import gather, size
from dure.errors import Evicted
from dure.job.optimizer import Clipped, FlatOptimizer, RangesOptimizer, kept_names, restrict
from dure.partition.source import StageSource
from dure.run.checkpoint import fitting, tensor_of
from dure.sync import lifecycle
from dure.sync.worker import Worker
from dure.sync.worker_state import WorkerState
from dure.topology.base import check_sessions
from dure.topology.collective.sharded import ShardedSession, ShardGroups
from dure.topology.collective.topology import GroupSession
from dure.topology.parameter_server.portion_client import PortionClient
from dure.topology.parameter_server.session import ServerSession

if TYPE_CHECKING:
    from dure.core.meter import Meter
    from dure.core.node import Group, Node
    from dure.core.shards import ShardedGroup, Shards
    from dure.job.gradient import GradientSource, LocalOptimizer
    from dure.job.gradient_engine import GradientEngine
    from dure.run.checkpoint import Parts
    from dure.run.setup import Setup
    from dure.sync.base import Sync
    from dure.topology.parameter_server.client import ServerClient

PARAMS, BUFFERS, SHARD = "params", "buffers", "shard"
"""Names of tensors, and of a plain value, in the part of a worker in a checkpoint."""


def build_worker(run: Setup, node: Node, number: int, meter: Meter, *, start: int = 0, steps: int = 0) -> WorkerState:
    """Build worker `number` of a run on `node`, with its replica, its data and its sessions with servers or group.

    In a pipeline its replica is its stage, and it is one of the workers that have the same stage. `start` is the step
    of the checkpoint that the run starts from. A worker that was killed had made `steps`: this one goes on with the
    mini-batches after them.
    """
    setup, rank, under_number = run, number, node
    source = _companions_source(run, node, number, start, meter)
    if run.stages is not None:
        rank, place = run.stages.place(number)
        source = run.stages.source(node, meter)
        setup, node = run.of_worker(number), run.stages.view(node, place)
    model = setup.model
    worker = WorkerState(
        node=node,
        rank=rank,
        world_size=setup.workers,
        params=model.params,
        optimizer=_optimizer(setup, rank, clips=run.stages is None),  # a stage clips by the norm over all stages
        rates=model.rates.at if model.rates else None,
        source=source or setup.data.source(rank, steps),
        meter=meter,
        boundary=setup.boundary(),
        total_weight=float(setup.data.total),
        buffers=model.buffers,
        merge_buffers=setup.delivery.merge_buffers,
        number=number,
    )
    if isinstance(worker.source, StageSource):
        worker.source.stage.requester = worker  # its figures are read also where no step is left
    if worker.buffers is None and run.model.buffers is not None:
        worker.buffers = torch.empty(0, dtype=torch.float64)  # of a stage without any, in a model with some
    topology = setup.topology
    group = topology.group(node, meter)
    if group is not None:
        worker.sessions.group = GroupSession(worker, group)
    if setup.shards is not None and group is not None:
        _shard(worker, setup, group, setup.shards)
    if topology.clocked:
        server = setup.client(node, rank)
        worker.sessions.server = ServerSession(worker, server)
        worker.pushes_rates = not setup.server_side.own_rule
        worker.sessions.work_queue = _portions(run, server, under_number) if setup.coordinated else None
    topology.connect(worker, group)
    check_sessions(topology.choice, worker.sessions)
    return worker


def _shard(worker: WorkerState, setup: Setup, group: Group, shards: Shards) -> None:
    """Have a worker exchange parts of gradients, and hold its shard of the parameters alone in stage 3."""
    node, ranks = worker.node, shards.ranks
    place, first = worker.rank % ranks, worker.rank - worker.rank % ranks
    alone = ranks == setup.workers
    near = group if alone else node.group(range(first, first + ranks))
    across = None if alone else node.group(range(place, setup.workers, ranks))
    groups = ShardGroups(group, cast("ShardedGroup", near), across, shards, place)
    clip = setup.job.optimizer.clip if worker.source.whole else None  # a stage clips by the norm over all stages
    session = ShardedSession(worker, groups, whole=not setup.keeps_shards, clip=clip)
    worker.sessions.group = worker.sessions.sharded = session
    if not session.whole:
        timed = setup.config.timing_only
        worker.params = worker.params.new_empty(shards.numels[place]) if timed else gather(worker.params, session.own)


def free_initial_values(run: Setup, worker: WorkerState, engine: GradientEngine | None) -> None:
    """Free the memory of the initial model in the process of a `worker` with a shard, which has taken its own part.

    The worker and the `engine` then have one memory of the parameters.
    """
    if run.stages is not None and run.keeps_shards:
        run.stages.release(worker.number % run.parts)
    if engine is not None:
        run.model.release()
        worker.params = engine.replica.params.copy_(worker.params)


def _companions_source(run: Setup, node: Node, number: int, start: int, meter: Meter) -> GradientSource | None:
    """The source of gradients that the companions of a job make; None for a job without."""
    if run.job.companions is None:
        return None
    return run.job.companions.source(run.shape(start), node, number, run.device, meter)


def _portions(run: Setup, server: ServerClient, node: Node) -> PortionClient:
    """The calls to the coordinator of the worker on `node`."""
    return PortionClient(server, run.batches, node, joint=run.stages is not None)


def _optimizer(setup: Setup, rank: int, *, clips: bool) -> LocalOptimizer:
    """The optimizer of a worker's own steps: of its shard, if it has one."""
    model, spec, shards = setup.model, setup.job.optimizer, setup.shards
    replica, segments = model.replica, model.rates.segments
    if shards is None:
        rule = FlatOptimizer(spec, replica.numel, replica.dtype, segments=segments, device=replica.device)
        return rule if spec.clip is None or not clips else Clipped(rule, spec.clip)
    own = shards.held[rank % shards.ranks]
    if not setup.keeps_shards:
        return RangesOptimizer(spec, own, replica.dtype, segments=segments, device=replica.device)
    parts, names = restrict(segments, own), kept_names(spec, segments)
    return FlatOptimizer(spec, size(own), replica.dtype, segments=parts, device=replica.device, keeps=names)


def state_of_worker(worker: WorkerState) -> State:
    """The part of a worker in a checkpoint; of a worker that holds a shard, only its own ranges of vectors.

    Groups of workers that share a copy hold the same shards. Only the first of them has tensors of shards in its parts.
    """
    state, sharded = lifecycle.state(worker), worker.sessions.sharded
    if sharded is None:
        return state
    place, tensors = sharded.groups.place, state.tensors
    if worker.rank >= sharded.shards.ranks:
        tensors = {name: tensors[name] for name in tensors if name == BUFFERS}
    elif PARAMS in tensors and sharded.whole:
        tensors = tensors | {PARAMS: gather(tensors[PARAMS], sharded.own)}
    return State(tensors, {**state.plain, SHARD: {"place": place, "ranks": sharded.shards.ranks}})


def restore_worker(run: Setup, worker: WorkerState, parts: Parts) -> State | None:
    """Restore a worker from a checkpoint; its part, or None where the checkpoint has none for it.

    Raises `CheckpointError` where the part does not fit.
    """
    name = f"worker-{worker.number}"
    part = parts.get(name)
    if part is not None:
        with fitting(name):
            lifecycle.restore(worker, _with_shard(run, worker, part, parts))
    return part


def _with_shard(run: Setup, worker: WorkerState, part: State, parts: Parts) -> State:
    """The part of a worker with the vectors that it goes on with; parameters are read from the parts of all shards."""
    sharded = worker.sessions.sharded
    if sharded is None or isinstance(worker.params, Ghost):
        return part

    names = [f"worker-{place * run.parts + worker.number % run.parts}" for place in range(sharded.shards.ranks)]
    own = parts[names[sharded.groups.place]].tensors
    tensors = {name: each for name, each in own.items() if name != BUFFERS}
    tensors |= {name: each for name, each in part.tensors.items() if name == BUFFERS}
    if sharded.whole:
        whole = torch.empty_like(worker.params, device=own[PARAMS].device)
        tensors[PARAMS] = sharded.shards.join((tensor_of(parts, name, PARAMS) for name in names), whole)
    return State(tensors, part.plain)


async def work_through(sync: Sync, worker: WorkerState, period: int = 1) -> None:
    """Run the method to the end of its work. A worker that was evicted joins the others again."""
    while True:
        try:
            await sync.work(Worker(worker))
        except EndOfWork:
            return
        except Evicted:
            await lifecycle.rejoin(worker, period)
        else:
            return
