"""Slices of a gradient leave in one order, each when it is complete."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import torch
from support.storages import Peak
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


# ---- a replica that keeps no gradients


WIDE, DEEP = 64, 24
SLICE = WIDE * (WIDE + 1) * 4
"""Bytes of a layer's gradient: of a slice."""


def deep():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(DEEP)))


def halves(launched, keep):
    """Take each slice as two ranks do: its first half is kept."""
    held = []

    def launch(part):
        launched.append(part[: part.numel() // 2].clone())
        held.append(part)
        del held[: -keep or None]

    return launch


def passing(keep):
    """The peak of memory of a step whose slices are freed when `keep` others have left, and the parts that stay."""
    replica = Replica(deep())
    replica.drop_gradients()
    overlap = Overlap(replica, SLICE)
    parts = []
    with Peak().without(replica.params) as peak:
        overlap.arm(halves(parts, keep))
        replica.module(torch.ones(1, WIDE)).sum().backward()
        overlap.finish()
    assert all(parameter.grad is None for parameter in replica.parameters)
    return peak.nbytes, parts


def test_a_gradient_that_is_not_kept_takes_the_memory_of_a_few_slices():
    peak, parts = passing(keep=2)
    own = DEEP * SLICE // 2
    assert own + SLICE < peak <= own + 5 * SLICE  # two under way, one that is filled from its gradients, one part
    assert passing(keep=10**9)[0] > own + DEEP * SLICE  # slices that are not freed

    replica = Replica(deep())
    overlap, kept = Overlap(replica, SLICE), []
    overlap.arm(halves(kept, 1))
    replica.module(torch.ones(1, WIDE)).sum().backward()
    overlap.finish()
    assert len(kept) == len(parts) == DEEP
    assert all(map(torch.equal, kept, parts))


def test_gradients_that_are_not_kept_lie_as_the_flat_one():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Embedding(5, 2, sparse=True), nn.Linear(4, 2))
    net = net.to(memory_format=torch.channels_last)
    kept, passed = (Replica(copy.deepcopy(net), keep_strides=True) for _ in range(2))
    passed.drop_gradients()
    for replica in (kept, passed):
        for number, parameter in enumerate(replica.parameters[:-1]):  # the last has none
            torch.manual_seed(number)
            parameter.grad = torch.randn(parameter.shape)
        replica.parameters[2].grad = torch.randn(5, 2).to_sparse()
    kept.check()
    flat = [passed.take_gradients([0]), passed.take_gradients([1, 2]), passed.take_gradients([3, 4])]
    assert torch.equal(torch.cat(flat), kept.grads)
    assert all(parameter.grad is None for parameter in passed.parameters)


def test_a_gradient_that_lies_as_its_parameter_is_taken_without_a_copy():
    replica = Replica(nn.Linear(3, 2))
    replica.drop_gradients()
    replica.module(torch.ones(1, 3)).sum().backward()
    place = replica.parameters[0].grad.data_ptr()
    assert replica.take_gradients([0]).data_ptr() == place


def test_two_backwards_before_an_exchange_add_up_where_gradients_are_not_kept():
    replica = Replica(nn.Linear(3, 2))
    replica.drop_gradients()
    overlap, seen = Overlap(replica), []
    replica.module(torch.ones(1, 3)).sum().backward()
    overlap.arm(seen.append)
    replica.module(torch.ones(1, 3)).sum().backward()
    overlap.finish()
    assert seen[0].tolist() == [2.0] * 8
    replica.module(torch.ones(1, 3)).sum().backward()
    replica.zero_grad()
    assert replica.is_emptied()
