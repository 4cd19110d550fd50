import math
from itertools import pairwise

import pytest
from support.plan_values import RATE, plan_values

from dure.report import plan_values as values
from dure.report.comparison import NOTHING


def plan(**parts):
    return {"rows": [row("a", 1), row("b", 2)], **parts}


def row(strategy, rank, **given):
    return {"strategy": strategy, "rank": rank, "samples_per_second": 100.0 / rank, "seconds_per_step": 0.1, **given}


def swept(**given):
    sweep = {"at": [1.0, 100.0], "samples_per_second": {"a": [1, 100], "b": [10, 10]}, "seconds_per_step": {}, **given}
    return plan(sweeps={"bandwidth": sweep})


def test_rows_are_in_the_order_of_their_ranks_with_a_meter_of_the_most():
    found = values.rows({"rows": [row("b", 2), row("a", 1)]})
    assert [(each.strategy, each.meter) for each in found] == [("a", 100), ("b", 50)]


def test_a_row_shows_a_dash_for_what_it_does_not_know():
    (found,) = values.rows({"rows": [{"rank": 1, "strategy": "a", "samples_per_second": math.nan}]})
    assert {found.speed, found.step, found.target, found.memory, found.share, found.cost, found.sent} == {NOTHING}
    assert found.fits


def test_memory_above_the_limit_does_not_fit():
    (found,) = values.rows({"rows": [row("a", 1, memory={"weights": 60, "gradient": 60}, memory_limit=100)]})
    assert (found.memory, found.share, found.fits) == ("120 B", "120 %", False)


def test_the_best_row_is_that_of_the_answer():
    rows = values.rows({"rows": [row("a", 1, command="x"), row("b", 2, command="y"), row("b", 3, command="z")]})
    assert values.best({}, rows) is rows[0]
    assert values.best({"answer": {"strategy": "b"}}, rows) is rows[1]
    assert values.best({"answer": {"strategy": "b", "command": "z"}}, rows) is rows[2]
    assert values.best({}, []) is None


def test_looks_are_one_for_each_strategy_and_winners_are_colored():
    many = [row(f"s{rank}", rank) for rank in range(1, 31)]
    sweep = {"at": [1, 2], "samples_per_second": {"s30": [1, 9], "s1": [2, 2], "new": [1, 1]}}
    found = values.looks({"rows": many, "sweeps": {"batch": sweep}})
    assert len(found) == 31
    colored = [look for look in found.values() if look != "other"]
    assert len(colored) == len(set(colored)) == 14
    assert found["s1"] == "c0 d0"
    assert found["s30"] != "other"
    assert found["new"] == "other"


def test_a_sweep_has_ascending_places_and_positive_values():
    found = values.sweep(
        swept(at=[100.0, 1.0, 0.0, math.inf], samples_per_second={"a": [9, 1, 5, 5], "b": [None, math.nan, 1, 1]}),
        "bandwidth",
    )
    assert found.at == [1, 100]
    assert found.ranked == {"a": [1, 9]}


@pytest.mark.parametrize("given", [{"at": []}, {"at": [1.0]}, {"samples_per_second": {}}])
def test_a_sweep_without_a_width_or_values_is_none(given):
    assert values.sweep(swept(**given), "bandwidth") is None
    assert values.sweep({}, "bandwidth") is None


def test_the_ranking_moves_with_the_place():
    found = values.sweep(swept(), "bandwidth")
    assert [(each.strategy, each.fraction) for each in values.ranking(found, 2.0)] == [
        ("b", 1),
        ("a", pytest.approx(0.2)),
    ]
    assert [each.strategy for each in values.ranking(found, 20.0)] == ["a", "b"]


def test_strategies_rank_by_the_score_if_there_is_one():
    found = values.sweep(swept(), "bandwidth")
    assert (found.by, [each.strategy for each in values.ranking(found, 1.0)]) == ("speed", ["b", "a"])
    found = values.sweep(swept(score={"a": [9, 9], "b": [3, 3]}), "bandwidth")
    assert (found.by, [each.strategy for each in values.ranking(found, 1.0)]) == ("score", ["a", "b"])


def test_machines_of_servers_are_named():
    found = values.rows({"rows": [row("a", 1, servers=2), row("b", 2, servers=1), row("c", 3, servers=0)]})
    assert [each.servers for each in found] == ["+2 machines", "+1 machine", ""]


def test_the_ranking_at_the_plan_s_bandwidth_is_that_of_its_rows():
    given = plan_values()
    found = values.ranking(values.sweep(given, "bandwidth"), RATE)
    assert [each.strategy for each in found] == [each["strategy"] for each in given["rows"]]
    assert [each.value for each in found] == pytest.approx([each["samples_per_second"] for each in given["rows"]])
    assert all(first.fraction >= second.fraction for first, second in pairwise(found))


def test_bars_of_memory_end_at_the_limit_if_they_come_near():
    def bars(limit):
        rows = [row("a", 1, memory={"weights": 30, "activations": 70}, memory_limit=limit), row("b", 2)]
        return values.memory({"rows": rows})

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
    found = values.timeline({"timeline": {"strategy": "a", "seconds": 4.0, "spans": spans}})
    assert list(found.rows) == ["w0", "w1"]
    assert [(box.kind, box.start, box.width, box.lane) for box in found.rows["w0"]] == [
        ("compute", 0, 25, "full"),
        ("wait", 25, 75, "full"),
    ]


def test_workers_are_in_the_order_of_their_numbers():
    spans = [span(name, "compute", 0, 1) for name in ("worker 10", "worker 9", "server 2", "server", "worker 1")]
    found = values.timeline({"timeline": {"spans": spans}})
    assert list(found.rows) == ["server", "server 2", "worker 1", "worker 9", "worker 10"]


def test_communication_beside_computing_has_a_lane():
    spans = [span("w0", "communicate", 0.5, 2), span("w0", "compute", 0, 1)]
    found = values.timeline({"timeline": {"spans": spans}})
    assert [(box.kind, box.lane) for box in found.rows["w0"]] == [("communicate", "bottom"), ("compute", "top")]
    assert found.seconds == 2


def test_a_timeline_leaves_out_thin_spans_and_says_how_many_workers():
    spans = [span(f"w{number}", "compute", 0, 10) for number in range(40)] + [span("w0", "wait", 0, 1e-4)]
    found = values.timeline({"timeline": {"spans": spans}})
    assert (len(found.rows), found.hidden, len(found.rows["w0"])) == (32, 8, 1)


def test_a_closed_form_stands_beside_the_prediction():
    rows = [row("a", 1, closed_form={"name": "ring", "seconds": 0.08}), row("b", 2, closed_form=None)]
    (found,) = values.forms({"rows": rows})
    assert (found.row.step_seconds, found.seconds, found.difference) == ("100 ms", "80.0 ms", "+25.0 %")


@pytest.mark.parametrize(
    ("value", "text"), [(None, NOTHING), (0.01234, "0.0123"), (1, "1.00"), (99.96, "100"), (12345.6, "12,346")]
)
def test_digits(value, text):
    assert values.digits(value) == text
