"""Networks on images without values: parameters, operations and blocks are the published ones."""

from __future__ import annotations

import pytest
import torch
from support.runs import virtual
from torch import nn

from dure.core.flop_counter import FlopCounter
from dure.job.job import Job, load_job
from dure.job.shapes.images import Bottleneck
from dure.partition.blocks import blocks_of

PUBLISHED = {
    "resnet50": (25_557_032, 4.09e9),
    "resnet101": (44_549_160, 7.80e9),
    "resnet152": (60_192_808, 11.51e9),
    "resnext50-32x4d": (25_028_904, 4.23e9),
    "resnext101-32x8d": (88_791_336, 16.41e9),
    "inception-v3": (23_834_568, 5.71e9),
    "vgg16": (138_357_544, 15.47e9),
    "alexnet": (61_100_840, 0.71e9),
}
"""Parameters, and multiply-adds of the forward of a sample: those of torchvision's tables of weights."""


def numel(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())


def forward_operations(job: Job) -> float:
    inputs, _ = job.train.batch(torch.arange(2))
    with FlopCounter() as counter, torch.no_grad():
        outputs = job.build()(inputs)
    assert outputs.shape == (2, 1000)
    return counter.get_total_flops() / 2


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_operations_are_the_published_ones(name: str) -> None:
    parameters, multiply_adds = PUBLISHED[name]
    job = load_job(name)
    assert numel(job.build()) == parameters
    assert forward_operations(job) / 2 == pytest.approx(multiply_adds, rel=0.01)


@pytest.mark.parametrize(("name", "count"), [("resnet101", 38), ("inception-v3", 22)])
def test_units_modules_and_dense_layers_are_blocks(name: str, count: int) -> None:
    job = load_job(name)
    blocks = blocks_of(job, job.build())
    assert len(blocks) == count
    assert numel(blocks[-1]) == 2_049_000
    assert max(map(numel, blocks)) < 6_100_000  # the last units of ResNet and the last module of Inception


def test_a_bottleneck_adds_its_inputs() -> None:
    unit = Bottleneck(8, 2, 8).eval()
    assert isinstance(unit.shortcut, nn.Identity)
    nn.init.zeros_(unit.residual[2].weight)
    inputs = torch.rand(3, 8, 5, 5)
    assert torch.equal(unit(inputs), inputs)
    assert Bottleneck(8, 2, 8, 2)(inputs).shape == (3, 8, 3, 3)


@pytest.mark.long  # 38 blocks are measured without values, in seconds
def test_pipelines_work() -> None:
    job = load_job("resnet101:batch=8")
    assert (job.name, job.batch_size) == ("resnet101", 8)
    run = virtual(job, "bsp gpipe:stages=2,micro=2,cuts=profile", workers=2, steps=1, timing_only=True)
    assert run.summary["seconds"] > 0
