"""Cuts by hand, by parameters and by blocks; the rules against every possible cut."""

from itertools import combinations, pairwise

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from support.wording import raising
from torch import nn

from dure.errors import StrategyError
from dure.job.models.mlp import mlp
from dure.job.shapes.images import vgg16
from dure.partition.cut import balanced, cut_of


def every_cut(sizes, trains, num_stages):
    """The cuts of which each stage has a block that trains."""
    for cuts in combinations(range(1, len(sizes)), num_stages - 1):
        if all(any(trains[start:stop]) for start, stop in pairwise((0, *cuts, len(sizes)))):
            yield cuts


def stages_of(sizes, cuts):
    return [sum(sizes[start:stop]) for start, stop in pairwise((0, *cuts, len(sizes)))]


@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 2, 3, 7, 20]), st.booleans()), min_size=1, max_size=8), st.integers(1, 4)
)
@example([(1, True), (5, True), (2, True), (3, True)], 3)  # the least sum of squares has a larger stage
@example([(20, True), *[(1, True)] * 4], 3)  # the least largest stage leaves the others free
@example([(5, False), (5, False), (1, True), (1, True)], 2)
def test_no_cut_has_a_smaller_largest_stage(blocks, num_stages):
    sizes, trains = zip(*blocks, strict=True)
    assume(sum(trains) >= num_stages)
    best = min(
        every_cut(sizes, trains, num_stages),
        key=lambda cuts: (
            max(stages_of(sizes, cuts)),
            sum(each**2 for each in stages_of(sizes, cuts)),
            [-each for each in cuts],
        ),
    )
    assert balanced(sizes, trains, num_stages) == best


def test_activations_stay_with_the_layer_before_them():
    layers = list(mlp(8, 8, 8, 8, 8))  # Flatten, then Linear and ReLU, and Linear at the end
    assert cut_of("parameters", layers, 4) == (3, 5, 7)
    assert cut_of("", layers, 2) == (5,)
    assert cut_of("even", layers, 4) == (3, 5, 7)
    assert cut_of("parameters", layers, 1) == ()


def test_parameters_and_blocks_are_different_rules():
    layers = list(mlp(1000, 10, 10, 10, 10))
    assert cut_of("parameters", layers, 2) == (3,)
    assert cut_of("even", layers, 2) == (5,)


def test_the_large_dense_layer_of_vgg16_is_a_stage_of_its_own():
    layers = list(vgg16().model())
    first, second = cut_of("parameters", layers, 3)
    dense = [each for each in layers[first:second] if isinstance(each, nn.Linear)]
    assert [(each.in_features, each.out_features) for each in dense] == [(25088, 4096)]


def test_cuts_by_hand_are_taken():
    assert cut_of("3/5", list(mlp(8, 8, 8, 8, 8)), 3) == (3, 5)


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        ("3", "cuts=3"),
        ("3/5/6", "makes 4"),
        ("5/3", "cuts=5/3"),
        ("3/3", "stage 1"),
        ("0/3", "stage 0"),
        ("3/8", "stage 2"),
        ("1/3", "stage 0"),
        ("4/5", "stage 1"),
        ("-1/3", "numbers"),
        ("3/", "model"),
        ("parameter", "parameters"),
    ],
)
def test_wrong_cuts_are_refused(cuts, message):
    with raising(StrategyError, message):
        cut_of(cuts, list(mlp(8, 8, 8, 8, 8)), 3)


def test_two_stages_have_one_block_number():
    with raising(StrategyError, "cuts=5"):
        cut_of("3/5", list(mlp(8, 8, 8, 8, 8)), 2)


@pytest.mark.parametrize("cuts", ["", "even", "1/2/3/4"])
def test_more_stages_than_blocks_with_parameters_are_refused(cuts):
    with raising(StrategyError, "need 5"):
        cut_of(cuts, list(mlp(8, 8, 8, 8, 8)), 5)


def test_a_frozen_block_is_no_stage():
    layers = list(mlp(8, 8, 8))
    layers[1].requires_grad_(False)
    with raising(StrategyError, "has 1"):
        cut_of("", layers, 2)
