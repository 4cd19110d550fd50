"""The times at which backward completes gradients, by operations of blocks."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import dure
from dure.job.job import load_job
from dure.job.replica import Replica
from dure.partition.backward import DeviceSpeed, Roofline, by_operations, even, stated
from dure.partition.blocks import blocks_of


def check_passes(frozen, passes, *, recompute):
    """`passes`: the end of the backward of each block, in forwards of a block; five values are moved in an update."""

    def model():
        blocks = nn.Sequential(nn.Flatten(), *(nn.Linear(8, 8) for _ in range(4)))
        for number in frozen:
            blocks[number].requires_grad_(False)
        return blocks

    data = dure.Data(torch.ones(4, 8), torch.zeros(4, dtype=torch.int64))
    job = load_job("digits-mlp").adjusted(model=model, train=data, recompute=recompute)
    replica = Replica(model())
    shape = by_operations(job, replica, batch=4, speed=DeviceSpeed(0.0))
    assert shape is not None
    done = {int(replica.layers[each.number].name.split(".")[0]): each.done for each in shape.tensors}
    last = max(passes.values())
    assert done == pytest.approx({block: end / last for block, end in passes.items()})
    assert shape.backward == pytest.approx(last / (last + 4))


@pytest.mark.parametrize(
    ("frozen", "passes"),
    [
        ((), {4: 2, 3: 4, 2: 6, 1: 7}),
        ((1,), {4: 2, 3: 4, 2: 5}),
        ((1, 2, 3), {4: 1}),
        ((3,), {4: 2, 2: 5, 1: 6}),
    ],
    ids=["none", "the first", "all but the last", "one inside"],
)
def test_backward_of_frozen_blocks_gives_the_gradient_of_their_inputs_alone(frozen, passes):
    check_passes(frozen, passes, recompute=False)


@pytest.mark.parametrize(
    ("frozen", "passes"),
    [((), {4: 3, 3: 6, 2: 9, 1: 11}), ((1,), {4: 3, 3: 6, 2: 8}), ((3,), {4: 3, 2: 8, 1: 10})],
    ids=["none", "the first", "one inside"],
)
def test_a_backward_that_recomputes_takes_a_forward_more_in_each_block_that_it_reaches(frozen, passes):
    check_passes(frozen, passes, recompute=True)


def test_a_forward_that_is_computed_again_lengthens_stated_and_even_backwards():
    """Forward is a third of a step, and a quarter with its repetition."""
    job = load_job("digits-mlp", recompute=True)
    replica = Replica(job.build(0))
    assert even(job, replica, 2 / 3).backward == pytest.approx(3 / 4)
    blocks = len(blocks_of(job, replica.module))
    shape = stated(job.adjusted(block_seconds=[(1.0, 3.0)] * blocks), replica)
    assert shape is not None
    assert shape.backward == pytest.approx(4 / 5)


def test_a_view_moves_nothing():
    """A dense layer of three dimensions is a product of matrices between two views."""
    inputs, layer = torch.empty(2, 3, 8, device="meta"), nn.Linear(8, 4, bias=False, device="meta")
    with torch.no_grad(), Roofline(DeviceSpeed(100.0, start=7.0)) as found:
        layer(inputs)
    assert found.operations == 100 * 4 * (6 * 8 + 8 * 4 + 6 * 4) + 7


@pytest.mark.parametrize(
    ("intensity", "operations"), [(1.0, 2 * 2 * 8 * 64**2 * 16), (1000.0, 1000 * 2 * 4 * 8 * 64 * 16)]
)
def test_attention_is_one_operation_that_moves_its_inputs_and_outputs(intensity, operations):
    heads = torch.empty(2, 4, 64, 16, dtype=torch.float16, device="meta")
    with torch.no_grad(), Roofline(DeviceSpeed(intensity, start=7.0)) as found:
        scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    assert found.operations == operations + 7
