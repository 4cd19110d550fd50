"""Draws in proportion to weights: against a prefix sum over all weights, and against the law."""

import math

import numpy as np
import pytest
from scipy import stats

from dure.rl.replay import FAN_OUT, TOP, SumTree

SIZES = (1, 7, FAN_OUT, 1000, TOP, TOP + 1, TOP * FAN_OUT + 5)
"""Below one group, one level, and several levels with a part of a group at the end."""


def is_found(tree, weights, rng):
    """Every point finds what a prefix sum over all weights finds, those on a boundary of two slots included."""
    total = weights.sum()
    assert tree.total == total
    if total:
        points = np.concatenate([rng.random(100) * total, rng.integers(0, total, 100)])
        assert tree.find(points).tolist() == np.searchsorted(np.cumsum(weights), points, side="right").tolist()


@pytest.mark.parametrize("size", SIZES)
def test_finds_as_a_prefix_sum_over_all_weights(size):
    """Integer weights: all sums are exact."""
    rng, tree, weights = np.random.default_rng(size), SumTree(size), np.zeros(size)
    for _ in range(20):
        slots = rng.integers(0, size, 50)
        new = rng.integers(0, 9, 50).astype(float)
        tree.set(slots, new)
        for slot, weight in zip(slots, new, strict=True):
            weights[slot] = weight
        is_found(tree, weights, rng)
        start, end = sorted(rng.integers(0, size + 1, 2))
        tree.fill(slice(start, end), weights[start:end] + 1)
        weights[start:end] += 1
        is_found(tree, weights, rng)
    assert tree.weights(np.arange(size)).tolist() == weights.tolist()


def test_draws_follow_the_law():
    """Independent draws, not stratified ones: only those have a chi-square statistic."""
    weights = np.arange(1.0, 65.0)
    tree = SumTree(64)
    tree.fill(slice(0, 64), weights)
    drawn = tree.find(np.random.default_rng(0).random(100_000) * tree.total)
    found = stats.chisquare(np.bincount(drawn, minlength=64), weights / weights.sum() * 100_000)
    assert found.pvalue > 1e-3


def test_a_point_at_the_total_finds_the_last_slot_with_a_weight():
    tree = SumTree(TOP * FAN_OUT)
    tree.set(np.array([5, 300]), np.array([0.1, 0.2]))
    points = np.array([tree.total, math.nextafter(tree.total, math.inf), math.nextafter(tree.total, 0)])
    assert tree.find(points).tolist() == [300, 300, 300]


def test_no_point_finds_a_slot_without_weight():
    """Weights whose sums are rounded, among zeros: every boundary of two slots and its neighbors."""
    rng, size = np.random.default_rng(3), TOP * 4
    weights = np.where(rng.random(size) < 0.5, 0, rng.random(size) ** 8)
    tree = SumTree(size)
    tree.fill(slice(0, size), weights)
    bounds = np.concatenate([[0.0], np.cumsum(weights)])
    points = np.concatenate([bounds, np.nextafter(bounds, 0), np.nextafter(bounds, np.inf), [tree.total]])
    assert (weights[tree.find(points)] > 0).all()


def test_a_point_stays_in_its_group():
    """A node's sum may be above the prefix sum of its children by rounding: a point between them is of the last one."""
    rng, between = np.random.default_rng(5), 0
    for _ in range(50):
        tree, weights = SumTree(TOP + 1), rng.random(FAN_OUT)
        tree.fill(slice(FAN_OUT, 2 * FAN_OUT), weights)
        point = math.nextafter(tree.total, 0)
        between += np.cumsum(weights)[-1] <= point
        assert tree.find(np.array([point])).tolist() == [2 * FAN_OUT - 1]
    assert between > 5


def test_many_updates_leave_no_rounding_errors():
    rng, size = np.random.default_rng(4), TOP * 2
    tree, weights = SumTree(size), np.zeros(size)
    for _ in range(300):
        slots, new = rng.integers(0, size, 64), rng.random(64) * 10.0 ** rng.integers(-9, 9, 64)
        tree.set(slots, new)
        weights[slots] = new
    anew = SumTree(size)
    anew.fill(slice(0, size), weights)
    assert tree.total == anew.total
    points = rng.random(1000) * anew.total
    assert tree.find(points).tolist() == anew.find(points).tolist()


def test_of_two_weights_of_one_slot_the_last_stays():
    tree = SumTree(100)
    tree.set(np.full(33, 7), np.arange(33.0))
    assert tree.total == 32
