"""One weird trick against the whole network: its three schemes, on threads and in runs."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise
from typing import get_args

import pytest
import torch
from support.purposes import soaked
from support.runs import local, virtual
from support.shared_layers import HERE, conv_job
from support.ways import on_ways
from support.wording import raising
from torch import Tensor, nn

from dure.errors import UsageError
from dure.partition.methods.one_weird_trick import OneWeirdTrick
from dure.partition.tensor.trunk import Scheme
from dure.partition.tensor.ways import Ways
from dure.runtime.launch.fork_server import ForkServer

IMAGES = torch.randn(7, 2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
SCHEMES = get_args(Scheme)


def network(*dense: int) -> nn.Sequential:
    """One object is the activation behind several layers."""
    torch.manual_seed(0)
    relu = nn.ReLU()
    trunk = [nn.Conv2d(2, 3, 3, padding=1), relu, nn.MaxPool2d(2), nn.Conv2d(3, 4, 3), relu, nn.Flatten()]
    head = [layer for inputs, outputs in pairwise((4, *dense)) for layer in (nn.Linear(inputs, outputs), relu)]
    return nn.Sequential(*trunk, *head[:-1]).double()


@pytest.mark.sampled(12)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dense", [(6, 5), (8, 6, 3), (2,)])  # pairs of dense layers, one left over, and none
@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_scheme_equals_the_whole_network(scheme: Scheme, dense: tuple[int, ...], size: int) -> None:
    """7 samples: the workers have uneven numbers of them, and in a round of `mixed` some have none."""
    whole = network(*dense)
    outputs = whole(IMAGES)
    outputs.square().mean().backward()
    plan = OneWeirdTrick(size, scheme).plan(conv_job(), whole)

    def at(ways: Ways) -> tuple[Tensor, dict[str, Tensor | None]]:
        part = plan.apply(deepcopy(whole), ways)
        part.zero_grad()
        found = part(IMAGES)
        found.square().mean().backward()
        return found.detach(), {name: each.grad for name, each in part.named_parameters()}

    each = on_ways(size, at)
    shards = plan.shards(whole, size)
    for name, parameter in whole.named_parameters():
        assert parameter.grad is not None
        if name in plan.partial:
            total = sum(gradients[name] for _, gradients in each)
            torch.testing.assert_close(total, parameter.grad, rtol=0, atol=1e-12)
        for rank, (found, gradients) in enumerate(each):
            torch.testing.assert_close(found, outputs.detach(), rtol=0, atol=1e-12)
            if name not in plan.partial:
                right = shards[name][rank].of(parameter.grad) if name in shards else parameter.grad
                torch.testing.assert_close(gradients[name], right, rtol=0, atol=1e-12)


OPTIONS = {"steps": 5, "seed": 3, "dtype": "float64", "batch_size": 10, "optimizer": "momentum:lr=0.05,clip=1"}


@pytest.mark.parametrize(("scheme", "workers"), [("gather", 2), ("turns", 6), ("mixed", 3), *soaked(("gather", 8))])
def test_runs_equal_those_of_whole_networks(scheme, workers):
    """Six workers are two copies of the network of three ways each."""
    ways = 3 if workers == 6 else workers
    whole = virtual(conv_job(), "bsp collective", workers=workers // ways, **OPTIONS)
    split = virtual(
        conv_job(), f"bsp collective one-weird-trick:ways={ways},scheme={scheme}", workers=workers, **OPTIONS
    )
    torch.testing.assert_close(split.params, whole.params, rtol=0, atol=1e-12)


@pytest.mark.long
def test_processes_give_the_bits_of_virtual_time():
    text, strategy = f"{HERE}:conv_job", "bsp collective one-weird-trick:ways=2,scheme=mixed"
    virtually = virtual(text, strategy, workers=2, **OPTIONS)
    with ForkServer() as fork_server:
        really = local(text, strategy, workers=2, fork_server=fork_server, **OPTIONS)
    assert torch.equal(virtually.params, really.params)
    assert virtually.summary["bytes_sent"] == really.summary["bytes_sent"]


def test_other_models_and_too_small_batches_are_refused():
    with raising(UsageError, "convolution"):
        OneWeirdTrick().plan(conv_job(), nn.Sequential(nn.Linear(3, 4)))
    with raising(UsageError, "behind"):
        OneWeirdTrick().plan(conv_job(), nn.Sequential(nn.Linear(3, 4), nn.Conv2d(2, 3, 3)))
    with raising(UsageError, "LSTM"):
        OneWeirdTrick().plan(conv_job(), nn.LSTM(3, 4))
    with raising(UsageError, "mini-batch"):
        virtual(conv_job(), "bsp collective one-weird-trick:ways=3", workers=3, **OPTIONS | {"batch_size": 2})
