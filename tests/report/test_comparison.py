import io
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from dure.core.target import Target
from dure.report import FittedComparison, Run
from dure.report.comparison import accuracies, break_even_sentences, by_place, entries, figure_rows
from dure.report.labels import NOTHING, bytes_text, number_text, rate_text, seconds_text, shared_strategy


def in_terminal(runs, *, target=Target()):
    out = Console(file=io.StringIO(), width=200)
    out.print(FittedComparison(runs, target))
    return out.file.getvalue()


LAB, HERE = "lab.yaml: 8 machines, links of 100 Mbit/s", "2 workers on vm, 2 cores"


def on(run, place, machines, hosts=()):
    """The run in another place."""
    return replace(run, figures={**run.figures, "on": place, "machines": machines, "hosts": list(hosts)})


def test_two_clusters_share_no_table_and_no_ratio(made):
    runs = [
        on(made("bsp", seconds=10), "lab.yaml", LAB),
        on(made("bsp", seconds=5), "wan.yaml", "wan.yaml: 2 machines"),
    ]
    runs += [on(made("ssp", seconds=5), "lab.yaml", LAB), on(made("bsp", seconds=40, time="real"), "local", HERE)]
    found = entries(runs, target=Target(0.95))
    assert [entry.speedup for entry in found] == [1.0, 1.0, 2.0, 1.0]
    assert [entry.label for entry in found][1:] == ["bsp (wan.yaml)", "ssp (lab.yaml)", "bsp (local)"]
    assert [[entry.name for entry in among] for _, among in by_place(found)] == [["bsp", "ssp"], ["bsp"], ["bsp"]]
    (speeds,) = [row for _, rows in figure_rows(found, target=Target()) for row in rows if "per second" in row.name]
    assert speeds.best == {2}, "a place with one run has no best"
    shown = in_terminal(runs)
    headings = [f"Virtual time, {LAB}", "Virtual time, wan.yaml: 2 machines", f"Real time, {HERE}"]
    assert [line for line in shown.splitlines() if "time, " in line] == headings
    assert shown.count("strategy") == 3
    assert "How wrong" not in shown


def test_a_run_that_diverged_stands_beside_the_others_of_its_machines(made):
    whole = on(made("bsp"), "lab.yaml", LAB)
    short = made("ssp", nan_from=3)
    short = replace(short, figures={**short.figures, "on": "lab.yaml"})
    assert len(by_place(entries([whole, short], target=Target()))) == 1


def test_the_error_of_virtual_time_is_stated_on_the_same_hosts_only(made):
    real = [on(made(name, seconds=10, time="real"), "local", HERE, ["vm"]) for name in ("bsp", "ssp", "easgd")]
    virtual = [on(made(name, seconds=s), "here.yaml", "here.yaml", ["vm"]) for name, s in (("bsp", 8), ("ssp", 15))]
    (accuracy,) = accuracies(entries([*real, *virtual], target=Target(0.95)))
    assert accuracy.sentence == "How wrong virtual time is on vm: -20 % to +50 % for a step"
    names, columns = accuracy.columns(Target(0.95))
    assert names == ["bsp", "ssp"]
    assert columns["step, real"] == ["100 ms", "100 ms"]
    assert columns["step, virtual"] == ["80.0 ms", "150 ms"]
    assert columns["to 95 %, error"] == ["-20 %", "+50 %"]
    assert "How wrong virtual time is on vm" in in_terminal([*real, *virtual])
    for hosts in ([], ["other"]):
        elsewhere = [on(run, "here.yaml", "here.yaml", hosts) for run in virtual]
        assert accuracies(entries([*real, *elsewhere], target=Target())) == []
    others = [replace(run, figures={**run.figures, "workers": 8}) for run in virtual]
    assert accuracies(entries([*real, *others], target=Target())) == []


@pytest.mark.parametrize(
    ("real", "virtual", "sentence"),
    [
        (
            (10, 15),
            (8, 6),
            r"order differ: bsp is faster than ssp in real time \(10.0 s and 15.0 s .* slower in virtual",
        ),
        ((15, 10), (6, 8), r"order differ: ssp is faster than bsp in real time"),
        ((10, 15), (6, 8), "order agree where times to the target differ by more than 5 %"),
        ((10, 15), (8, 7.9), "order agree"),
        ((10, 10.1), (8, 4), "order agree"),
    ],
    ids=["reversed", "reversed, given first", "same", "virtual is open", "real is open"],
)
def test_a_measured_order_other_than_the_virtual_one_is_stated_with_its_strategies(made, real, virtual, sentence):
    names = ("bsp", "ssp")
    ran = [on(made(name, seconds=s, time="real"), "local", HERE, ["vm"]) for name, s in zip(names, real, strict=True)]
    told = [on(made(name, seconds=s), "here.yaml", "here.yaml", ["vm"]) for name, s in zip(names, virtual, strict=True)]
    assert re.search(sentence, re.sub(r"\s+", " ", in_terminal([*ran, *told])))
    assert "order" not in in_terminal([ran[0], told[0]])


def test_the_basis_of_virtual_seconds_is_stated_unless_real_runs_show_their_error(made):
    said = "Assumed by default: 20 GFLOP/s. How wrong the seconds are: not checked for these machines."
    virtual = on(made("bsp"), "here.yaml", "here.yaml", ["vm"])
    virtual = replace(virtual, figures={**virtual.figures, "basis": said})
    assert said in in_terminal([virtual])
    assert said in in_terminal([virtual, on(made("bsp", time="real"), "local", HERE, ["other"])])
    assert said not in in_terminal([virtual, on(made("bsp", time="real"), "local", HERE, ["vm"])])


def test_labels_are_in_the_words_of_the_command(made):
    def label(figures, **config):
        run = made("bsp")
        run = replace(run, config={**run.config, **config}, figures={**run.figures, "strategy": figures})
        return entries([run], target=Target())[0].label

    resolved = {"sync": "downpour:n_push=1", "topology": "ps:shards=1", "codec": "fp32", "partition": "none"}
    assert label(resolved, strategy="downpour") == "downpour"
    assert label(resolved, sync="downpour:n_push=1", topology="ps:shards=1") == "downpour:n_push=1 ps:shards=1"
    assert label(resolved, topology="ps") == "downpour ps"
    remedied = {**resolved, "sync": "downpour:n_push=1+dc-asgd:lam=2", "codec": "int8:chunk=1"}
    assert label(remedied, strategy="downpour+dc-asgd int8") == "downpour+dc-asgd int8"
    own = {**resolved, "sync": "my.py:Mine:gap=1", "codec": "my.py:Half:digits=2"}
    assert label(own, sync="my.py:Mine", codec="my.py:Half") == "my.py:Mine my.py:Half"


def test_speed_up_is_on_the_first_run_of_the_same_kind_of_time(made):
    runs = [
        made("bsp", seconds=10),
        made("ssp:bound=3", seconds=4),
        made("bsp", seconds=100, time="real"),
        made("ssp:bound=3", seconds=200, time="real"),
    ]
    found = entries(runs, target=Target(0.95))
    assert [entry.reached for entry in found] == [10, 4, 100, 200]
    assert [entry.speedup for entry in found] == [1.0, 2.5, 1.0, 0.5]
    assert [entry.label for entry in found][::3] == ["bsp (virtual)", "ssp:bound=3 (real)"]


def test_no_ratio_without_both_times(made):
    found = entries([made("bsp", accuracy=False), made("ssp")], target=Target(0.95))
    assert [entry.speedup for entry in found] == [None, None]


def test_labels_leave_out_what_all_share_and_are_unique(made):
    runs = [made("bsp"), made("bsp"), made("ssp:bound=3")]
    assert [entry.label for entry in entries(runs, target=Target(0.9))] == ["bsp #1", "bsp #2", "ssp:bound=3"]
    assert shared_strategy(runs) == "ps:shards=2"
    assert [entry.label for entry in entries(runs[:1], target=Target(0.9))] == ["bsp ps:shards=2"]


def test_a_run_that_did_not_finish_is_known_by_its_configuration(made):
    half = Run({"sync": "ssp:bound=3", "on": "local"}, made().history[:5], {}, Path("runs/half"))
    nameless = Run({}, [], {}, Path("runs/x"))
    first, second = entries([half, nameless], target=Target(0.95))
    assert (first.label, first.time, first.finished) == ("ssp:bound=3 (real)", "real", False)
    assert first.figure("steps") == 40
    assert second.strategy == "x"


def test_divergence_is_seen_in_history_and_summary(made):
    runs = [made(), made(nan_from=5), Run({}, [], {"loss": math.inf}), Run({}, [], {"loss": None})]
    assert [entry.diverged for entry in entries(runs, target=Target(0.95))] == [False, True, True, False]


def test_the_best_of_a_line_is_marked(made):
    found = entries([made("bsp", seconds=10), made("ssp", seconds=4), made("easgd", nan_from=3)], target=Target(0.95))
    by_name = {line.name: line for _, group in figure_rows(found, target=Target(0.95)) for line in group}
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


def test_bandwidths_as_text():
    assert [rate_text(r) for r in (12.5e6, 1.25e9, 26.7e6, 99.97e6, 50.0)] == [
        *("100 Mbit/s", "10 Gbit/s", "214 Mbit/s", "800 Mbit/s", "0.4 kbit/s")
    ]


def test_compression_is_said_to_pay_or_not(made, coded):
    pays = "It pays on links below 16 Gbit/s"
    runs = [made("bsp"), coded("ssp"), coded("downpour", link=12.5e9), coded("backup", link=None, time="real")]
    said = break_even_sentences(entries(runs, target=Target(0.95)))
    assert len(said) == 3
    assert "compression pays on this cluster's links of 10 Gbit/s, where a step takes 14.8 ms with it and" in said[0]
    assert "compression does not pay on this cluster's links of 100 Gbit/s" in said[1]
    assert "encoding and decoding take 4.00 ms" in said[2]
    assert all(pays in sentence for sentence in said)
    (never,) = break_even_sentences(entries([coded(saves=False)], target=Target(0.95)))
    assert "pays on no link" in never


def test_compression_has_its_lines_where_there_is_any(made, coded):
    found = entries([made("bsp"), coded("ssp", link=5e9)], target=Target(0.95))
    heading, rows = figure_rows(found, target=Target(0.95))[-1]
    shown = {line.name: line.cells for line in rows}
    assert heading == "Compression (a model)"
    assert [name for name in shown if name.startswith("A step at")][-2:] == [
        "A step at 40 Gbit/s",
        "A step at 100 Gbit/s",
    ]
    assert shown["A step at 100 Mbit/s"] == (NOTHING, "94.0 ms (fp32 730 ms)")
    assert shown["Pays on links below"] == (NOTHING, "16 Gbit/s")
    assert "Compression (a model)" not in dict(
        figure_rows(entries([made("bsp")], target=Target(0.95)), target=Target(0.95))
    )


def test_the_terminal_says_whether_compression_pays(coded):
    out = Console(file=io.StringIO(), width=400)
    out.print(FittedComparison([coded()], Target()))
    assert "compression pays on this cluster's links" in out.file.getvalue()


def test_the_terminal_shows_the_columns_that_decide(made):
    out = Console(file=io.StringIO(), width=160)
    out.print(FittedComparison([made("bsp"), made("[red]ssp[/red]", seconds=5), made("x", nan_from=2)], Target()))
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
    assert "Virtual time, virtual" in shown
    assert "virtual seconds are predicted" in shown


def test_an_empty_table_is_a_table():
    out = Console(file=io.StringIO(), width=160)
    out.print(FittedComparison([], Target()))
    assert "strategy" in out.file.getvalue()


@pytest.mark.parametrize(("width", "tables"), [(200, 1), (80, 2), (50, 5)])
def test_no_cell_of_the_table_is_cut_in_a_narrow_terminal(made, width, tables):
    runs = [made("averaging:period=8 collective"), made("downpour:n_push=1 ps:shards=1", seconds=5)]
    out = Console(file=io.StringIO(), width=width)
    out.print(FittedComparison(runs, Target()))
    text = out.file.getvalue()
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert max(map(len, text.splitlines())) <= width
    assert [line.split()[0] for line in text.splitlines() if "averaging" in line] == ["averaging:period=8"] * tables
    for name in ("to 95 %", "speed-up", "whole run", "loss", "accuracy", "sent", "stale", "compute", "comm.", "wait"):
        assert text.count(name) == 1
    assert text.count("received") == 1


def test_where_no_run_has_an_accuracy_there_is_no_line_of_one(made):
    runs = [made("bsp", accuracy=False), made("ssp", accuracy=False)]
    found = entries(runs, target=Target())
    names = {line.name for _, group in figure_rows(found, target=Target()) for line in group}
    assert not {name for name in names if "ccuracy" in name or "Time to" in name or "Speed-up" in name}
    shown = in_terminal(runs)
    heads = ["strategy", "whole run", "loss", "sent", "received", "stale", "compute", "comm.", "wait"]
    assert re.split("  +", shown.splitlines()[2].strip()) == heads
    assert "--target-loss" in shown
    assert "accuracy" in in_terminal([made("bsp", accuracy=False), made("ssp")])


def test_the_time_to_a_loss_is_told_for_all_jobs(made):
    runs = [made("bsp", accuracy=False, seconds=10), made("ssp", accuracy=False, seconds=5)]
    goal = Target(0.5, "loss")
    first, second = entries(runs, target=goal)
    assert (first.reached, second.reached, second.speedup) == (4.0, 2.0, 2.0)  # 2 exp(-4 x 0.4) = 0.40
    shown = in_terminal(runs, target=goal)
    assert re.split("  +", shown.splitlines()[2].strip())[:3] == ["strategy", "to loss 0.5", "speed-up"]
    assert "accuracy" not in shown


def test_devices_have_a_line_where_a_run_is_not_on_the_cpu_alone(made):
    """Each device is named once; a run on the CPU beside others is said to be there."""
    on_devices = made()
    on_devices.figures["devices"] = ["cuda:1", "cuda:0", "cuda:1", "cuda:0"]

    def line(*runs):
        rows = [row for _, group in figure_rows(entries(runs, target=Target()), target=Target()) for row in group]
        return next((row.cells for row in rows if row.name == "Devices"), None)

    assert line(made(), made()) is None
    assert line(made(), on_devices) == ("cpu", "cuda:0, cuda:1")
