"""Short real runs of the probe: what their steps say, and what the slowest of several takes."""

from __future__ import annotations

import numpy as np
import pytest

from dure.planner.probe.short_runs import PERIOD, WARM, Steps, _beyond, _plain_gaps, described, short_runs, slowest


def test_steps_are_described_by_their_mean_and_the_spread_of_their_logarithms() -> None:
    rng = np.random.default_rng(0)
    times = [list(2e-3 * np.exp(0.3 * rng.standard_normal(4000) - 0.045)) for _ in range(2)]
    steps = described(times)
    assert steps.seconds == pytest.approx(2e-3, rel=0.02)
    assert steps.sigma == pytest.approx(0.3, rel=0.06)


def test_a_rare_long_step_counts_in_the_mean_and_not_in_the_spread() -> None:
    steps = described([[1e-3] * 199 + [0.2]])
    assert steps.seconds == pytest.approx((199 * 1e-3 + 0.2) / 200)
    assert steps.sigma == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("period", [1, 8])
def test_workers_alike_wait_for_nobody(period: int) -> None:
    assert slowest(Steps(1e-3, 0.0), workers=4, period=period) == pytest.approx(period * 1e-3)


def test_the_slowest_of_two_takes_longer_by_the_mean_difference() -> None:
    """The larger of two normal variables of standard deviation s is s / sqrt(pi) above the mean."""
    sigma = 0.05
    assert slowest(Steps(1.0, sigma), workers=2, period=1) == pytest.approx(1 + sigma / np.sqrt(np.pi), rel=2e-3)
    assert slowest(Steps(1.0, sigma), workers=2, period=4) == pytest.approx(4 + 2 * sigma / np.sqrt(np.pi), rel=2e-3)


@pytest.mark.long
def test_short_runs_give_every_worker_s_steps_and_the_meetings() -> None:
    found = short_runs("digits-mlp", None, 2, step=0.1)
    assert len(found["steps"]) == 2
    assert all(min(each) > 0 and len(each) == 31 for each in found["steps"])  # 40 begun, the first 8 not counted
    assert min(found["all_reduce"], found["gradient"]) >= 0


def test_an_all_reduce_is_found_whatever_the_speed_of_the_machine_in_its_run() -> None:
    """Steps of 3 ms, and 7 ms of all_reduce after each eighth."""
    ends = np.cumsum([3e-3 + (7e-3 if number % PERIOD == 0 else 0.0) for number in range(1, 81)])
    begun = [[0.0, *ends.tolist()]] * 2
    plain = _plain_gaps(begun[0])
    assert len(plain) == (80 - WARM) * (PERIOD - 1) // PERIOD
    assert plain == pytest.approx([3e-3] * len(plain))
    assert _beyond(begun, described([plain, plain]), PERIOD) == pytest.approx(7e-3)
