"""A replica whose module has tensors beside those on the device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from accelerator import target

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.xdist_group("accelerator"), pytest.mark.timeout(600)]  # the first test compiles

COUNTER_ON_THE_CPU = """
import torch
from accelerator import target

device = target.prepare()
from dure.job.replica import Replica

module = torch.nn.BatchNorm1d(3).to(device)
module.num_batches_tracked = module.num_batches_tracked.cpu() + 4
replica = Replica(module)
before = replica.buffers_flat()
replica.load_buffers(before + 1)
where = before.device.type == device, module.num_batches_tracked.device.type
print(*where, before.tolist(), replica.buffers_flat().tolist())
"""


def test_a_buffer_may_be_on_the_cpu():
    if reason := target.absent():
        pytest.skip(reason)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", COUNTER_ON_THE_CPU]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    before, after = [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 4.0], [1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 5.0]
    assert done.stdout.strip() == f"True cpu {before} {after}"
