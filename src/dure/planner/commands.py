"""Commands that run a strategy of a plan for real."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dure.planner.timing import config_of
from dure.run.config import TrainConfig
from dure.run.emit import torchrun
from dure.run.emit.arguments import arguments_of
from dure.run.emit.launch import Launch, ranks_of

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
    """The options of a real run, and the `ranks` on each of its machines."""

    config: TrainConfig
    ranks: Sequence[int]

    @property
    def line(self) -> str:
        """The line for a shell: on one machine for this machine, on several for each of them.

        NODE stands for a machine's number, HOST for machine 0, RANKS for the workers of a machine, where they differ.
        """
        if len(self.ranks) == 1:
            return shlex.join(["dure", *arguments_of(replace(self.config, workers=self.ranks[0], on="local"))])
        each = str(self.ranks[0]) if len(set(self.ranks)) == 1 else "RANKS"
        return torchrun.line(Launch(self.config, len(self.ranks), self.ranks[0]), each)


def command_of(scene: Scene, config: PlanOptions, row: Ranked) -> Command:
    """The command that runs `row` on the machines of `scene`."""
    size = config_of(scene, row.strategy).batch_size or 1
    job = config.job or scene.job.name
    options = TrainConfig(job=job, strategy=row.strategy, batch_size=size, data=config.data, on="torchrun")
    return Command(options, ranks_of(scene.cluster))


def ddp_script(scene: Scene) -> str:
    """A script of plain data parallelism in PyTorch, with the sizes of `scene`."""
    return DDP.format(workers=scene.workers, batch=scene.batch // scene.workers)
