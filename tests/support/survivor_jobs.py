"""A job whose workers note the times of their steps in files, and exit when they are told to."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from dure.job.data.dataset import Data
from dure.job.job import Job
from dure.job.optimizer import OptimizerSpec

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
