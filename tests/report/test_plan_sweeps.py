import math
from itertools import pairwise

import pytest
from support.plan_values import RATE, plan_values

from dure.report import plan_sweeps


def plan(**parts):
    return {"rows": [row("a", 1), row("b", 2)], **parts}


def row(strategy, rank, **given):
    return {"strategy": strategy, "rank": rank, "samples_per_second": 100.0 / rank, "seconds_per_step": 0.1, **given}


def swept(**given):
    sweep = {"at": [1.0, 100.0], "samples_per_second": {"a": [1, 100], "b": [10, 10]}, "seconds_per_step": {}, **given}
    return plan(sweeps={"bandwidth": sweep})


def test_looks_are_one_for_each_strategy_and_winners_are_colored():
    many = [row(f"s{rank}", rank) for rank in range(1, 31)]
    sweep = {"at": [1, 2], "samples_per_second": {"s30": [1, 9], "s1": [2, 2], "new": [1, 1]}}
    found = plan_sweeps.looks({"rows": many, "sweeps": {"batch": sweep}})
    assert len(found) == 31
    colored = [look for look in found.values() if look != "other"]
    assert len(colored) == len(set(colored)) == 14
    assert found["s1"] == "c0 d0"
    assert found["s30"] != "other"
    assert found["new"] == "other"


def test_a_sweep_has_ascending_places_and_positive_values():
    found = plan_sweeps.sweep(
        swept(at=[100.0, 1.0, 0.0, math.inf], samples_per_second={"a": [9, 1, 5, 5], "b": [None, math.nan, 1, 1]}),
        "bandwidth",
    )
    assert found.at == [1, 100]
    assert found.ranked == {"a": [1, 9]}


@pytest.mark.parametrize("given", [{"at": []}, {"at": [1.0]}, {"samples_per_second": {}}])
def test_a_sweep_without_a_width_or_values_is_none(given):
    assert plan_sweeps.sweep(swept(**given), "bandwidth") is None
    assert plan_sweeps.sweep({}, "bandwidth") is None


def test_the_ranking_moves_with_the_place():
    found = plan_sweeps.sweep(swept(), "bandwidth")
    assert [(each.strategy, each.fraction) for each in plan_sweeps.ranking(found, 2.0)] == [
        ("b", 1),
        ("a", pytest.approx(0.2)),
    ]
    assert [each.strategy for each in plan_sweeps.ranking(found, 20.0)] == ["a", "b"]


def test_strategies_rank_by_the_score_if_there_is_one():
    found = plan_sweeps.sweep(swept(), "bandwidth")
    assert (found.by, [each.strategy for each in plan_sweeps.ranking(found, 1.0)]) == ("speed", ["b", "a"])
    found = plan_sweeps.sweep(swept(score={"a": [9, 9], "b": [3, 3]}), "bandwidth")
    assert (found.by, [each.strategy for each in plan_sweeps.ranking(found, 1.0)]) == ("score", ["a", "b"])


def test_the_ranking_at_the_plan_s_bandwidth_is_that_of_its_rows():
    given = plan_values()
    found = plan_sweeps.ranking(plan_sweeps.sweep(given, "bandwidth"), RATE)
    assert [each.strategy for each in found] == [each["strategy"] for each in given["rows"]]
    assert [each.value for each in found] == pytest.approx([each["samples_per_second"] for each in given["rows"]])
    assert all(first.fraction >= second.fraction for first, second in pairwise(found))
