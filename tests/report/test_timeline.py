"""The beginning of a run over pipelines, as the report draws it from a trace."""

from dataclasses import replace

import pytest
from support.gantt_charts import picture_in

from dure.core.meter import Span
from dure.core.target import Target
from dure.report.html import render
from dure.report.trace import ACTIONS, MOST, timeline, write_trace


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


def read(found):
    """The bars of each worker: kind, start, end, texts, and the chunk of an action, of which a later one is darker."""
    return {name: [(b.kind, b.start, b.end, *b.lines, b.shade) for b in bars] for name, bars in found.items()}


def test_the_actions_of_each_worker_are_read_from_a_trace(tmp_path):
    assert read(traced(tmp_path, spans(2))) == {
        "worker 0": [("F", 0, 1, "F0", "w0", 0), ("F", 2, 3, "F1", "w1", 0)],
        "worker 1": [("W", 1, 1.5, "W0.1'", "w0+2", 1), ("W", 3, 3.5, "W1.1'", "w1+2", 1)],
    }


def test_an_action_may_read_no_weights(tmp_path):
    """The step of a synthesizer."""
    found = traced(tmp_path, [Span("worker 0", "compute", 0, 1, "S4")])
    assert read(found) == {"worker 0": [("S", 0, 1, "S4", "", 0)]}


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
    found = picture_in(part[: part.index("</section>")])
    forwards, backwards = found.rows.values()
    assert list(found.rows) == ["worker 0", "worker 1"]
    assert [(bar.start, bar.end, *bar.texts) for bar in forwards] == [
        (pytest.approx(2 * number, abs=1e-3), pytest.approx(2 * number + 1, abs=1e-3), f"F{number}", f"w{number}")
        for number in range(3)
    ]
    assert {bar.color for bar in forwards} == {ACTIONS["F"].color}
    assert [bar.texts for bar in backwards] == [(f"W{number}.1'", f"w{number}+2") for number in range(3)]
    assert all(bar.color < ACTIONS["W"].color for bar in backwards), "darker, since it is the second chunk"
    assert set(found.legend.values()) == {"forward", "backward: gradient of the weights", "no action"}
    assert found.unit == "s"
    assert page(run) == text


def test_names_in_a_trace_are_text(tmp_path, made):
    traced(tmp_path, [Span("worker <b>", "compute", 0, 1, "F0 w0")])
    assert "<b>" not in page(replace(made("bsp"), path=tmp_path))
