"""Pictures of activities over time: the facts that an SVG and a text show."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from matplotlib.font_manager import FontProperties, findfont, get_font
from support.gantt_charts import Drawn, picture_in

from dure.report.gantt import GROUND, WIDTHS, Bar, BarKind, BarRow, Gantt, svg, text, text_width


@pytest.mark.parametrize("character", [*WIDTHS, *"0123456789"])
def test_characters_are_as_wide_as_those_of_dejavu_sans(character):
    font = get_font(findfont(FontProperties(family="DejaVu Sans")))
    font.set_size(100, 72)
    width = font.load_char(ord(character)).linearHoriAdvance / 65536 / 100
    assert width - 0.01 < text_width(character) < width + 0.01


KINDS = {
    "run": BarKind("#9cc8f2", "runs", "3"),
    "send": BarKind("#f6cd83", "sends", sign="~"),
    "none": BarKind("#123456", "-"),
}


def chart(bars, *, end=2.0, unit="s", **more):
    return Gantt(
        "a <title>", "about it", {"worker 0": BarRow(bars), "worker 1": BarRow([])}, end, KINDS, unit=unit, **more
    )


@pytest.mark.parametrize(
    ("end", "unit", "shown", "last"),
    [
        (0.25, "s", "ms", 250),
        (0.7, "s", "ms", 700),  # 0.7 / 0.001 / 100 is less than 7
        (4.0, "s", "s", 4),
        (1200.0, "s", "min", 20),
        (9e4, "s", "h", 25),
        (30, "tick", "ticks", 30),
    ],
)
def test_the_axis_has_a_unit_and_round_numbers_to_the_end(end, unit, shown, last):
    found = picture_in(svg(chart([Bar("run", 0.0, end, ("F1", "w0"))], end=end, unit=unit)))
    assert found.unit == shown
    steps = {round(after - before, 9) for before, after in pairwise(found.numbers)}
    assert len(steps) == 1
    assert steps.pop() in (0.5, 1, 2, 5, 50, 100)
    assert found.numbers[0] == 0
    assert found.numbers[-1] == last or last - found.numbers[-1] < found.numbers[1]


def test_each_bar_is_drawn_at_its_time_in_the_color_of_its_kind():
    bars = [Bar("run", 0.0, 0.5, ("1", "w0")), Bar("send", 0.5, 0.75, ("push",), "to server 0"), Bar("run", 1.5, 9.0)]
    found = picture_in(svg(chart(bars)))
    assert found.rows == {
        "worker 0": [
            Drawn(pytest.approx(0), pytest.approx(0.5), "#9cc8f2", ("1", "w0"), ""),
            Drawn(pytest.approx(0.5), pytest.approx(0.75), "#f6cd83", ("push",), "to server 0"),
            Drawn(pytest.approx(1.5), pytest.approx(2.0), "#9cc8f2", (), ""),
        ],
        "worker 1": [],
    }
    assert found.legend == {"#9cc8f2": "runs", "#f6cd83": "sends"}


def test_the_ground_the_marks_and_the_notes_are_in_the_legend():
    made = chart([Bar("run", 0, 1)], idle="idle", mark="update", notes=("Read it so.",))
    made = replace(made, rows={"worker 0": replace(made.rows["worker 0"], marks=[0.5, 2.0])})
    found = picture_in(svg(made))
    assert found.marks == {"worker 0": [pytest.approx(0.5), pytest.approx(2.0)]}
    assert found.legend[GROUND] == "idle"
    assert found.words[-2:] == ["update", "Read it so."]


def test_a_larger_shade_is_darker():
    made = chart([Bar("run", shade, shade + 1, shade=shade) for shade in range(3)], end=3)
    shades = [int(bar.color[1:3], 16) for bar in picture_in(svg(made)).rows["worker 0"]]
    assert shades[0] == int(KINDS["run"].color[1:3], 16)
    assert shades[0] > shades[1] > shades[2]


def test_lanes_divide_the_height_of_a_row():
    found = re.findall(r'y="([\d.]+)" width="[\d.]+" height="([\d.]+)" fill="#(?:9cc8f2|f6cd83)" stroke', svg(LANES))
    (above, high), (below, low) = (map(float, each) for each in found)
    assert high == low == 17
    assert below == above + 17


LANES = chart([Bar("run", 0, 1), Bar("send", 0.5, 2, lane=1)])


def test_texts_fit_into_their_bars_or_are_left_out():
    bars = [Bar("run", 0, 1, ("W10.7",)), Bar("run", 1, 1.04, ("W11.7",)), Bar("run", 1.1, 1.11, ("W12.7",))]
    found = [
        (float(width), float(size or 0))
        for width, size in re.findall(
            r'width="([\d.]+)" height="34" fill="#9cc8f2".*\n(?:<text.*font-size="([\d.]+)")?', svg(chart(bars))
        )
    ]
    assert [size > 0 for _, size in found] == [True, False, False]
    assert found[0][1] == 13
    (width, size), *_ = found
    assert size * text_width("W10.7") < width


def test_a_bar_that_is_always_drawn_has_a_width_without_time():
    bars = [Bar("send", 1.0, 1.0), Bar("send", 1.5, 1.5, always=True)]
    gone, kept = picture_in(svg(chart(bars))).rows["worker 0"]
    assert gone.end == pytest.approx(1.0)
    assert kept.end > 1.504
    assert text(chart(bars), 31).splitlines()[0] == "worker 0 |               ~    |"


def test_a_bar_without_time_at_the_end_makes_no_row_longer():
    bars = [Bar("run", 0.0, 2.0), Bar("send", 2.0, 2.0, always=True)]
    first, second = text(chart(bars), 31).splitlines()
    assert len(first) == len(second) == 31


def test_the_legend_goes_on_in_a_new_line_where_the_picture_ends():
    kinds = {name: BarKind("#9cc8f2", name * 60) for name in "abcd"}
    made = svg(replace(chart([Bar(name, 0, 1) for name in kinds]), kinds=kinds))
    width = float(re.search(r'<svg[^>]* width="([\d.]+)"', made).group(1))
    places = [
        tuple(map(float, each)) for each in re.findall(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*>(?:a|b|c|d){60}<', made)
    ]
    assert len(places) == len(set(places)) == 4
    assert all(x + 6.6 * 60 <= width for x, _ in places)


def test_names_are_text_and_long_ones_are_cut():
    shown = svg(replace(chart([Bar("run", 0, 1)]), rows={"<b>" + "x" * 30: BarRow([Bar("run", 0, 1, about="<i>")])}))
    assert "<b>" not in shown
    assert "<i>" not in shown
    (name,) = picture_in(shown).rows
    assert name == "<b>" + "x" * 22 + "\N{HORIZONTAL ELLIPSIS}"
