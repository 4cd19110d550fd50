import pytest

from dure.report import plan_bars


def row(strategy, rank, **given):
    return {"strategy": strategy, "rank": rank, "samples_per_second": 100.0 / rank, "seconds_per_step": 0.1, **given}


def test_bars_of_memory_end_at_the_limit_if_they_come_near():
    def bars(limit):
        rows = [row("a", 1, memory={"weights": 30, "activations": 70}, memory_limit=limit), row("b", 2)]
        return plan_bars.memory({"rows": rows})

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
    found = plan_bars.timeline({"timeline": {"strategy": "a", "seconds": 4.0, "spans": spans}})
    assert list(found.rows) == ["w0", "w1"]
    assert [(box.kind, box.start, box.width, box.lane) for box in found.rows["w0"]] == [
        ("compute", 0, 25, "full"),
        ("wait", 25, 75, "full"),
    ]


def test_workers_are_in_the_order_of_their_numbers():
    spans = [span(name, "compute", 0, 1) for name in ("worker 10", "worker 9", "server 2", "server", "worker 1")]
    found = plan_bars.timeline({"timeline": {"spans": spans}})
    assert list(found.rows) == ["server", "server 2", "worker 1", "worker 9", "worker 10"]


def test_communication_beside_computing_has_a_lane():
    spans = [span("w0", "communicate", 0.5, 2), span("w0", "compute", 0, 1)]
    found = plan_bars.timeline({"timeline": {"spans": spans}})
    assert [(box.kind, box.lane) for box in found.rows["w0"]] == [("communicate", "bottom"), ("compute", "top")]
    assert found.seconds == 2


def test_a_timeline_leaves_out_thin_spans_and_says_how_many_workers():
    spans = [span(f"w{number}", "compute", 0, 10) for number in range(40)] + [span("w0", "wait", 0, 1e-4)]
    found = plan_bars.timeline({"timeline": {"spans": spans}})
    assert (len(found.rows), found.hidden, len(found.rows["w0"])) == (32, 8, 1)
