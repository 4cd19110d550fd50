"""Slices of a gradient leave in one order, each when it is complete."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from dure.job.overlap import MOST_NBYTES, Overlap, cut
from dure.job.replica import Replica
from dure_jobs.mnist import convnet


def launched(overlap: Overlap, backward: object) -> list[tuple[torch.Tensor, int]]:
    """For each slice as it left: a copy of it, and how many elements before it were still zero."""
    seen = []

    def launch(part: torch.Tensor) -> None:
        start = part.storage_offset()
        seen.append((part.clone(), int((overlap.replica.grads[:start] == 0).sum())))

    overlap.replica.zero_grad()
    overlap.arm(launch)
    backward()
    overlap.finish()
    return seen


@pytest.mark.parametrize("nbytes", [None, 4, 100, 4000, 10**9])
def test_slices_cover_the_gradient_once_at_borders_of_parameters(nbytes):
    replica = Replica(convnet())
    slices = cut(replica, nbytes)
    assert slices[0][1] == replica.numel
    assert slices[-1][0] == 0
    assert [start for start, _ in slices[:-1]] == [stop for _, stop in slices[1:]]
    assert {start for start, _ in slices} <= {layer.start for layer in replica.layers}
    assert all((stop - start) * 4 >= (nbytes or 0) for start, stop in slices[:-1])


def test_small_models_are_not_cut_and_large_ones_not_to_shreds():
    assert len(cut(Replica(convnet()))) == 1
    middling = Replica(nn.Sequential(*(nn.Linear(256, 256) for _ in range(20))))  # 5.3 MB
    assert len(cut(middling)) == 4
    large = Replica(nn.Sequential(*(nn.Linear(256, 256) for _ in range(200))))  # 52 MB
    assert all((stop - start) * 4 >= MOST_NBYTES for start, stop in cut(large)[:-1])


def test_the_dense_layers_leave_while_the_convolutions_are_computed():
    replica = Replica(convnet())
    overlap = Overlap(replica, 256 << 10)
    inputs, targets = torch.randn(4, 1, 28, 28), torch.tensor([1, 2, 3, 4])
    seen = launched(overlap, lambda: nn.functional.cross_entropy(replica.module(inputs), targets).backward())
    (dense, missing), (convolutions, _) = seen
    start = overlap.slices[0][0]
    assert missing == start  # nothing before it was there yet
    assert torch.equal(torch.cat([convolutions, dense]), replica.grads)


def test_a_parameter_that_backward_does_not_reach_holds_nobody_up():
    replica = Replica(nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)]))
    overlap = Overlap(replica, 4)
    seen = launched(overlap, lambda: replica.module[0](torch.ones(1, 3)).sum().backward())
    assert [part.tolist() for part, _ in seen] == [[0.0], [0.0] * 3, [1.0], [1.0] * 3]


@pytest.mark.long
def test_the_first_backward_imports_nothing_heavy():
    """PyTorch imports sympy, a third of a second, for a backward that is given a gradient."""
    code = (
        "import sys; from dure.job.job import load_job;"
        "from dure.job.gradient_engine import GradientEngine; from dure.job.gradient import GradientWork as W;"
        "job = load_job('digits-mlp'); e = GradientEngine(job); x, y = job.train.inputs[:4], job.train.targets[:4];"
        "g = e.backward(W(0, 0, e.initial_values(0), x, y, 0, 1.0), 0.5);"
        "assert g.values.abs().sum() > 0; sys.exit('sympy' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_parameters_without_elements_are_in_no_slice():
    net = nn.Linear(3, 2)
    net.nothing = nn.Parameter(torch.zeros(0))  # behind all slices
    replica = Replica(net)
    overlap = Overlap(replica)
    launched = []
    overlap.arm(launched.append)
    net(torch.ones(1, 3)).sum().backward()
    overlap.finish()
    assert sum(part.numel() for part in launched) == replica.numel
