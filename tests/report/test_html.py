import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from support.outline import Outline
from support.wording import raising

from dure.core.target import Target
from dure.errors import UsageError
from dure.report import Run, write_report
from dure.report.comparison import entries
from dure.report.figures import COLORS, curves, graph, looks
from dure.report.html import render
from dure.report.labels import NOTHING
from dure.report.metrics import VersionCounts


def page(runs, *, title="Runs", target=Target()):
    return render(runs, title=title, target=target)


def figures(text):
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<figure.*?(<svg.*?</svg>)", text, re.DOTALL)]


def test_the_page_is_one_file_that_asks_nothing_of_the_network(tmp_path, made):
    path = write_report(tmp_path / "report.html", [made("bsp"), made("ssp:bound=3", seconds=5)])
    text = path.read_text()
    outline = Outline(text)
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(outline.tags)
    links = [value for name, value in outline.attributes if name in ("src", "href", "xlink:href", "data", "action")]
    assert all(value.startswith("#") for value in links)
    assert re.findall(r"url\((?!#)|@import", text) == []
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.long
def test_there_is_a_figure_for_everything_that_was_asked(made):
    outline = Outline(page([made("bsp"), made("ssp:bound=3", seconds=5), made("bsp", time="real")]))
    for x in ("virtual time", "real time", "mini-batches", "bytes sent"):
        assert f"Loss against {x}" in outline.text
        assert f"Test accuracy against {x}" in outline.text
    for x in ("virtual time (s)", "real time (s)", "mini-batches per worker", "sent by all workers (kB)", "staleness"):
        assert x in outline.text
    for part in ("compute: 50.0 %", "communicate: 30.0 %", "wait: 20.0 %"):
        assert ("title", part) in outline.attributes
    assert outline.text.count("Histogram") == 0
    assert len(figures(page([made("bsp")]))) == 7


def with_skew(run, histogram):
    figures = {**run.summary(), "version_skew": VersionCounts.of(histogram).as_dict()}
    return replace(run, figures=figures)


@pytest.mark.long
def test_pulls_of_inconsistent_models_have_a_histogram(made):
    runs = [with_skew(made("downpour"), {"0": 30, "2": 10}), with_skew(made("bsp"), {"0": 40}), made("ad-psgd")]
    text = page(runs)
    outline = Outline(text)
    assert ("aria-label", "Histogram of version skew: downpour") in outline.attributes
    assert "Always consistent (in every pull, all parts had one version): bsp." in outline.text
    assert "version skew (versions)" in outline.text
    assert re.findall(r"Version skew, (?:mean|largest)\s+(\S+)\s+(\S+)\s+(\S+)", outline.text) == [
        ("0.50", "0.00", NOTHING),
        ("2", "0", NOTHING),
    ]
    assert "ersion skew" not in page([made("downpour"), made("bsp")])


def test_the_page_says_which_time_it_is(made):
    virtual, real = made(count=0), made(count=0, time="real")
    predicted, measured = "Seconds are predicted by a model", "Seconds are measured by the clock"
    assert predicted in page([virtual])
    assert measured not in page([virtual])
    assert measured in page([real])
    both = page([virtual, real])
    assert predicted in both
    assert measured in both


def test_no_bars_of_two_places_share_a_scale_and_a_number_stands_before_its_bar(made):
    """29.5 ms of a cluster file and 293 ms of this machine were bars of equal length in one column."""
    runs = [made(name, seconds=s, time=time) for time, s in (("virtual", 1), ("real", 10)) for name in ("bsp", "ssp")]
    runs[1] = made("ssp", seconds=0.5)
    text = page(runs)
    tables = re.findall(r'<section class="place">.*?</section>', text, re.DOTALL)
    assert [re.search(r"<h2>(.*?)</h2>", table)[1] for table in tables] == ["Virtual time, virtual", "Real time, local"]
    assert [re.findall(r'"width: ([\d.]+)%', table) for table in tables] == [["100.0", "50.0"], ["100.0", "100.0"]]
    for table in tables:
        assert re.search(r'<td>[\d.]+ m?s</td>\s*<td class="bar">', table)
        assert "(real)" not in table
    assert len(re.findall(r'class="bar"><div', text)) == 4


@pytest.mark.long
def test_the_page_says_how_wrong_virtual_time_is_on_the_machines_of_the_real_runs(made):
    runs = [made("bsp", seconds=10, time="real"), made("bsp", seconds=8)]
    runs = [replace(run, figures={**run.figures, "machines": "two", "hosts": ["vm"]}) for run in runs]
    words = Outline(page(runs)).text
    assert "How wrong virtual time is on vm: -20 % for a step" in words
    assert re.search(r"bsp 100 ms 80\.0 ms -20 % 10\.0 s 8\.00 s -20 %", words)
    assert "How wrong" not in Outline(page([made("bsp", time="real"), made("bsp")])).text


@pytest.mark.long
def test_the_page_repeats_neither_its_headline_nor_the_defaults_of_options(made):
    run = replace(
        made("bsp"), config={"job": "digits-mlp", "lr": 0.1, "grace": 10.0, "dtype": None}, written=["job", "lr"]
    )
    words = Outline(page([run], title="digits-mlp: 1 run")).text
    assert words.count("digits-mlp") == 3, "title of the tab, headline, options"
    assert "grace" not in words
    assert "dtype" not in words
    assert '"lr": 0.1' in words
    assert words.count("Whole run") == 1
    old = Outline(page([replace(run, written=())])).text
    assert "grace" in old
    assert "dtype" not in old


@pytest.mark.long
def test_the_first_to_the_target_is_named(made):
    text = Outline(page([made("bsp"), made("ssp:bound=3", seconds=4)])).text
    assert "ssp:bound=3 reached 95 % test accuracy after 4.00 s of virtual time, 2.5 times as fast as bsp." in text
    text = Outline(page([made("bsp"), made("ssp:bound=3", seconds=4)], target=Target(0.45))).text
    assert "reached 45 % test accuracy after 2.00 s" in text


def test_names_from_outside_are_text_and_never_markup_or_mathematics(made):
    name = "<script>alert(1)</script> & \"q\" 'p' $x_{$ {{ 7 * 7 }}"
    text = page([made(name), made("bsp")], title="<b>T</b>")
    outline = Outline(text)
    assert "script" not in outline.tags
    assert "b" not in outline.tags
    assert name in outline.text
    assert "<b>T</b>" in outline.text
    assert len(figures(text)) == 8


@pytest.mark.long
def test_text_inside_figures_is_no_mathematics_and_no_markup(made):
    outline = Outline(page([made(time="$\\frac{<i>$")]))
    assert "i" not in outline.tags
    assert "$\\frac{<i>$ time (s)" in outline.text


@pytest.mark.sampled(1)
@pytest.mark.parametrize("count", [1, 10])
def test_any_number_of_runs(made, count):
    runs = [made(f"k-async:k={k}", seconds=k + 1) for k in range(count)]
    outline = Outline(page(runs))
    assert all(f"k-async:k={k}" in outline.text for k in range(count))


@pytest.mark.long
def test_runs_that_lack_things_are_shown_with_what_they_have(made):
    runs = [
        made("bsp", accuracy=False),
        made("one", count=1),
        made("none", count=0),
        made("nan", nan_from=0),
        made("half", nan_from=5),
        Run(),
    ]
    outline = Outline(page(runs))
    assert outline.text.count("diverged") >= 4
    assert "(unfinished)" in outline.text
    bare = Outline(page([Run()]))
    assert "No run recorded a history" in bare.text


@pytest.mark.long
def test_a_loss_that_stops_being_a_number_ends_in_a_cross(made):
    whole, broken = (drawn(made("x", nan_from=start)) for start in (None, 5))
    marker = rf"<use [^>]*fill: {COLORS[0].lower()}"
    assert len(re.findall(marker, whole)) == 0
    assert len(re.findall(marker, broken)) == 1


def gossip(made, edges, workers, **options):
    """A run of gossip, as training records it."""
    found = made("ad-psgd", **options)
    mixes = {"neighbors": "2", "gap": 0.25, "round_gap": 0.5, "averagings_to_halve": 1234, "rounds_to_halve": 2}
    history = [{**row, "consensus": 0.5 ** row["step"]} for row in found.history]
    figures = {**found.figures, "graph": {"workers": workers, "edges": edges, **mixes}}
    return replace(found, history=history, figures=figures)


RING = [[rank, (rank + 1) % 5] for rank in range(5)]
STAR = [[0, rank] for rank in range(1, 64)]


@pytest.mark.long
def test_the_page_says_whether_compression_pays(made, coded):
    page = render([made("bsp"), coded("ssp"), coded("backup", link=5e9)], title="t", target=Target(0.95))
    words = " ".join(Outline(page).words)
    assert "Does compression pay?" in words
    assert "does not pay on this cluster" in words
    assert "a model" in words
    assert "the cluster file" in words
    assert words.count("94.0 ms") >= 2
    assert NOTHING in words  # the first has no step at the second's link
    assert "Does compression pay?" not in " ".join(Outline(render([made("bsp")], title="t", target=Target(0.95))).words)


@pytest.mark.long
def test_gossip_is_drawn_once_for_each_graph(made):
    runs = [gossip(made, RING, 5), gossip(made, RING, 5), gossip(made, STAR, 64), made("bsp")]
    text = page(runs)
    words = Outline(text).text
    assert "ad-psgd #1, ad-psgd #2: 2 neighbors each, spectral gap 0.25 of an averaging; 1,234 averagings" in words
    assert words.count("spectral gap") == 2
    assert "Distance between models against virtual time" in words
    assert (
        len(figures(text)) == len(figures(page([made("ad-psgd"), made("ad-psgd"), made("ad-psgd"), made("bsp")]))) + 4
    )
    assert "Graphs of gossip" not in page([made("bsp")])


def test_the_drawing_of_a_graph_shows_each_pair_and_each_share():
    ring, star = graph(RING, 5, color=COLORS[0]), graph(STAR, 64, color=COLORS[0])
    lines = [len(re.findall(r'<path d="M [-\d.]+ [-\d.]+ \nL [-\d.]+ [-\d.]+ \n" clip', each)) for each in (ring, star)]
    assert lines == [5, 63]
    assert set(re.findall(r">(\d)</text>", ring)) == {"0", "1", "2", "3", "4"}
    assert "up to 10 %" in ring, "half of 1 / 5, each of both neighbors drawing the other with one half"
    assert "up to 0.79 %" in star
    assert len(star) < 60_000


def test_a_long_graph_is_named_by_its_beginning(made):
    text = "gossip:graph=" + "/".join(f"0-{rank}" for rank in range(1, 40))
    run = made("ad-psgd")
    run = replace(run, figures={**run.figures, "strategy": {"sync": "ad-psgd", "topology": text}})
    (entry,) = entries([run], target=Target(0.95))
    assert entry.label == "ad-psgd gossip:graph=0-1/0-2/0-3/..."


def drawn(run, x="step", y="loss"):
    found = entries([run], target=Target(0.95))
    return curves(found, looks(found), x=x, y=y, target=Target(0.95))


def line(svg, color):
    """The places of the points of a run's curve."""
    [path] = re.findall(rf'<path d="([^"]*)"[^>]*stroke: {color.lower()}', svg)
    return [float(x) for x in re.findall(r"[ML] ([\d.]+) ", path)]


def test_a_run_looks_the_same_everywhere_and_like_no_other(made):
    runs = [made(f"m{k % 12}", time="virtual" if k < 12 else "real") for k in range(20)]
    given = looks(entries(runs, target=Target(0.95)))
    assert len(set(given)) == 20
    assert given[0].color == given[12].color
    assert given[0].dash != given[12].dash


@pytest.mark.long
def test_the_same_runs_give_the_same_bytes(made):
    runs = [made("bsp"), made("ssp:bound=3", seconds=5)]
    assert page(runs) == page(runs)


@pytest.mark.parametrize("count", [9_999, 10_000])  # one of 25 is drawn, and neither number's last row is one of them
def test_a_long_history_stays_small_and_keeps_its_end(made, count):
    found = entries([made("bsp", count=11), made("ssp:bound=3", count=count)], target=Target(0.95))
    svg = curves(found, looks(found), x="seconds", y="accuracy", target=Target(0.95))
    short, long = (line(svg, look.color) for look in looks(found))
    assert len(long) <= 402
    assert long[0] == pytest.approx(short[0], abs=0.1)
    assert long[-1] == pytest.approx(short[-1], abs=0.1)  # both runs take 10 s


def test_requests_that_make_no_sense_are_refused(tmp_path, made):
    with raising(UsageError, "least"):
        write_report(tmp_path / "r.html", [])
    with raising(UsageError, "0.95"):
        write_report(tmp_path / "r.html", [made()], target=Target(95))
    assert not list(tmp_path.iterdir())
