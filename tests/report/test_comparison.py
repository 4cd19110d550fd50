import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from dure.report import Run, print_table
from dure.report.comparison import NOTHING, bytes_text, entries, lines, number_text, seconds_text, shared_strategy


def test_speed_up_is_on_the_first_run_of_the_same_kind_of_time(made):
    runs = [
        made("bsp", seconds=10),
        made("ssp:bound=3", seconds=4),
        made("bsp", seconds=100, time="real"),
        made("ssp:bound=3", seconds=200, time="real"),
    ]
    found = entries(runs, target=0.95)
    assert [entry.reached for entry in found] == [10, 4, 100, 200]
    assert [entry.speedup for entry in found] == [1.0, 2.5, 1.0, 0.5]
    assert [entry.label for entry in found][::3] == ["bsp (virtual)", "ssp:bound=3 (real)"]


def test_no_ratio_without_both_times(made):
    found = entries([made("bsp", accuracy=False), made("ssp")], target=0.95)
    assert [entry.speedup for entry in found] == [None, None]


def test_labels_leave_out_what_all_share_and_are_unique(made):
    runs = [made("bsp"), made("bsp"), made("ssp:bound=3")]
    assert [entry.label for entry in entries(runs, target=0.9)] == ["bsp #1", "bsp #2", "ssp:bound=3"]
    assert shared_strategy(runs) == "ps:shards=2"
    assert [entry.label for entry in entries(runs[:1], target=0.9)] == ["bsp ps:shards=2"]


def test_a_run_that_did_not_finish_is_known_by_its_configuration(made):
    half = Run({"sync": "ssp:bound=3", "on": "local"}, made().history[:5], {}, Path("runs/half"))
    nameless = Run({}, [], {}, Path("runs/x"))
    first, second = entries([half, nameless], target=0.95)
    assert (first.label, first.time, first.finished) == ("ssp:bound=3 (real)", "real", False)
    assert first.figure("steps") == 40
    assert second.strategy == "x"


def test_divergence_is_seen_in_history_and_summary(made):
    runs = [made(), made(nan_from=5), Run({}, [], {"loss": math.inf}), Run({}, [], {"loss": None})]
    assert [entry.diverged for entry in entries(runs, target=0.95)] == [False, True, True, False]


def test_the_best_of_a_line_is_marked(made):
    found = entries([made("bsp", seconds=10), made("ssp", seconds=4), made("easgd", nan_from=3)], target=0.95)
    by_name = {line.name: line for _, group in lines(found, target=0.95) for line in group}
    assert by_name["Time to 95 %"].best == {1}
    assert by_name["Loss"].cells[2] == "diverged"
    assert by_name["Loss"].best == frozenset()
    assert by_name["Compute"].cells == ("50.0 %",) * 3


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (3.2e-6, "3.20 µs"),
        (0.01234, "12.3 ms"),
        (1.0, "1.00 s"),
        (9.999, "10.0 s"),
        (119.0, "119 s"),
        (425.0, "7 min 05 s"),
        (7800.0, "2 h 10 min"),
        (None, NOTHING),
        (math.nan, NOTHING),
    ],
)
def test_seconds_as_text(seconds, text):
    assert seconds_text(seconds) == text


def test_bytes_and_numbers_as_text():
    assert [bytes_text(n) for n in (0, 999, 1000, 1.5e6, 2.34e9)] == ["0 B", "999 B", "1.00 kB", "1.50 MB", "2.34 GB"]
    assert [number_text(v) for v in (0.07814, 1e-6, 1234.5, 0)] == ["0.0781", "1e-06", "1234", "0.0000"]


def test_the_terminal_shows_the_columns_that_decide(made):
    out = Console(file=io.StringIO(), width=160)
    print_table([made("bsp"), made("[red]ssp[/red]", seconds=5), made("x", nan_from=2)], console=out)
    shown = out.file.getvalue()
    for text in (
        "to 95 %",
        "10.0 s",
        "2.00\N{MULTIPLICATION SIGN}",
        "diverged",
        "100.0 %",
        "10.0 kB",
        "1.50",
        "50 %",
        "[red]ssp[/red]",
    ):
        assert text in shown, text
    assert "time is virtual" in shown


def test_an_empty_table_is_a_table():
    out = Console(file=io.StringIO(), width=160)
    print_table([], console=out)
    assert "strategy" in out.file.getvalue()
