"""Commands that run a strategy of a plan for real."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dure.planner.timing import config_of

if TYPE_CHECKING:
    from dure.planner.options import PlanOptions
    from dure.planner.ranking import Ranked
    from dure.planner.scene import Scene

DDP = """\
# train.py: plain data parallelism in PyTorch. {workers} workers with {batch} samples each.
import os, torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

torch.distributed.init_process_group()  # gloo on CPUs, nccl on GPUs
model = DistributedDataParallel(make_model())
optimizer = make_optimizer(model.parameters())
loader = DataLoader(dataset, batch_size={batch}, sampler=DistributedSampler(dataset))
for epoch in range(epochs):
    loader.sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = loss_of(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
"""A script of plain data parallelism; `make_model` and the like are the user's."""


@dataclass(frozen=True, slots=True)
class Command:
    """A line for a shell, and the batch of each copy of the model in it."""

    line: str
    batch_size: int


def command_of(scene: Scene, config: PlanOptions, row: Ranked) -> Command:
    """The command that runs `row` on the machines of `scene`: on one machine at once, on several at each of them."""
    cluster = scene.cluster
    machines = 1 if cluster.host is not None else len({cluster.machine_of(worker) for worker in range(scene.workers)})
    size = config_of(scene, row.strategy).batch_size or 1
    options = [f"--strategy {shlex.quote(row.strategy)}", f"--batch-size {size}"]
    if config.data is not None:
        options.append(f"--data {shlex.quote(str(config.data))}")
    name = shlex.quote(config.job or scene.job.name)
    if machines == 1:
        return Command(f"dure train {name} {' '.join(options)} --workers {scene.workers} --on local", size)
    per_machine = scene.workers // machines
    torchrun = f"torchrun --nnodes {machines} --nproc-per-node {per_machine} --rdzv-backend c10d"
    start = f"{torchrun} --rdzv-endpoint HOST:29400 -m dure"
    return Command(f"{start} train {name} {' '.join(options)} --on torchrun", size)


def ddp_script(scene: Scene) -> str:
    """A script of plain data parallelism in PyTorch, with the sizes of `scene`."""
    return DDP.format(workers=scene.workers, batch=scene.batch // scene.workers)
