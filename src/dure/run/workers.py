"""One worker of a run, on whatever node hosts it: built and restored in the same way everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dure.job.optimizer import FlatOptimizer
from dure.run.checkpoint import fitting
from dure.sync import saved
from dure.sync.worker import Worker
from dure.topology.collective.session import GroupSession
from dure.topology.parameter_server.batch.client import PortionClient
from dure.topology.parameter_server.session import ServerSession

if TYPE_CHECKING:
    from dure.core.meter import Meter
    from dure.core.node import Node
    from dure.core.state import State
    from dure.run.checkpoint import Parts
    from dure.run.setup import Setup


def build_worker(setup: Setup, node: Node, rank: int, meter: Meter) -> Worker:
    """Build worker `rank` on `node`, with its replica, its data and its sessions with servers or group."""
    model, optimizer = setup.model, setup.job.optimizer
    worker = Worker(
        node=node,
        rank=rank,
        world_size=setup.workers,
        params=model.params,
        optimizer=FlatOptimizer(
            optimizer,
            model.replica.numel,
            model.replica.dtype,
            segments=model.rates.segments,
            device=model.replica.device,
        ),
        rates=model.rates.at if model.rates else None,
        source=setup.data.source(rank),
        meter=meter,
        boundary=setup.boundary(),
        total_weight=float(setup.data.total),
        buffers=model.buffers,
        merge_buffers=setup.delivery.merge_buffers,
    )
    topology = setup.topology
    group = topology.group(node, meter)
    if group is not None:
        worker.sessions.group = GroupSession(worker, group)
    if topology.clocked:
        server = setup.client(node, rank)
        worker.sessions.server = ServerSession(worker, server)
        worker.pushes_rates = not setup.server_side.own_rule
        worker.sessions.work_queue = PortionClient(server, setup.batches) if setup.coordinated else None
    topology.connect(worker, group)
    return worker


def restore_worker(worker: Worker, parts: Parts) -> State | None:
    """Restore a worker from a checkpoint; its part, or None where the checkpoint has none for it.

    Raises `CheckpointError` where the part does not fit.
    """
    name = f"worker-{worker.rank}"
    part = parts.get(name)
    if part is not None:
        with fitting(name):
            saved.restore(worker, part)
    return part
