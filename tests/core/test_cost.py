"""Fits of costs: exact where the figures are, and the best there are with slopes of at least 0 where they are not."""

import numpy as np
import pytest

from dure.core.cost import codec_cost, fit
from dure.errors import UsageError

SIZES = [1 << power for power in range(16, 22)]


def wild(seed):
    """Rows of messages whose seconds scatter; a byte costs nothing in some of them."""
    rng = np.random.default_rng(seed)
    return [
        (size, count * size, 1e-3 * rng.lognormal(0.0, 1.0) + seed % 3 * size * 1e-9)
        for size in SIZES
        for count in (1, 3, 3)
    ]


def scaled(rows):
    """The columns of the fit for relative errors, each of about the same size, and the sizes."""
    table = np.array(rows)
    x, y = table[:, :-1], table[:, -1:]
    return np.hstack([np.ones_like(y), x / x.max(axis=0)]) / y, np.array([1.0, *x.max(axis=0)])


def coefficients(rows):
    found = fit(rows)
    return np.array([found.start, *found.slopes]) * scaled(rows)[1]


def test_a_fit_weighs_relative_errors():
    rng = np.random.default_rng(0)
    sizes = np.geomspace(1e3, 1e8, 60)
    line = fit([(size, (1e-3 + 1e-7 * size) * rng.uniform(0.99, 1.01)) for size in sizes])
    assert line.start == pytest.approx(1e-3, rel=0.01)
    assert line.slopes[0] == pytest.approx(1e-7, rel=0.01)
    assert 0.004 < line.residual < 0.007


def test_a_slope_that_would_be_negative_is_0_and_the_others_are_fitted_without_it():
    falling = fit([(0.0, 2.0), (1.0, 1.0)])
    assert (falling.slopes, falling.start) == ((0.0,), pytest.approx(1.2))  # the sum of 1 / y over that of 1 / y^2
    rows = [(a, b, 10 + 2 * a - b) for a in (1.0, 2.0, 3.0) for b in (0.0, 1.0, 2.0)]
    both, alone = fit(rows), fit([(a, y) for a, _, y in rows])
    assert both.slopes == (pytest.approx(alone.slopes[0]), 0.0)
    assert (both.start, both.residual) == pytest.approx((alone.start, alone.residual))


def test_a_start_may_be_negative():
    assert fit([(1.0, 1.0), (2.0, 3.0), (3.0, 5.0)]).start == pytest.approx(-1.0)


def test_three_slopes_come_out_of_exact_figures():
    rng = np.random.default_rng(0)
    x = rng.uniform(1.0, 2.0, (9, 3))
    found = fit(np.hstack([x, 0.5 + x @ [[1e-6], [0.0], [3.0]]]).tolist())
    assert found.start == pytest.approx(0.5)
    assert found.slopes == pytest.approx((1e-6, 0.0, 3.0))


def test_a_fit_is_the_best_there_is_however_wild_the_figures():
    """The derivative of the errors is 0 by each positive coefficient, and not negative by one that is 0."""
    zeros = 0
    for seed in range(20):
        rows = wild(seed)
        matrix, found = scaled(rows)[0], coefficients(rows)
        derivative = matrix.T @ (matrix @ found - 1) / np.linalg.norm(matrix, axis=0)
        free = np.array([True, *(found[1:] > 0)])
        assert np.abs(derivative[free]).max() < 1e-6, seed
        assert derivative.min() > -1e-6, seed
        assert found[1:].min() >= 0, seed
        zeros += np.count_nonzero(~free)
    assert 5 < zeros < 35


def test_a_fit_is_that_of_bounded_least_squares():
    lsq_linear = pytest.importorskip("scipy.optimize").lsq_linear
    for seed in range(20):
        matrix, _ = scaled(wild(seed))
        bounds = [-np.inf, *[0.0] * (matrix.shape[1] - 1)], np.inf
        expected = lsq_linear(matrix, np.ones(len(matrix)), bounds, method="bvls", tol=1e-14).x
        assert coefficients(wild(seed)) == pytest.approx(expected, rel=1e-7, abs=2e-9), seed


def test_too_few_figures_are_refused():
    with pytest.raises(UsageError, match="do not determine 2 constants"):
        fit([(1.0, 2.0)])
    with pytest.raises(UsageError, match="do not determine"):
        fit([(1.0, 2.0), (1.0, 2.1)])


def test_a_codec_s_lines_come_out_of_what_they_show():
    sizes = (100, 400, 1600)
    points = {"encode": (1e-5, 2e-9), "decode": (0.0, 3e-9), "combine": (2e-4, 0.0)}
    shown = {name: [(n, start + n * value) for n in sizes] for name, (start, value) in points.items()}
    cost = codec_cost(shown)
    for name, (start, value) in points.items():
        line = getattr(cost, name)
        assert (line.start, line.value) == pytest.approx((start, value), rel=1e-3, abs=1e-15)
    once = codec_cost({name: [(1, 5e-6)] for name in points})
    assert (once.encode.start, once.encode.value) == (5e-6, 0)
