import base64
import hashlib
import json
import math
import re
from functools import cache

import pytest
from support.browser import ABSENT, browser, chromium
from support.outline import Outline
from support.plan_values import plan_values, with_scores

from dure.report import plan_sweeps
from dure.report.figures import OTHER
from dure.report.labels import digits_text as digits
from dure.report.labels import rate_text
from dure.report.plan_page import COLORS, render_plan, write_plan_page
from dure.report.plan_sweeps import lead_sentence, winners, winners_sentence

HOSTILE = "</script><script>alert(1)</script><b>&amp;\"'{{ 7 * 7 }}{% raw %}<!--\u2028"


def embedded(page):
    """The values that the page gives to its script."""
    return json.loads(re.search(r'<script type="application/json" id="values">(.*?)</script>', page, re.DOTALL)[1])


def hostile(value):
    """The same values, with every text and every key of a strategy replaced by a hostile one that names it."""
    if isinstance(value, dict):
        return {
            key if key.isidentifier() else HOSTILE + key: item if key == "kind" else hostile(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [hostile(item) for item in value]
    return HOSTILE + value if isinstance(value, str) else value


@cache
def whole():
    """The page of `plan_values`, drawn once: its figures take seconds."""
    return render_plan(plan_values())


def undrawn():
    """A plan with all parts but those that have figures."""
    return plan_values() | {"sweeps": {}, "curves": []}


# --- the page as text


def test_the_page_is_one_file_that_asks_nothing_of_the_network(tmp_path):
    path = write_plan_page(tmp_path / "plan.html", plan_values())
    page = path.read_text(encoding="utf-8")
    outline = Outline(page)
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & set(outline.tags)
    links = [value for name, value in outline.attributes if name in ("src", "href", "xlink:href", "data", "action")]
    assert all(link.startswith("#") for link in links)
    asked = re.sub(r"<script>.*?</script>|xmlns(?::\w+)?=\"[^\"]*\"", "", page, flags=re.DOTALL)
    assert re.findall(r"url\((?!#)|@import|https?:|//[a-z]", asked) == []
    assert list(tmp_path.iterdir()) == [path]


def test_the_same_plan_gives_the_same_page():
    assert render_plan(plan_values()) == whole()


def test_the_answer_is_on_top():
    outline = Outline(whole())
    order = [
        "Train imagenet-resnet50 with averaging:period=8 ring",
        "samples per second 3,784",
        'dure train imagenet-resnet50 --on lab.yaml --workers 8 --strategy "averaging:period=8 ring" --batch-size 64',
        "so it hides behind the backward pass.",
        "What would change the ranking",
        "What the cluster does not state",
        "The cluster leaves facts open, so bsp ring has 1,900 to 2,400 samples/s",
        "All seconds here are virtual:",
        "Ranking",
    ]
    places = [outline.text.index(part) for part in order]
    assert places == sorted(places)


def test_plain_ddp_is_said_first_with_its_script():
    plan = undrawn()
    plan["answer"] |= {"plain_ddp": True, "ddp_script": "model = DDP(model)"}
    page = render_plan(plan)
    assert "Train imagenet-resnet50 with plain DDP" in page
    assert "<details open>" in page
    assert "model = DDP(model)" in Outline(page).text


def test_the_ranking_has_every_value():
    text = Outline(whole()).text
    assert "1 averaging:period=8 ring 64 135 3,784 8 min 22 s 6.39 GB 80 % 22.4 MB 4.16 compute" in text
    assert "Ranks weigh more" not in text
    assert "zero:stage=3 ring weights that are split need a model in blocks" in text


def test_columns_without_values_are_left_out():
    plan = undrawn()
    rows = [row | {"cost_per_hour": None, "seconds_to_target": None, "memory_limit": None} for row in plan["rows"]]
    text = Outline(render_plan(plan | {"rows": rows})).text
    assert not [
        column for column in ("Cost/h", "To target", "of limit", "\N{MULTIPLICATION SIGN} samples") if column in text
    ]
    rows[0]["factor"] = 1.12
    assert "\N{MULTIPLICATION SIGN} samples" in Outline(render_plan(plan | {"rows": rows})).text


def test_ranks_in_another_order_than_speed_are_pointed_out():
    plan = undrawn()
    plan["rows"][0]["samples_per_second"] = 1.0
    assert "Ranks weigh more than samples per second" in render_plan(plan)


def test_the_winners_along_an_axis_are_told():
    found = plan_sweeps.sweep(plan_values(), "bandwidth")
    names = [win.strategy for win in winners(found.at, found.ranked)]
    assert names == ["diloco:period=64 ring", "averaging:period=8 ring", "bsp ring"]
    sentence = winners_sentence("bandwidth", found)
    assert sentence == (
        "Most samples per second: diloco:period=64 ring up to 4.75 Gbit/s, averaging:period=8 ring up to 49.2 Gbit/s, "
        "then bsp ring."
    )
    assert sentence in whole()


def test_all_values_of_a_sweep_are_in_its_table():
    sweep = plan_values()["sweeps"]["workers"]
    table = re.search(r'data-axis="workers".*?<table data-measure="step">(.*?)</table>', whole(), re.DOTALL)[1]
    heads, *lines = (Outline(row).text.replace(", ", ",") for row in re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL))
    assert heads == "Milliseconds per step 1 2 4 8 16 32 64"
    expected = {
        f"{name} {' '.join(digits(value and 1e3 * value) for value in values)}"
        for name, values in sweep["seconds_per_step"].items()
    }
    assert set(lines) == expected


def test_the_ranking_of_the_slider_starts_at_the_plan_s_bandwidth():
    text = Outline(whole()).text
    assert "10 Gbit/s" in text
    assert (
        "At 10 Gbit/s, averaging:period=8 ring has the most samples per second: 3,784, 4.7 % more than "
        "diloco:period=64 ring."
    ) in text
    names = re.findall(r'<li data-strategy="([^"]*)" style', whole())
    assert names == [row["strategy"] for row in plan_values()["rows"]]


def test_batches_are_named_where_a_strategy_has_several():
    plan = undrawn()
    assert 'class="note">batch' not in render_plan(plan)
    plan["rows"][1]["strategy"] = plan["rows"][0]["strategy"]
    assert render_plan(plan).count('<span class="note">batch 64</span>') == 10


def test_a_target_is_a_loss_or_an_accuracy():
    assert "<dt>to loss 0.9</dt>" in whole()
    assert "stroke-dasharray: 3.6,2.7" in whole(), "the line of the target"
    page = render_plan(plan_values() | {"target_measure": "accuracy", "sweeps": {}})
    assert "<dt>to 90 % test accuracy</dt>" in page
    assert "stroke-dasharray: 3.6,2.7" not in page


def test_strategies_that_were_not_timed_are_listed():
    text = Outline(
        render_plan(undrawn() | {"left": [{"strategy": "gossip:graph=torus", "least_seconds": 0.0123}]})
    ).text
    assert "1 not timed, as the time of the plan was over gossip:graph=torus" in text


def test_long_rankings_are_folded():
    plan = undrawn()
    rows = [plan["rows"][0] | {"strategy": f"s{rank}", "rank": rank} for rank in range(1, 31)]
    page = render_plan(plan | {"rows": rows, "answer": None})
    assert page.count('<tr class="more">') == 18
    assert page.count('<div class="bar more">') == 18
    assert "show all 30 strategies" in page


@pytest.mark.sampled(5)
@pytest.mark.parametrize("key", list(undrawn()))
def test_any_part_may_be_missing_or_empty(key):
    """The page is the same if a part is missing, None, or empty."""
    plan = undrawn()
    page = render_plan(plan | {key: None})
    del plan[key]
    assert render_plan(plan) == page
    Outline(page)


def test_figures_may_be_missing_or_empty():
    plan = undrawn()
    page = render_plan(plan)
    assert render_plan(plan | {"sweeps": None, "curves": None}) == page
    assert "Speed if one value changes" not in page
    assert "Loss over predicted time" not in page


def test_a_page_of_nothing_shows_nothing():
    outline = Outline(render_plan({}))
    assert outline.text.startswith("Plan of the job")
    assert not {"table", "figure", "input", "section"} & set(outline.tags)


def test_only_refused_strategies_are_an_answer():
    plan = {"job": "gpt", "cluster": "lab.yaml", "refused": [{"strategy": "bsp ring", "reason": "needs 3 GB more"}]}
    outline = Outline(render_plan(plan))
    assert "No strategy fits gpt on lab.yaml" in outline.text
    assert "bsp ring needs 3 GB more" in outline.text


def test_a_row_with_its_strategy_alone():
    assert "bsp ring" in Outline(render_plan({"rows": [{"strategy": "bsp ring"}]})).text


def test_values_that_are_no_numbers_are_dashes():
    plan = plan_values()
    for row in plan["rows"]:
        row |= {key: math.nan for key, value in row.items() if isinstance(value, float)}
    for sweep in plan["sweeps"].values():
        sweep["now"] = math.inf
        sweep["samples_per_second"]["bsp ring"] = [math.inf] * len(sweep["at"])
    page = render_plan(plan)
    assert not re.search(r"\b(nan|inf)\b", Outline(page).text, re.IGNORECASE)
    assert "bsp ring" not in [line["strategy"] for line in embedded(page)["lines"]]


def test_texts_from_outside_are_never_markup_nor_a_template():
    page = render_plan(hostile(plan_values()))
    outline = Outline(page)
    assert outline.tags.count("script") == 2
    assert "<b>&" not in page
    assert "<!--" not in page
    assert "".join(HOSTILE.split()) in "".join(outline.text.split())
    names = {line["strategy"] for line in embedded(page)["lines"]}
    assert names == {HOSTILE + row["strategy"] for row in plan_values()["rows"]}


def test_the_policy_lets_only_the_script_of_the_page_run():
    page = whole()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    script = re.search(r"<script>(.*)</script>", page, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith("default-src 'none';")
    assert f"script-src 'sha256-{digest}';" in policy


# --- colors


def themes():
    """The custom properties of the light and of the dark page."""
    blocks = re.findall(r":root \{(.*?)\}", render_plan({}), re.DOTALL)
    shared, dark, own = (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6})", block)) for block in blocks)
    light = shared | own
    return {"light": light, "dark": light | dark}


def luminance(color):
    digits = color[1:] if len(color) == 7 else "".join(2 * letter for letter in color[1:])
    parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first, second):
    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def inverted(color):
    """A color after the filter of the dark page: inverted, with its hue turned back."""
    red, green, blue = (255 - int(color[place : place + 2], 16) for place in (1, 3, 5))
    rows = ((-0.574, 1.430, 0.144), (0.426, 0.430, 0.144), (0.426, 1.430, -0.856))
    turned = (sum(part * weight for part, weight in zip((red, green, blue), row, strict=True)) for row in rows)
    return "#" + "".join(f"{min(max(round(part), 0), 255):02x}" for part in turned)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_and_lines_stand_out(theme):
    """The levels of WCAG 2.2: 4.5 for texts, 3 for lines."""
    colors = themes()[theme]
    texts = [(name, ground) for name in ("ink", "soft", "bad", "link") for ground in ("ground", "pale")]
    weak = [pair for pair in texts if contrast(*(colors[name] for name in pair)) < 4.5]
    lines = [*COLORS, OTHER.color, colors["weights"], colors["gradient"]]
    shown = [inverted(color) for color in lines] if theme == "dark" else lines
    weak += [color for color in shown if contrast(color, colors["ground"]) < 3]
    assert weak == []


# --- the page in a browser


def browsed(test):
    """Marks a test that needs a browser; one process opens it."""
    return pytest.mark.xdist_group("chromium")(pytest.mark.skipif(chromium() is None, reason=ABSENT)(test))


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture
def explored(tab, tmp_path):
    """The tab with the page of `plan_values`."""
    (tmp_path / "plan.html").write_text(whole(), encoding="utf-8")
    tab.open(tmp_path / "plan.html")
    yield tab
    assert tab.errors() == []


def shown(tab):
    """The ranking of the slider: strategy, texts."""
    rows = "[...document.querySelectorAll('#ranking li')]"
    return tab.run(
        f"{rows}.map(row => [row.dataset.strategy, row.querySelector('.speed').textContent, "
        "row.querySelector('.step').textContent, row.querySelector('i').style.getPropertyValue('--part')])"
    )


def slide(tab, step):
    tab.run(
        f"slider = document.getElementById('bandwidth');slider.value = {step}; slider.dispatchEvent(new Event('input'))"
    )


@browsed
@pytest.mark.parametrize("scores", [False, True])
def test_the_slider_ranks_as_the_writer_does(tab, tmp_path, scores):
    """At every place the script's interpolation, texts and order are those of Python."""
    plan = with_scores(plan_values()) if scores else plan_values()
    for measure in plan["sweeps"]["bandwidth"].keys() - {"unit", "at", "now"}:
        plan["sweeps"]["bandwidth"][measure]["bsp ring 1bit"][4] = None
    plan["sweeps"]["bandwidth"]["seconds_per_step"]["gossip:graph=ring"][7] = None
    found = plan_sweeps.sweep(plan, "bandwidth")
    tab.open(write_plan_page(tmp_path / "plan.html", plan))
    seen = set()
    for step in range(0, 401, 16):
        slide(tab, step)
        place = found.at[0] * (found.at[-1] / found.at[0]) ** (step / 400)
        expected = plan_sweeps.ranking(found, min(max(place, found.at[0]), found.at[-1]))
        rows = shown(tab)
        assert [name for name, *_ in rows] == [each.strategy for each in expected]
        for (_, speed, milliseconds, part), each in zip(rows, expected, strict=True):
            assert speed == f"{digits(each.value)}/s"
            assert milliseconds == f"{digits(each.seconds and 1e3 * each.seconds)} ms"
            assert float(part) == pytest.approx(each.fraction)
        assert tab.run("document.getElementById('lead').textContent") == lead_sentence(found, place)
        assert tab.run("document.getElementById('bandwidth-text').textContent") == rate_text(place)
        assert float(tab.run("document.querySelector('.place').style.getPropertyValue('--place')")) == step / 400
        seen.add(rows[0][0])
    assert len(seen) == 3 + scores
    assert tab.errors() == []


@browsed
def test_the_slider_shows_the_first_twelve_of_many(tab, tmp_path):
    plan = plan_values()
    for measure in ("samples_per_second", "seconds_per_step"):
        lines = plan["sweeps"]["bandwidth"][measure]
        lines |= {f"other {name}": [0.4 * value for value in line] for name, line in lines.items()}
    found = plan_sweeps.sweep(plan, "bandwidth")
    tab.open(write_plan_page(tmp_path / "plan.html", plan))
    before = {name for name, *_ in shown(tab)}
    slide(tab, 0)
    expected = [each.strategy for each in plan_sweeps.ranking(found, found.at[0])][:12]
    assert [name for name, *_ in shown(tab)] == expected
    assert not before.issuperset(expected)
    assert tab.errors() == []


@browsed
def test_the_keyboard_moves_the_slider_and_resets_it(explored):
    before = [row[:3] for row in shown(explored)]
    explored.run("document.getElementById('bandwidth').focus()")
    explored.press("Home")
    assert shown(explored)[0][0] == "diloco:period=64 ring"
    spoken = "document.getElementById('bandwidth').getAttribute('aria-valuetext')"
    assert explored.run(spoken) == "50 Mbit/s, fastest: diloco:period=64 ring"
    explored.press("ArrowRight")
    assert explored.run("document.getElementById('bandwidth').value") == "1"
    explored.run("document.getElementById('reset').focus()")
    explored.press("Enter")
    assert [row[:3] for row in shown(explored)] == before
    assert explored.run("document.activeElement.id") == "bandwidth"
    assert explored.run("document.getElementById('reset').hidden")


@browsed
def test_the_switch_shows_the_other_measure(explored):
    plots = "[...document.querySelectorAll('.plot')].filter(plot => plot.offsetHeight)"
    visible = f"{plots}.map(plot => plot.dataset.measure)"
    assert explored.run(visible) == ["speed", "speed", "speed"]
    explored.run("document.getElementById('speed').focus()")
    explored.press("ArrowRight")
    assert explored.run(visible) == ["step", "step", "step"]


@browsed
def test_scores_are_a_third_measure_and_shown_first(tab, tmp_path):
    tab.open(write_plan_page(tmp_path / "plan.html", with_scores(plan_values())))
    plots = "[...document.querySelectorAll('.plot')].filter(plot => plot.offsetHeight)"
    visible = f"{plots}.map(plot => plot.dataset.measure)"
    assert tab.run(visible) == ["score", "score", "score"]
    tab.run("document.getElementById('score').focus()")
    tab.press("ArrowRight")
    assert tab.run(visible) == ["speed", "speed", "speed"]
    assert tab.errors() == []


@browsed
def test_commands_are_copied(explored):
    explored.run("copied = []; navigator.clipboard.writeText = async (text) => { copied.push(text); }")
    explored.run("document.querySelector('.copy').click()")
    assert explored.run("copied") == [plan_values()["answer"]["command"]]
    assert explored.run("document.querySelector('.copy').textContent") == "Copied"
    assert explored.run("getSelection().toString()") == ""
    explored.run("navigator.clipboard.writeText = async () => { throw new Error('refused'); }")
    explored.run("document.querySelector('.copy').click()")
    assert explored.run("getSelection().toString()") == plan_values()["answer"]["command"]


@browsed
@pytest.mark.parametrize("width", [1200, 390, 320])
def test_nothing_moves_and_nothing_is_wider_than_the_window(tab, tmp_path, width):
    (tmp_path / "plan.html").write_text(whole(), encoding="utf-8")
    tab.open(tmp_path / "plan.html", width=width)
    tab.run(
        "moved = 0; new PerformanceObserver(list => list.getEntries().forEach(entry => { moved += entry.value; }))"
        ".observe({type: 'layout-shift', buffered: true})"
    )
    height = tab.run("document.documentElement.scrollHeight")
    for step in (0, 133, 400):
        slide(tab, step)
        assert tab.run("document.documentElement.scrollHeight") == height
    assert tab.run("new Promise(done => setTimeout(() => done(moved), 50))") == 0
    assert tab.run("document.documentElement.scrollWidth") == width
    assert [address for address in tab.requests() if not address.startswith("file:")] == []


@browsed
def test_hostile_texts_do_nothing_in_a_browser(tab, tmp_path):
    tab.open(write_plan_page(tmp_path / "plan.html", hostile(plan_values())))
    slide(tab, 0)
    assert tab.errors() == []
    assert tab.run("document.scripts.length") == 2
    assert tab.run("document.querySelectorAll('#ranking b').length") == 0
    assert shown(tab)[0][0] == HOSTILE + "diloco:period=64 ring"


@browsed
def test_a_page_of_nothing_has_no_error(tab, tmp_path):
    tab.open(write_plan_page(tmp_path / "plan.html", {}))
    assert tab.errors() == []
