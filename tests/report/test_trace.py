import itertools
import json
import random
from collections import defaultdict
from decimal import Decimal

import pytest
from support.wording import raising

from dure.report import Span, write_trace


def read(path):
    """Events by kind, times as exact decimals."""
    content = json.loads(path.read_text(), parse_float=Decimal)
    spans = [event for event in content["traceEvents"] if event["ph"] == "X"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in content["traceEvents"] if e["name"] == "thread_name"}
    ranks = {e["pid"]: e["args"]["name"] for e in content["traceEvents"] if e["name"] == "process_name"}
    return content, spans, ranks, names


def check(path):
    """What a viewer relies on: sorted, named, no overlap within a thread, no thread number used twice."""
    content, spans, ranks, names = read(path)
    assert [e["ts"] for e in spans] == sorted(e["ts"] for e in spans)
    assert len({tid for _, tid in names}) == len(names)
    ends = defaultdict(Decimal)
    for event in spans:
        thread = (event["pid"], event["tid"])
        assert thread in names
        assert event["pid"] in ranks
        assert event["dur"] >= 0
        assert event["ts"] >= ends[thread]
        ends[thread] = event["ts"] + event["dur"]
    return content, spans, ranks, names


def some_spans(count, seed=0):
    draw = random.Random(seed)
    kinds = ["compute", "send", "recv", "communicate", "wait", "apply"]
    for _ in range(count):
        start = draw.uniform(0, 10)
        yield Span(f"worker {draw.randrange(12)}", draw.choice(kinds), start, start + draw.expovariate(10), "x")


@pytest.mark.parametrize("seed", range(3))
def test_random_spans_make_a_sound_trace(tmp_path, seed):
    spans = list(some_spans(2000, seed))
    write_trace(tmp_path / "trace.json", spans, time="virtual")
    content, events, _, _ = check(tmp_path / "trace.json")
    assert content["otherData"] == {"time": "virtual"}
    assert len(events) == len(spans)
    total = sum(round(s.end * 1e9) - round(s.start * 1e9) for s in spans)
    assert sum(int(e["dur"] * 1000) for e in events) == total


def test_ranks_are_processes_in_their_natural_order(tmp_path):
    names = ["server 0", "worker 10", "coordinator", "worker 2"]
    write_trace(tmp_path / "t.json", [Span(name, "compute", 0, 1) for name in names], time="real")
    content, _, ranks, _ = check(tmp_path / "t.json")
    assert list(ranks.values()) == ["worker 2", "worker 10", "server 0", "coordinator"]
    places = {e["pid"]: e["args"]["sort_index"] for e in content["traceEvents"] if e["name"] == "process_sort_index"}
    assert sorted(places, key=places.get) == list(ranks)


def test_kinds_go_to_their_threads_and_concurrent_messages_to_further_ones(tmp_path):
    spans = [
        Span("worker 0", "compute", 0.0, 1.0),
        Span("worker 0", "send", 0.5, 1.5, "push to server 0"),
        Span("worker 0", "recv", 1.0, 2.0),
        Span("worker 0", "communicate", 1.5, 1.75),
        Span("worker 0", "wait", 2.0, 3.0),
        Span("worker 0", "apply", 3.0, 3.5),
    ]
    write_trace(tmp_path / "t.json", reversed(spans), time="virtual")
    _, events, _, names = check(tmp_path / "t.json")
    threads = [(e["cat"], names[e["pid"], e["tid"]]) for e in events]
    assert threads == [
        ("compute", "compute"),
        ("send", "communicate"),
        ("recv", "communicate 2"),
        ("communicate", "communicate"),
        ("wait", "wait"),
        ("apply", "apply"),
    ]
    assert events[1]["name"] == "push to server 0"
    assert events[2]["name"] == "recv"


def test_times_are_microseconds_to_the_nanosecond(tmp_path):
    write_trace(tmp_path / "t.json", [Span("worker 0", "compute", 1.000000007, 1.5)], time="virtual")
    _, [event], _, _ = check(tmp_path / "t.json")
    assert event["ts"] == Decimal("1000000.007")
    assert event["dur"] == Decimal("499999.993")


def test_neighbors_in_time_never_overlap_by_rounding(tmp_path):
    edges = [place / 3e7 for place in range(3000)]
    spans = [Span("worker 0", "compute", a, b) for a, b in itertools.pairwise(edges)]
    write_trace(tmp_path / "t.json", spans, time="virtual")
    _, _, _, names = check(tmp_path / "t.json")
    assert list(names.values()) == ["compute"]


def test_text_from_outside_is_escaped(tmp_path):
    write_trace(tmp_path / "t.json", [Span('worker "0"\\', "compute", 0, 1, 'a"\n\u2028')], time="real")
    _, [event], ranks, _ = check(tmp_path / "t.json")
    assert event["name"] == 'a"\n\u2028'
    assert list(ranks.values()) == ['worker "0"\\']


def test_no_spans_are_a_trace_too(tmp_path):
    write_trace(tmp_path / "t.json", [], time="real")
    assert read(tmp_path / "t.json")[0] == {
        "displayTimeUnit": "ms",
        "otherData": {"time": "real"},
        "traceEvents": [],
    }


@pytest.mark.parametrize(
    "span", [Span("w", "compute", 2, 1), Span("w", "compute", float("nan"), 1), Span("w", "compute", 0, float("inf"))]
)
def test_times_that_make_no_sense_are_refused_and_nothing_is_written(tmp_path, span):
    with raising(ValueError, "start"):
        write_trace(tmp_path / "t.json", [span], time="real")
    assert not list(tmp_path.iterdir())


def test_unknown_words_are_refused(tmp_path):
    with raising(ValueError, "idle"):
        write_trace(tmp_path / "t.json", [Span("w", "idle", 0, 1)], time="real")
    with raising(ValueError, "wall"):
        write_trace(tmp_path / "t.json", [], time="wall")
