"""Sums of squares of parts of gradients."""

import math

import pytest
import torch

from dure.topology.collective.sharded import squares_of


@pytest.mark.parametrize(
    ("part", "squares"),
    [
        (torch.full((4,), 1e25), 4e50),  # more than float32 holds
        (torch.full((300,), 1.0, dtype=torch.bfloat16), 300.0),  # a norm of bfloat16 would give 301.9
        (torch.full((4,), 300.0, dtype=torch.float16), 4 * 300.0**2),
        (torch.zeros(0), 0.0),
    ],
)
def test_squares_are_exact_in_each_precision(part, squares):
    assert squares_of(part, exact=True) == pytest.approx(squares, rel=1e-5)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_squares_of_a_gradient_that_is_not_finite_are_not_finite(value, exact):
    assert not math.isfinite(squares_of(torch.tensor([1.0, value]), exact=exact))
