"""The figures of a plan's page show the values of its sweeps and curves."""

import itertools
import re

import pytest
from support.drawn_curves import axes_of, curves_in

from dure.report.canvas import MOST_MARKS, round_marks
from dure.report.figures import OTHER, Look, losses, sweep
from dure.report.plan_sweeps import SweptValues

AT = [1.0, 2.0, 4.0, 8.0, 16.0]
LOOKS = {"a": Look("#111111", ""), "b": Look("#222222", "7 4"), "c": OTHER}


def drawn(*, now=None, bits=False, measure="speed", **lines):
    found = SweptValues(AT, now, "workers", {"speed": lines, measure: lines}, "speed")
    return sweep(found, measure, LOOKS, label="workers", text=lambda place: f"{place:g}", bits=bits)


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
    assert round_marks(low, high) == pytest.approx(expected)


def test_any_axis_has_some_marks_and_not_too_many():
    for low, ratio in itertools.product((1e-6, 0.37, 4.2, 9.9e8), (1.001, 1.5, 3, 9, 77, 1e4, 1e11)):
        found = round_marks(low, low * ratio)
        assert 2 <= len(found) <= MOST_MARKS
        assert all(low <= each <= low * ratio * (1 + 1e-9) for each in found)
        assert found == sorted(found)


def test_a_line_goes_through_the_values_of_its_strategy_and_is_broken_where_one_is_missing():
    found = curves_in(drawn(a=[10, 20, None, 80, 160], b=[100, 90, 80, 70, 60]))
    assert [
        [(pytest.approx(x, rel=0.01), pytest.approx(y, rel=0.01)) for x, y in part] for part in found["#111111"]
    ] == [[(1, 10), (2, 20)], [(8, 80), (16, 160)]]
    (line,) = found["#222222"]
    assert line == [pytest.approx(point, rel=0.01) for point in zip(AT, [100, 90, 80, 70, 60], strict=True)]
    assert '7 4"' not in drawn(a=[1, 2, 3, 4, 5])
    assert "stroke-dasharray: 12.6,7.2" in drawn(b=[1, 2, 3, 4, 5])


def test_steps_are_in_milliseconds_and_a_bandwidth_in_bits():
    (line,) = curves_in(drawn(measure="step", a=[0.1, 0.2, 0.3, 0.4, 0.5]))["#111111"]
    assert [y for _, y in line] == pytest.approx([100, 200, 300, 400, 500], rel=0.01)
    (line,) = curves_in(drawn(bits=True, a=[10, 20, 30, 40, 50]))["#111111"]
    assert [x for x, _ in line] == pytest.approx([8 * place for place in AT], rel=0.01)


def test_a_band_names_the_winner_where_it_wins():
    svg = drawn(a=[10, 20, 40, 80, 160], b=[40, 40, 40, 40, 40])
    x, _ = axes_of(svg)
    bands = re.findall(r'<path d="M ([\d.]+) [\d.]+ \nL ([\d.]+)[^"]*" style="fill: (#\w+); opacity: 0.25"', svg)
    assert [(x(float(start)), x(float(end)), color) for start, end, color in bands] == [
        (pytest.approx(1, rel=0.01), pytest.approx(4, rel=0.01), "#222222"),
        (pytest.approx(4, rel=0.01), pytest.approx(16, rel=0.01), "#111111"),
    ]
    assert re.findall(r"font-size: 8px[^>]*>([^<]*)</text>", svg) == ["b", "a"]


def test_the_place_of_the_plan_is_dotted():
    svg = drawn(now=8.0, a=[10, 20, 40, 80, 160])
    x, _ = axes_of(svg)
    (place,) = re.findall(r'<path d="M ([\d.]+) [\d.]+ \nL \1 [\d.]+ \n" clip[^>]*stroke-dasharray: 1.6,2.64', svg)
    assert x(float(place)) == pytest.approx(8, rel=0.01)
    assert "1.6,2.64" not in drawn(now=99.0, a=[10, 20, 40, 80, 160])


def test_losses_are_drawn_over_time_with_their_target():
    points = [(60.0 * minute, 5.0 * 0.8**minute) for minute in range(21)]
    svg = losses({"a": points}, LOOKS, 0.5)
    assert "predicted time (min)" in svg
    (line,) = curves_in(svg, log_x=False)["#111111"]
    assert line[0] == pytest.approx((0, 5.0), rel=0.02, abs=0.02)
    assert line[-1] == pytest.approx((20, 5.0 * 0.8**20), rel=0.02)
    _, y = axes_of(svg, log_x=False)
    (level,) = re.findall(r'<path d="M [\d.]+ ([\d.]+) \nL [\d.]+ \1 \n"[^>]*stroke-dasharray: 3.6,2.7', svg)
    assert y(float(level)) == pytest.approx(0.5, rel=0.02)
    assert ">0.5</text>" in svg
    assert "stroke-dasharray: 3.6,2.7" not in losses({"a": points}, LOOKS, None)
