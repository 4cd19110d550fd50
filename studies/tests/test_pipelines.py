"""The damage of pipelines to learning, on a small job in place of MNIST."""

import json
import math

import pytest

from dure import partition
from dure.cli.main import main
from dure.job.job import load_job
from dure_studies import pipelines


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(pipelines, "_job", lambda data: load_job("digits-mlp", depth=3, hidden=16))
    monkeypatch.setattr(pipelines, "EFFICIENCY_BATCHES", (8, 64))


def test_every_method_has_a_row_beside_sgd(small, tmp_path, capsys):
    picture = tmp_path / "damage.svg"
    flags = ["--rounds", "20", "--seeds", "1", "--stages", "2", "--rates", "0.1", "--out", str(picture), "--json"]
    assert main(["reproduce", "pipelines", *flags]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = {row["method"]: row for row in found["rows"]}
    assert list(rows) == ["none", *partition.PIPELINES]
    assert rows["gpipe"]["loss"] == pytest.approx(rows["none"]["loss"], rel=1e-4)
    assert rows["gpipe"]["damage"] == pytest.approx(1, rel=1e-4)
    assert rows["pipedream"]["loss"] != pytest.approx(rows["none"]["loss"], rel=1e-4)
    assert picture.read_text(encoding="utf-8").startswith("<?xml")
    assert rows["pipedream"]["by_stage"]["staleness"] == [1, 0]
    assert rows["pipedream"]["by_stage"]["versions"] == [2, 1]
    distances = {row["method"]: row["distance"] for row in found["distance"]}
    assert list(distances) == ["gpipe", "1f1b", "interleaved", "zero-bubble"]
    assert max(distances.values()) < 1e-12
    losses = {method: row["losses"] for method, row in rows.items() if "losses" in row}
    stated = {each["statement"]: each["by_seed"] for each in found["statements"]}
    text = "rate 0.1, 2 stages: petrowski: copies of weights (pipedream) reduce the loss"
    assert stated[text] == [losses["pipedream"][0] < losses["petrowski"][0]]
    for row in found["efficiency"]:
        assert row["efficiency"] == pytest.approx(row["closed_form"], rel=0.05)


def test_statements_by_the_number_of_stages_are_counted_over_seeds():
    rows = [
        {"method": "ddg", "stages": 2, "rate": 0.1, "losses": [0.1, 0.3, 0.2]},
        {"method": "ddg", "stages": 8, "rate": 0.1, "losses": [0.2, 0.2, math.inf]},
        {"method": "petrowski", "stages": 8, "rate": 0.1, "losses": [math.inf] * 3},
        {"method": "dni", "stages": 8, "rate": 0.2, "losses": [0.0] * 3},
    ]
    (found,) = pipelines._statements(rows, 0.1)
    assert found["statement"] == "rate 0.1, 8 stages: ddg: the loss is larger with 8 stages than with 2"
    assert found["by_seed"] == [True, False, True]


def test_stages_that_a_method_cannot_have_are_left_out_of_the_distances():
    job = load_job("digits-mlp", depth=3, hidden=16)  # four blocks, of which `interleaved` needs eight
    found = pipelines._distances(job, ["interleaved", "gpipe"], [4], rates=[0.1], rounds=2, seeds=[0])
    assert [row["method"] for row in found] == ["gpipe"]


@pytest.mark.parametrize(("flag", "wrong"), [("--stages", "two"), ("--stages", "0"), ("--rates", "0.1;0.2")])
def test_numbers_that_are_none_are_refused(flag, wrong, capsys):
    assert main(["reproduce", "pipelines", flag, wrong]) != 0
    assert "numbers with commas between, got" in capsys.readouterr().err
