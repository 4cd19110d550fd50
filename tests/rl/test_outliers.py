"""Gorila's filter of outliers, beside the statistics that numpy computes."""

from __future__ import annotations

import numpy as np
import pytest

from dure.rl.source import IN_A_ROW, OutlierFilter

LOSSES = [1.0, 1.2, 0.9, 1.1, 1.0, 8.0, 1.05]


def test_a_loss_far_above_the_mean_is_dropped_and_does_not_enter_it():
    found = OutlierFilter(3.0, warm_up=4, decay=1.0)
    assert [found.admits(loss) for loss in LOSSES] == [True] * 5 + [False, True]
    admitted = [loss for loss in LOSSES if loss != 8.0]
    assert found.mean == pytest.approx(np.mean(admitted), abs=1e-12)
    assert found.variance == pytest.approx(np.var(admitted), abs=1e-12)
    assert (found.count, found.dropped) == (6, 1)


def test_nothing_is_dropped_before_the_end_of_the_warm_up():
    found = OutlierFilter(0.0, warm_up=7)
    assert all(found.admits(loss) for loss in LOSSES)
    assert not found.admits(8.0)


def test_equal_losses_are_never_dropped_and_low_ones_neither():
    found = OutlierFilter(3.0, warm_up=2)
    assert all(found.admits(0.1) for _ in range(1000))
    assert found.admits(-5.0)


@pytest.mark.parametrize("decay", [0.9, 0.99])
def test_after_the_warm_up_old_losses_count_less(decay):
    losses = np.random.default_rng(0).random(60)
    found = OutlierFilter(100.0, warm_up=10, decay=decay)
    for loss in losses:
        assert found.admits(loss)
    weights = np.array([decay**50 / 10] * 10 + [(1 - decay) * decay**behind for behind in reversed(range(50))])
    mean = weights @ losses
    assert found.mean == pytest.approx(mean, rel=1e-12)
    assert found.variance == pytest.approx(weights @ (losses - mean) ** 2, rel=1e-12)


def test_larger_losses_that_stay_are_admitted_after_some_drops_in_a_row():
    found = OutlierFilter(3.0, warm_up=4)
    for loss in LOSSES[:5]:
        found.admits(loss)
    again = OutlierFilter(3.0, warm_up=4)
    assert [found.admits(50.0) for _ in range(4)] == [False] * 4
    again.restore(found.state())
    assert [again.admits(50.0) for _ in range(IN_A_ROW - 3)] == [False] * (IN_A_ROW - 4) + [True]
