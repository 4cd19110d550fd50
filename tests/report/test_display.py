"""The display in a notebook of a run, a comparison and a plan: HTML of real results."""

import re
import subprocess
import sys

import pytest
from support.outline import Outline

import dure
from dure.core.target import Target
from dure.report.html import display

RUN = {"on": "virtual", "workers": 2, "seed": 0}


def rows(text):
    """The cells of each row of the tables, without their markup."""
    found = re.findall(r"<tr>(.*?)</tr>", text.replace("<wbr>", ""), re.DOTALL)
    return [
        [" ".join(Outline(cell).text.split()) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL)]
        for row in found
    ]


def curves(text):
    """The captions of the figures that have a line."""
    return [
        caption
        for caption, svg in re.findall(r"<figcaption>(.*?)</figcaption>\s*(<svg.*?</svg>)", text, re.DOTALL)
        if re.search(r"<path d=\"M [^\"]*L[^\"]*\"[^>]*stroke: #0072b2", svg)
    ]


def test_a_run_shows_its_table_and_its_curves():
    run = dure.train("digits-mlp", sync="ssp:bound=3", steps=60, **RUN)
    text = run._repr_html_()
    heads, cells = rows(text)
    shown = dict(zip(heads, cells, strict=True))
    assert shown["Run"] == "ssp:bound=3"
    assert shown["Test accuracy"] == f"{100 * run.figures['accuracy']:.1f} %"
    assert shown["Loss"] == f"{run.figures['loss']:.4f}"
    assert "Virtual time, 2 machines, links of 10 Gbit/s" in Outline(text).text
    assert curves(text) == ["Loss against virtual time", "Test accuracy against virtual time"]


def test_a_comparison_shows_its_runs_side_by_side_and_their_target(tmp_path):
    report = tmp_path / "report.html"
    found = dure.compare("digits-mlp", "bsp", "averaging:period=8", steps=60, target=0.5, report=report, **RUN)
    text = found._repr_html_()
    heads, *cells = rows(text)
    assert heads[1] == "Time to 50 % test accuracy"
    assert [row[0] for row in cells] == ["bsp", "averaging:period=8"]
    assert "not reached" not in text
    assert [len(re.findall(f"stroke: {color}", text)) for color in ("#0072b2", "#d55e00")] == [2, 2]


def test_the_display_changes_nothing_else_of_a_notebook(made):
    """No rule of style has an effect outside the display, and no script runs."""
    text = display([made("bsp"), made("ssp", time="real")], Target())
    assert "<script" not in text
    (style,) = re.findall(r"<style[^>]*>(.*?)</style>", text, re.DOTALL)
    selectors = [each.strip() for rule in re.findall(r"([^{}]+)\{", style) for each in rule.split(",")]
    assert all(selector.startswith(".dure") for selector in selectors)
    assert Outline(text).tags[0] == "div"
    assert len(re.findall("<h4>", text)) == 2
    name = "<script>alert(1)</script>"
    assert "<script" not in display([made(name)], Target())


@pytest.mark.long
def test_a_plan_shows_its_answer_its_ranking_and_a_curve():
    found = dure.plan("digits-mlp", on=dure.Cluster.uniform(2), target=0.5, steps=40, learn=1, within=2)
    text = found._repr_html_()
    heads, *cells = rows(text)
    assert heads[:3] == ["Strategy", "Step, ms", "Samples/s"]
    assert cells[0][0] == found.strategy
    assert [row[0] for row in cells] == [row.strategy for row in found.rows[: len(cells)]]
    assert curves(text) == ["Loss against predicted time"]
    assert found.why[0] in Outline(text).text


@pytest.mark.long
def test_without_the_extra_of_reports_a_notebook_shows_the_text(made):
    program = (
        "import sys; sys.modules['jinja2'] = None\n"
        "import dure\n"
        "print(dure.train('digits-mlp', on='virtual', workers=1, steps=1)._repr_html_())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "None\n"
