"""The beginning of a run over pipelines, as the report draws it from a trace."""

import re
from dataclasses import replace

import pytest

from dure.core.meter import Span
from dure.core.target import Target
from dure.core.text_width import text_width
from dure.report.html import render
from dure.report.timeline import ACTIONS, MOST, Bar, timeline
from dure.report.trace import write_trace


def spans(count=3):
    found = []
    for number in range(count):
        found += [
            Span("worker 0", "compute", 2.0 * number, 2.0 * number + 1, f"F{number} w{number}"),
            Span("worker 0", "send", 2.0 * number, 2.0 * number + 2, f"F{number} w0"),
            Span("worker 1", "wait", 2.0 * number, 2.0 * number + 1, f"B{number}.1'"),
            Span("worker 1", "compute", 2.0 * number + 1, 2.0 * number + 1.5, f"W{number}.1' w{number}+2"),
        ]
    return found


def traced(path, found):
    write_trace(path / "trace.json", found, time="virtual")
    return timeline(path / "trace.json")


def test_the_actions_of_each_worker_are_read_from_a_trace(tmp_path):
    assert traced(tmp_path, spans(2)) == {
        "worker 0": [Bar(0, 1, "F", "0", "w0"), Bar(2, 3, "F", "1", "w1")],
        "worker 1": [Bar(1, 1.5, "W", "0.1'", "w0+2"), Bar(3, 3.5, "W", "1.1'", "w1+2")],
    }


def test_an_action_may_read_no_weights(tmp_path):
    """The step of a synthesizer."""
    assert traced(tmp_path, [Span("worker 0", "compute", 0, 1, "S4")]) == {"worker 0": [Bar(0, 1, "S", "4", "")]}


def test_a_later_chunk_is_darker():
    shades = [int(Bar(0, 1, "F", "0" + "'" * chunk, "w0").color(3)[1:3], 16) for chunk in range(3)]
    assert shades[0] == int(ACTIONS["F"][1][1:3], 16)
    assert shades[0] > shades[1] > shades[2]


def test_a_long_trace_is_read_up_to_the_first_actions(tmp_path):
    path = tmp_path / "trace.json"
    found = traced(tmp_path, spans(MOST + 5))
    assert [len(row) for row in found.values()] == [MOST, MOST]
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: lines.index(next(each for each in lines if f'"F{MOST} w' in each)) + 1]) + "{torn")
    assert timeline(path) == found


def test_a_trace_without_a_pipeline_has_no_timeline(tmp_path):
    assert traced(tmp_path, [Span("worker 0", "compute", 0, 1, "gradient"), Span("worker 0", "apply", 1, 2)]) == {}


def page(run):
    return render([run], title="Runs", target=Target())


@pytest.mark.long
def test_the_report_shows_the_actions_in_color_with_their_legend(tmp_path, made):
    run = replace(made("bsp"), path=tmp_path)
    assert "Pipelines over time" not in page(run)
    traced(tmp_path, spans())
    text = page(run)
    part = text[text.index("Pipelines over time") :]
    part = part[: part.index("</section>")]
    for words in ("F2", "w2", "w0+2", "worker 1"):
        assert f">{words}</text>" in part
    assert part.lower().count(f"fill: {ACTIONS['F'][1].lower()}") == 3
    assert part.count(f"fill: {Bar(0, 1, 'W', chr(39), '').color(2)}") == 3, "darker, since it is the second chunk"
    assert "gradient of the weights" in part
    assert "gradient of the inputs" not in part
    assert page(run) == text


def test_a_label_is_as_small_as_its_bar_or_left_out(tmp_path, made):
    """The page has 10.2 inches for 40 s: 2 s are 37 points, 1 s is 18.4, and 0.1 s are 2."""
    traced(
        tmp_path,
        [
            Span("worker 0", "compute", start, end, f"W{number}.7 w0")
            for number, start, end in ((10, 0, 2), (11, 3, 4), (12, 5, 5.1), (13, 38, 40))
        ],
    )
    text = page(replace(made("bsp"), path=tmp_path))
    sizes = {
        words: float(size) for size, words in re.findall(r"<text[^>]*font-size: ([\d.]+)px[^>]*>(W[\d.]+)</text>", text)
    }
    assert sizes == {"W10.7": 7.5, "W11.7": pytest.approx(0.94 * 18.36 / text_width("W11.7"), rel=0.01), "W13.7": 7.5}


def test_names_in_a_trace_are_text(tmp_path, made):
    traced(tmp_path, [Span("worker <b>", "compute", 0, 1, "F0 w0")])
    assert "<b>" not in page(replace(made("bsp"), path=tmp_path))
