"""Blocks of a model on the device: tracing, the check of their order, a profile and borders."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from accelerator import target

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.xdist_group("accelerator"), pytest.mark.timeout(600)]  # the first test compiles

TRACED = """
import torch
from accelerator import target

device = target.prepare()
import dure
from dure.job.replica import Replica
from dure.partition.layout import StageLayout
from dure.partition.tracing import traced_blocks

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
        self.shift = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.last(self.first(x) + self.shift)

data = dure.Data(torch.randn(6, 4), torch.zeros(6, dtype=torch.int64))
stages = lambda module: traced_blocks(module, torch.ones(2, 4))
job = dure.Job(Net, torch.nn.functional.cross_entropy, data, stages=stages)
layout = StageLayout(job, dure.GPipe(stages=2, cuts="profile"), Replica(job.build().to(device)))
print(layout.bounds, layout.border(0, 3).tensors[0].shape, layout.activations(1, 3).nbytes)
"""


def test_a_traced_model_is_cut_on_the_device():
    if reason := target.absent():
        pytest.skip(reason)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", TRACED]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(0, 1, 3) (3, 4) 48"
