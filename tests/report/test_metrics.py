import math

import pytest
from support.wording import raising

from dure.core.target import Target
from dure.report import TimeShare, VersionCounts, time_to


def test_staleness_is_weighted_by_updates():
    staleness = VersionCounts()
    staleness.add(10)
    staleness.add(0, count=3)
    staleness.add(2)
    assert staleness.as_dict() == {"mean": 12 / 5, "max": 10, "histogram": {"0": 3, "2": 1, "10": 1}}


def test_staleness_merges_and_comes_back_from_its_record():
    left, right = VersionCounts(), VersionCounts()
    left.add(1, count=2)
    right.add(1)
    right.add(5)
    left.merge(right)
    assert VersionCounts.from_dict(left.as_dict()) == left
    assert left.histogram == {1: 3, 5: 1}
    assert right.histogram == {1: 1, 5: 1}


def test_no_updates_have_no_staleness():
    assert VersionCounts().as_dict() == {"mean": 0.0, "max": 0, "histogram": {}}


def test_staleness_below_zero_is_refused():
    with raising(ValueError, "1"):
        VersionCounts().add(-1)


def test_shares_of_time_sum_to_one():
    share = TimeShare()
    share.add("compute", 3.0)
    share.add("wait", 0.5)
    other = TimeShare(communicate=0.5)
    share.merge(other)
    assert share.as_dict() == {"compute": 0.75, "communicate": 0.125, "wait": 0.125}


def test_no_time_has_no_shares():
    assert TimeShare().as_dict() == {"compute": 0.0, "communicate": 0.0, "wait": 0.0}


@pytest.mark.parametrize("seconds", [-1.0, math.nan])
def test_a_time_that_is_none_is_refused(seconds):
    share = TimeShare()
    with raising(ValueError, "0"):
        share.add("compute", seconds)
    assert share == TimeShare()


def test_time_to_is_the_first_row_that_reaches_it():
    accuracies = [None, 0.5, 0.94, 0.95, 0.9, 0.99]
    history = [{"seconds": 2.0 * place, "accuracy": value} for place, value in enumerate(accuracies)]
    assert time_to(history, Target(0.95)) == 6.0
    assert time_to(history, Target(0.945)) == 6.0
    assert time_to(history, Target(0.995)) is None
    assert time_to([{"seconds": 1.0}], Target(0.5)) is None


def test_time_to_refuses_per_cent():
    with raising(ValueError, "0.95"):
        time_to([], Target(95))
