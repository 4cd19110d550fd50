"""A job whose workers note the times of their steps in files, and exit when they are told to."""

from __future__ import annotations

import os
import struct
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dure.core.node import Operation
from dure.errors import PeerLost
from dure.job.data.dataset import Data
from dure.job.job import Job
from dure.job.optimizer import OptimizerSpec
from dure.runtime.process.formed_group import FormedGroup

LR, MOMENTUM, BATCH = 0.05, 0.9, 4
STAMP = struct.Struct("d")


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def noted(data_root: Path) -> Job:
    """Each step takes 2 ms and is noted in a file of its process, which exits once its file `exit` is there."""
    inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(3))
    targets = torch.randn(256, 3, generator=torch.Generator().manual_seed(4))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        found = ((outputs - targets) ** 2).mean()
        if torch.is_grad_enabled() and outputs.requires_grad:
            time.sleep(0.002)
            with (data_root / f"{os.getpid()}.steps").open("ab") as file:
                file.write(STAMP.pack(time.monotonic()))
            if (data_root / f"{os.getpid()}.exit").exists():
                os._exit(0)
        return found

    optimizer = OptimizerSpec("momentum", lr=LR, momentum=MOMENTUM)
    data = Data(inputs, targets)
    return Job(model=model, loss=loss, train=data, test=data, batch_size=BATCH, optimizer=optimizer)


MISSED = 20


def one_misses_a_step(data_root: Path) -> Job:
    """As `noted`. Worker 1 loses the result of its sum number `MISSED`, which all others have."""
    start, sums = FormedGroup._start, count()

    def started(group: FormedGroup, label: str, works: Any, *rest: Any) -> Operation[Any]:
        operation = start(group, label, works, *rest)
        if group._node.rank == 1 and next(sums) == MISSED:
            for work in works:
                work.wait()
            operation.fail(PeerLost("a test has taken the result away"))
        return operation

    if getattr(sys.modules["__main__"].__spec__, "name", "") == "dure.run.launchers.entry":  # not in the test's process
        FormedGroup._start = started  # type: ignore[method-assign]
    return noted(data_root)
