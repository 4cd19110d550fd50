"""The ladder of exploration: a constant rate per actor."""

import numpy as np
import pytest
from support.wording import raising

from dure.errors import UsageError
from dure.rl.actor import ladder


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
        ((4, 4), "from 0"),
        ((4, -1), "from 0"),
        ((4, 0, 1.5), "between 0"),
        ((4, 0, 0.4, -1.0), "0"),
    ],
)
def test_values_out_of_range(arguments, message):
    with raising(UsageError, message):
        ladder(*arguments)
