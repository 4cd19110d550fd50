"""The ladder of exploration: a constant rate per actor."""

import numpy as np
import pytest

from dure.errors import UsageError
from dure.rl.exploration import ladder


def test_rates_of_eight_actors():
    expected = [0.4, 0.16, 0.064, 0.0256, 0.01024, 0.004096, 0.0016384, 0.00065536]
    assert [ladder(8, index) for index in range(8)] == pytest.approx(expected)


def test_the_mean_rate_of_the_paper():
    assert np.mean([ladder(360, index) for index in range(360)]) == pytest.approx(0.0626, abs=5e-5)


def test_few_actors():
    assert ladder(1, 0) == 0.4
    assert [ladder(2, index) for index in range(2)] == pytest.approx([0.4, 0.00065536])
    assert [ladder(3, index, epsilon=0.2, alpha=0) for index in range(3)] == [0.2] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 4), "numbered from 0 to 3, got 4"),
        ((4, -1), "numbered from 0 to 3, got -1"),
        ((4, 0, 1.5), "epsilon is a probability between 0 and 1, got 1.5"),
        ((4, 0, 0.4, -1.0), "alpha must be a number >= 0, got -1"),
    ],
)
def test_values_out_of_range(arguments, message):
    with pytest.raises(UsageError, match=message):
        ladder(*arguments)
