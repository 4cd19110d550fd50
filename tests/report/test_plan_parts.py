"""Parts of a plan's page: its rows, the memory of its workers, and their timeline."""

import math

import pytest
from support.gantt_charts import picture_in

from dure.report.gantt import svg
from dure.report.labels import NOTHING, compact_text, digits_text
from dure.report.plan_page import ACTIVITIES, best_row, memory_bars, plan_rows, render_plan, timeline


def row(strategy, rank, **given):
    return {"strategy": strategy, "rank": rank, "samples_per_second": 100.0 / rank, "seconds_per_step": 0.1, **given}


def test_rows_are_in_the_order_of_their_ranks_with_a_meter_of_the_most():
    found = plan_rows({"rows": [row("b", 2), row("a", 1)]})
    assert [(each.strategy, each.meter) for each in found] == [("a", 100), ("b", 50)]


def test_a_row_shows_a_dash_for_what_it_does_not_know():
    (found,) = plan_rows({"rows": [{"rank": 1, "strategy": "a", "samples_per_second": math.nan}]})
    assert {found.speed, found.step, found.target, found.memory, found.share, found.cost, found.sent} == {NOTHING}
    assert found.fits


def test_memory_above_the_limit_does_not_fit():
    (found,) = plan_rows({"rows": [row("a", 1, memory={"weights": 60, "gradient": 60}, memory_limit=100)]})
    assert (found.memory, found.share, found.fits) == ("120 B", "120 %", False)


def test_the_best_row_is_that_of_the_answer():
    rows = plan_rows({"rows": [row("a", 1, command="x"), row("b", 2, command="y"), row("b", 3, command="z")]})
    assert best_row({}, rows) is rows[0]
    assert best_row({"answer": {"strategy": "b"}}, rows) is rows[1]
    assert best_row({"answer": {"strategy": "b", "command": "z"}}, rows) is rows[2]
    assert best_row({}, []) is None


def test_machines_of_servers_are_named():
    found = plan_rows({"rows": [row("a", 1, servers=2), row("b", 2, servers=1), row("c", 3, servers=0)]})
    assert [each.servers for each in found] == ["+2 machines", "+1 machine", ""]


@pytest.mark.parametrize(
    ("value", "text"), [(None, NOTHING), (0.01234, "0.0123"), (1, "1.00"), (99.96, "100"), (12345.6, "12,346")]
)
def test_digits(value, text):
    assert digits_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.05, "0.05"), (200, "200"), (5000, "5k"), (2e6, "2M"), (1e11, "100G"), (1e13, "10T")],
)
def test_compact(value, text):
    assert compact_text(value) == text


def test_bars_of_memory_end_at_the_limit_if_they_come_near():
    def bars(limit):
        rows = [row("a", 1, memory={"weights": 30, "activations": 70}, memory_limit=limit), row("b", 2)]
        return memory_bars({"rows": rows})

    (near,) = bars(200)
    assert [part.width for part in near.parts] == pytest.approx([30 / 2.08, 70 / 2.08])
    assert near.limit == pytest.approx(100 / 1.04)
    (far,) = bars(10_000)
    assert sum(part.width for part in far.parts) == pytest.approx(100)
    assert far.limit is None
    (over,) = bars(50)
    assert over.limit == pytest.approx(50 / 1.04)
    assert not over.row.fits


def span(worker, kind, start, end, name=""):
    return {"worker": worker, "kind": kind, "start": start, "end": end, "name": name}


def test_spans_that_follow_one_another_fill_a_row():
    spans = [span("w0", "compute", 0, 1), span("w0", "wait", 1, 4), span("w1", "compute", 1, 2)]
    found = timeline({"timeline": {"strategy": "a", "seconds": 4.0, "spans": spans}})
    assert list(found.rows) == ["w0", "w1"]
    assert found.lanes == 1
    shown = picture_in(svg(found))
    assert shown.unit == "s"
    assert [(bar.color, bar.start, bar.end) for bar in shown.rows["w0"]] == [
        (ACTIVITIES["compute"].color, pytest.approx(0), pytest.approx(1)),
        (ACTIVITIES["wait"].color, pytest.approx(1), pytest.approx(4)),
    ]
    assert list(shown.legend.values()) == ["compute", "wait"]


def test_workers_are_in_the_order_of_their_numbers():
    spans = [span(name, "compute", 0, 1) for name in ("worker 10", "worker 9", "server 2", "server", "worker 1")]
    found = timeline({"timeline": {"spans": spans}})
    assert list(found.rows) == ["server", "server 2", "worker 1", "worker 9", "worker 10"]


def test_communication_beside_computing_has_a_lane():
    spans = [span("w0", "communicate", 0.5, 2), span("w0", "compute", 0, 1)]
    found = timeline({"timeline": {"spans": spans}})
    assert [(bar.kind, bar.lane) for bar in found.rows["w0"].bars] == [("communicate", 1), ("compute", 0)]
    assert found.end == 2


def test_a_timeline_leaves_out_thin_spans_and_says_how_many_workers():
    spans = [span(f"w{number}", "compute", 0, 10) for number in range(40)] + [span("w0", "wait", 0, 1e-4)]
    found = timeline({"timeline": {"spans": spans}})
    assert (len(found.rows), len(found.rows["w0"].bars)) == (32, 1)
    assert "8 more workers are not shown." in render_plan({"timeline": {"spans": spans}})
