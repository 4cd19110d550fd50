"""Networks on images without values: parameters, operations and blocks are the published ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.runs import virtual
from torch import nn

from dure.core.flop_counter import FlopCounter
from dure.job.job import Job, load_job
from dure.partition.blocks import blocks_of
from dure_jobs import image_shapes
from dure_jobs.image_shapes import inception_v3_shapes, resnet101_shapes
from dure_jobs.vgg16 import vgg16_shapes

JOBS = {"vgg16": vgg16_shapes, "resnet101": resnet101_shapes, "inception_v3": inception_v3_shapes}

PUBLISHED = {"vgg16": (138_357_544, 15.5e9), "resnet101": (44_549_160, 7.8e9), "inception_v3": (23_834_568, 5.7e9)}
"""Parameters, and multiply-adds of the forward of a sample."""


def numel(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())


def forward_operations(job: Job) -> float:
    inputs, _ = job.train.batch(torch.arange(2))
    with FlopCounter() as counter, torch.no_grad():
        outputs = job.build()(inputs)
    assert outputs.shape == (2, 1000)
    return counter.get_total_flops() / 2


@pytest.mark.parametrize("name", JOBS)
def test_parameters_and_operations_are_the_published_ones(name: str) -> None:
    parameters, multiply_adds = PUBLISHED[name]
    job = JOBS[name]()
    assert numel(job.build()) == parameters
    assert forward_operations(job) / 2 == pytest.approx(multiply_adds, rel=0.02)


@pytest.mark.parametrize(
    ("make", "count", "dense"), [(resnet101_shapes, 38, 2_049_000), (inception_v3_shapes, 22, 2_049_000)]
)
def test_units_modules_and_dense_layers_are_blocks(make: Callable[[], Job], count: int, dense: int) -> None:
    job = make()
    blocks = blocks_of(job, job.build())
    assert len(blocks) == count
    assert numel(blocks[-1]) == dense
    assert max(map(numel, blocks)) < 6_100_000  # the last units of ResNet and the last module of Inception


def test_a_bottleneck_adds_its_inputs() -> None:
    unit = image_shapes.Bottleneck(8, 2, 1).eval()
    assert isinstance(unit.shortcut, nn.Identity)
    nn.init.zeros_(unit.residual[2].weight)
    inputs = torch.rand(3, 8, 5, 5)
    assert torch.equal(unit(inputs), inputs)
    assert image_shapes.Bottleneck(8, 2, 2)(inputs).shape == (3, 8, 3, 3)


@pytest.mark.long  # 38 blocks are measured without values, in seconds
def test_names_and_pipelines_work() -> None:
    job = load_job(f"{Path(image_shapes.__file__)}:resnet101_shapes", batch_size=8)
    assert (job.name, job.batch_size) == ("resnet101", 8)
    run = virtual(job, "bsp gpipe:stages=2,micro=2,cuts=profile", workers=2, steps=1, timing_only=True)
    assert run.summary["seconds"] > 0
