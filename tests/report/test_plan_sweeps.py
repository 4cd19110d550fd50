import math
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plan_values import RATE, plan_values

from dure.report import plan_sweeps
from dure.report.figures import OTHER
from dure.report.plan_page import plan_looks
from dure.report.plan_sweeps import Win, interpolated, winners


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
    found = plan_looks({"rows": many, "sweeps": {"batch": sweep}})
    assert len(found) == 31
    colored = [look for look in found.values() if look != OTHER]
    assert len(colored) == len(set(colored)) == 14
    assert (found["s1"].color, found["s1"].dash) == ("#0072b2", "")
    assert found["s30"] != OTHER
    assert found["new"] == OTHER


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
    made = plan_values()
    found = plan_sweeps.ranking(plan_sweeps.sweep(made, "bandwidth"), RATE)
    assert [each.strategy for each in found] == [each["strategy"] for each in made["rows"]]
    assert [each.value for each in found] == pytest.approx([each["samples_per_second"] for each in made["rows"]])
    assert all(first.fraction >= second.fraction for first, second in pairwise(found))


# ---- winners


def test_two_power_laws_cross_where_they_are_equal():
    """2 x and 8 x^(1/3) are equal at x = 8."""
    at = [1, 64]
    values = {"slow": [2, 128], "flat": [8, 8 * 64 ** (1 / 3)]}
    first, second = winners(at, values)
    assert (first.strategy, second.strategy) == ("flat", "slow")
    assert first.end == second.start == pytest.approx(8)
    assert (first.start, second.end) == (1, 64)


def test_a_winner_over_several_places_is_one():
    assert winners([1, 2, 4], {"a": [1, 2, 3], "b": [1, 1, 1]}) == [Win("a", 1, 4)]


def test_several_borders_between_two_places():
    """Three tangents: the middle one wins between the outer two."""
    values = {"a": [4, 4], "b": [2, 2 * 100**0.5], "c": [0.5, 50]}
    found = winners([1, 100], values)
    assert [win.strategy for win in found] == ["a", "b", "c"]
    assert [win.start for win in found[1:]] == pytest.approx([4, 16])


def test_of_strategies_that_cross_the_winner_at_one_place_the_fastest_rising_wins():
    found = winners([1, 100], {"a": [1, 1], "b": [1 / 10, 10], "c": [1 / 100, 100]})
    assert [win.strategy for win in found] == ["a", "c"]


def test_a_winner_over_many_places_is_one_whatever_the_rounding():
    at = [0.1 * step for step in range(1, 60)]
    assert any(low * (high / low) != high for low, high in pairwise(at))
    assert winners(at, {"a": at}) == [Win("a", at[0], at[-1])]


def test_of_equal_strategies_the_first_wins():
    assert winners([1, 2], {"a": [1, 1], "b": [1, 1]}) == [Win("a", 1, 2)]


def test_of_equal_strategies_at_the_start_the_faster_rising_wins():
    assert winners([1, 2], {"a": [1, 1], "b": [1, 2]}) == [Win("b", 1, 2)]


def test_a_strategy_wins_no_further_than_its_last_known_value():
    assert winners([1, 2, 4], {"a": [9, 9, None], "b": [1, 1, 1]}) == [Win("a", 1, 2), Win("b", 2, 4)]


def test_a_strategy_that_is_known_at_one_place_wins_there():
    found = winners([1, 2, 4], {"a": [None, 9, None], "b": [1, 1, 1]})
    assert found == [Win("b", 1, 2), Win("a", 2, 2), Win("b", 2, 4)]


def test_places_without_any_value_have_no_winner():
    assert winners([1, 2, 4, 8], {"a": [1, None, None, 1]}) == [Win("a", 1, 1), Win("a", 8, 8)]
    assert winners([1, 2], {"a": [None, None]}) == []
    assert winners([], {}) == []


@pytest.mark.parametrize(
    ("place", "value"), [(1, 10.0), (10, 100.0), (100, 1000.0), (1000, None), (0.5, None), (300, None), (1e4, 7.0)]
)
def test_interpolated(place, value):
    found = interpolated([1, 100, 1000, 10_000], [10.0, 1000.0, None, 7.0], place)
    assert found == (value if value is None else pytest.approx(value))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(1, 5))
def test_the_winner_has_the_largest_interpolated_value(seed, places, strategies):
    chance = random.Random(seed)
    at = [10.0**place for place in range(places)]
    some = [None, 1.0, 2.0, 5.0, 10.0, 33.0, 100.0]
    values = {f"s{number}": [chance.choice(some) for _ in at] for number in range(strategies)}
    found = winners(at, values)
    assert all(first.end <= second.start for first, second in pairwise(found))
    for _ in range(20):
        place = 10 ** chance.uniform(0, places - 1)
        here = {name: interpolated(at, line, place) for name, line in values.items()}
        known = [value for value in here.values() if value is not None]
        covering = [win for win in found if win.start <= place <= win.end]
        assert bool(covering) == bool(known)
        for win in covering:
            assert math.isclose(here[win.strategy], max(known), rel_tol=1e-9)
    for place, position in enumerate(at):
        known = [line[place] for line in values.values() if line[place] is not None]
        covering = [values[win.strategy][place] for win in found if win.start <= position <= win.end]
        assert max((value for value in covering if value is not None), default=None) == max(known, default=None)
