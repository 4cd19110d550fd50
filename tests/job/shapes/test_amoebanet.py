"""AmoebaNet-D without values: parameters are those of GPipe's table, and cells are blocks of pipelines."""

from __future__ import annotations

import pytest
import torch
from support.runs import virtual
from support.wording import raising

from dure.core.flop_counter import FlopCounter
from dure.errors import UsageError
from dure.job.job import load_job
from dure.job.shapes.amoebanet import activated, narrowed
from dure.partition.blocks import blocks_of
from dure.partition.borders import measure

PUBLISHED = {(18, 208): 81.5e6, (18, 416): 319.0e6, (18, 544): 542.7e6, (36, 544): 1.06e9, (72, 512): 1.84e9}
"""Parameters by layers and filters: table 1 of GPipe, as torchgpipe counts them (github.com/kakaobrain/torchgpipe)."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sizes", PUBLISHED)
def test_parameters_are_the_published_ones(sizes: tuple[int, int]) -> None:
    module = load_job("amoebanet-d:layers={},filters={}".format(*sizes)).build()
    assert sum(each.numel() for each in module.parameters()) == pytest.approx(PUBLISHED[sizes], rel=5e-3)


def test_cells_halve_the_pixels_and_pass_the_outputs_of_two() -> None:
    job = load_job("amoebanet-d:layers=3,filters=16")
    module = job.build()
    blocks = blocks_of(job, module)
    inputs, _ = job.train.batch(torch.arange(2))
    found = measure(blocks, lambda block, value: block(value), inputs)
    borders = [[each.shape[1:] for each in found.border(number).tensors] for number in range(1, len(blocks) + 1)]
    assert borders == [
        [(4, 112, 112)],
        [(24, 56, 56), (4, 112, 112)],
        [(48, 28, 28), (24, 56, 56)],
        [(64, 28, 28), (48, 28, 28)],
        [(96, 14, 14), (64, 28, 28)],
        [(128, 14, 14), (96, 14, 14)],
        [(192, 7, 7), (128, 14, 14)],
        [(256, 7, 7), (192, 7, 7)],
        [(1000,)],
    ]


@pytest.mark.long
def test_operations_grow_with_the_square_of_the_filters() -> None:
    """Of the convolutions of cells, which have filters in their inputs and outputs."""

    def operations(filters: int) -> list[float]:
        job = load_job(f"amoebanet-d:layers=3,filters={filters}")
        inputs, _ = job.train.batch(torch.arange(2))
        with torch.no_grad():
            costs = measure(blocks_of(job, job.build()), lambda block, value: block(value), inputs).costs
        return [each.flops for each in costs[1:-1]]

    for small, large in zip(operations(32), operations(64), strict=True):
        assert large == 4 * small


def test_strides_of_narrow_convolutions_are_along_their_kernel() -> None:
    images = torch.zeros(1, 8, 12, 12)
    assert narrowed(8, 2, (1, 7), (7, 1))(images).shape == (1, 8, 6, 6)
    assert narrowed(8, 2, 3)(images).shape == (1, 8, 6, 6)
    with FlopCounter() as counter:
        activated(8, 2)(images)
    assert counter.get_total_flops() == 2 * 8 * 2 * 144


@pytest.mark.long  # ten blocks are measured without values, in seconds
def test_pipelines_cut_between_cells() -> None:
    job = load_job("amoebanet-d:layers=3,filters=16,batch=4")
    run = virtual(job, "bsp gpipe:stages=3,micro=2,cuts=3/5,remat=true", workers=3, steps=1, timing_only=True)
    assert run.summary["seconds"] > 0


@pytest.mark.parametrize(("sizes", "words"), [("layers=4", "multiple of 3"), ("filters=12", "multiple of 8")])
def test_sizes_that_do_not_divide_are_refused(sizes: str, words: str) -> None:
    with raising(UsageError, words):
        load_job(f"amoebanet-d:{sizes}")
