"""Votes among which some lie, with real gradients and real messages."""

import json
import math

import pytest
import torch

from dure.cli.main import main
from dure_studies.byzantine import LIES, MOST, RULES, SCALE, WORKERS, Lied, accuracy


@pytest.mark.parametrize("lie", ["random", "inverted"])
def test_seven_of_fifteen_may_lie_to_a_weighted_vote(lie):
    """Whoever is as often wrong as right has no weight, and who is always wrong is turned around."""
    assert MOST == WORKERS // 2 == 7
    assert accuracy(lie, 7, RULES["IT vote"], rounds=60) > 0.92


def test_seven_of_fifteen_may_draw_lots_in_a_majority():
    assert accuracy("random", 7, RULES["majority"], rounds=60) > 0.9


def test_a_few_may_say_the_opposite_to_a_majority():
    assert accuracy("inverted", 3, RULES["majority"], rounds=60) > 0.9


def test_a_mean_has_no_defence():
    found = accuracy("inverted", 3, RULES["mean"], rounds=60)
    assert math.isnan(found) or found < 0.3


def test_five_who_always_say_the_same_are_found_to_know_nothing():
    plain, weighted = (accuracy("constant", 5, RULES[rule], rounds=60) for rule in ("majority", "IT vote"))
    assert weighted > plain + 0.02


def test_seven_who_lie_together_gain_weight_together():
    """The weighted vote takes voters for independent of each other; a majority takes them for nothing."""
    plain, weighted = (accuracy("constant", 7, RULES[rule], rounds=60) for rule in ("majority", "IT vote"))
    assert plain > 0.6 > 0.4 > weighted


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_as_long_as_they_should_be(lie):
    class Liar:
        rank, clock = 2, 5

    truth = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    kept = truth.clone()
    told = Lied(3, lie).told(truth, Liar)
    assert torch.equal(truth, kept)
    assert float(told.norm()) == pytest.approx(SCALE * float(truth.norm()), rel=1e-4)
    assert torch.equal(told, Lied(3, lie).told(truth, Liar))
    along = float(torch.dot(told, truth) / told.norm() / truth.norm())
    assert along == pytest.approx(-1.0 if lie == "inverted" else 0.0, abs=1e-3 if lie == "inverted" else 0.1)


def test_rows(monkeypatch, capsys):
    monkeypatch.setattr("dure_studies.byzantine.MOST", 1)
    assert main(["reproduce", "byzantine", "--rounds", "1", "--seeds", "1", "--json"]) == 0
    printed = capsys.readouterr()
    rows = json.loads(printed.out.splitlines()[-1])["rows"]
    assert [(row["lie"], row["byzantine"], row["rule"]) for row in rows] == [
        (lie, liars, rule) for lie, liars in [("none", 0), *((lie, 1) for lie in LIES)] for rule in RULES
    ]
    assert "virtual" in printed.err
    assert main(["reproduce", "byzantine", "--data", "."]) == 2
    assert "it takes --rounds, --seeds" in capsys.readouterr().err
