import itertools

import pytest

from dure.report.plan_chart import Axis, around, bands, compact, drawn
from dure.report.winners import Win


def places(axis):
    return [float(tick.text) for tick in axis.ticks(repr)]


def test_a_place_is_a_percentage_of_the_logarithms():
    axis = Axis(1.0, 100.0)
    assert [axis.place(value) for value in (1, 10, 100)] == pytest.approx([0, 50, 100])
    assert Axis(0.0, 8.0, log=False).place(2) == 25


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1, 100, [1, 2, 5, 10, 20, 50, 100]),
        (15, 5000, [30, 100, 300, 1000, 3000]),
        (1e-3, 1e4, [1e-3, 1e-1, 1e1, 1e3]),
        (900, 1100, [900, 950, 1000, 1050, 1100]),
    ],
)
def test_marks_of_a_logarithmic_axis_are_round(low, high, expected):
    assert places(Axis(low, high)) == pytest.approx(expected)


def test_any_axis_has_some_marks_and_not_too_many():
    for low, ratio, log in itertools.product(
        (1e-6, 0.37, 4.2, 9.9e8), (1.001, 1.5, 3, 9, 77, 1e4, 1e11), (True, False)
    ):
        axis = Axis(low, low * ratio, log=log)
        found = axis.ticks(repr)
        assert 2 <= len(found) <= 7
        assert all(-1e-6 <= tick.place <= 100 + 1e-6 for tick in found)
        assert [tick.place for tick in found] == sorted(tick.place for tick in found)


@pytest.mark.parametrize(
    ("values", "log"), [([5.0], True), ([0.0, 0.0], False), ([-3.0, 4.0], False), ([1, 1e9], True)]
)
def test_values_stand_inside_of_their_axis(values, log):
    axis = around(values, log=log)
    assert all(0 < axis.place(value) < 100 for value in values)


def test_a_line_is_broken_where_a_value_is_missing():
    axis = Axis(1.0, 16.0)
    (line,) = drawn([1, 2, 4, 8, 16], {"a": [1, 2, None, None, 16]}, axis, axis, {"a": "c0"})
    assert line.path == "M0.0 1000.0L250.0 750.0M1000.0 0.0"
    assert line.dots == "M0.0 1000.0h0M250.0 750.0h0M1000.0 0.0h0"


def test_the_first_line_is_drawn_last():
    axis = Axis(1.0, 2.0)
    found = drawn([1, 2], {"a": [1, 2], "b": [1, 2]}, axis, axis, {"a": "c0", "b": "c1"})
    assert [(line.strategy, line.look) for line in found] == [("b", "c1"), ("a", "c0")]


def test_bands_cover_the_wins_that_have_a_width():
    wins = [Win("a", 1, 10), Win("b", 10, 10), Win("c", 10, 100)]
    first, second = bands(wins, Axis(1, 100), {"a": "c0", "b": "c1", "c": "c2"}, str)
    assert (first.strategy, first.start, first.width, first.border) == ("a", 0, pytest.approx(50), "1")
    assert (second.strategy, second.look, second.start, second.border) == ("c", "c2", pytest.approx(50), "10")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.05, "0.05"), (200, "200"), (5000, "5k"), (2e6, "2M"), (1e11, "100G"), (1e13, "10T")],
)
def test_compact(value, text):
    assert compact(value) == text
