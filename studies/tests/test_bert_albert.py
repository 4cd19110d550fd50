"""Data against tensor parallelism for BERT and ALBERT: virtual seconds against the closed forms, and the border."""

import json

import pytest

from dure.cli.main import main
from dure_jobs import transformers
from dure_studies import bert_albert, bert_albert_methods


@pytest.fixture
def two_layers(monkeypatch):
    """BERT-base with two layers of its twelve, over a slow network: neither latencies nor overlap matter much."""
    bert_albert._sizes.cache_clear()
    monkeypatch.setitem(transformers.BASE, "layers", 2)
    for name, value in {"LAYERS": 2, "MODELS": ("bert",), "GBITS": (1.0,)}.items():
        monkeypatch.setattr(bert_albert, name, value)
    yield
    bert_albert._sizes.cache_clear()


def test_virtual_seconds_are_near_the_closed_forms_and_memory_is_that_of_the_parts(two_layers):
    """Whole: places, kinds, layer norms, pooler and scores; split by `tensor`: words and the layers between norms."""
    weights = {}
    for kind in bert_albert.PARTITIONS:
        (row,) = bert_albert.virtual("bert", kind, 12, 64)
        assert row["seconds_per_step"] == pytest.approx(row["closed_form"], rel=0.05)
        weights[kind] = row["memory"]["weights"] // 4
    h, words = 768, 28_996
    ends = (512 + 2 + 2) * h + h * h + h + 2 * h + 2
    assert weights["data"] == words * h + ends + 2 * (12 * h * h + 13 * h)
    assert weights["tensor"] == -(-words // 6) * h + ends + 2 * (2 * h * h + 6 * h + 7 * h // 6)
    assert weights["rows"] == words * h + ends - 5 * (h * h + 2 * h) // 6 + 2 * (2 * h * h + 13 * h)


def test_seconds_of_a_method_are_those_of_its_messages(two_layers, monkeypatch):
    """Averages each 10 steps take a tenth of the exchange of BSP, those of an epoch a 1,042nd; int8 sends a quarter."""
    monkeypatch.setattr(bert_albert_methods, "ASYNCHRONOUS", 10)
    found = {row["strategy"]: row for row in bert_albert.methods()}
    compute = bert_albert.step_seconds("bert", "data", 1e9, 48, 128)
    exchange = {name: row["seconds_per_step"] - compute for name, row in found.items()}
    bsp = exchange["bsp collective"]
    assert exchange["averaging:period=10 collective"] == pytest.approx(bsp / 10, rel=0.01)
    assert exchange["averaging:schedule=epoch collective"] == pytest.approx(
        bsp / 1042, rel=0.15
    )  # and 0.2 ms of each step
    assert exchange["bsp collective fp16"] == pytest.approx(8 / 5 * bsp / 2, rel=0.05)
    assert found["bsp collective int8"]["bytes_per_step"] == pytest.approx(
        found["bsp collective"]["bytes_per_step"] / 4, rel=0.05
    )
    stale = {name for name, row in found.items() if row["staleness"] > 0}
    assert stale == {f"downpour {bert_albert_methods.SERVERS}"}


@pytest.mark.soak
def test_the_border_is_where_the_closed_forms_meet(two_layers, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(transformers.BASE, "layers", 4)
    monkeypatch.setattr(bert_albert, "LAYERS", 4)
    monkeypatch.setattr(bert_albert, "SWEPT", (256, 512))
    monkeypatch.setattr(bert_albert, "REAL_STEPS", 2)
    picture = tmp_path / "border.svg"
    assert main(["reproduce", "bert-albert", "--reviews", "480,96", "--out", str(picture), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    for row in found["rows"]:
        assert row["seconds"] == pytest.approx(row["seconds_per_step"] * -(-row["reviews"] // row["batch"]))
    assert {row["reviews"] for row in found["rows"]} == {480, 96}
    (border,) = found["border"]
    assert border["tokens"] == pytest.approx(border["closed_form"], rel=0.1)
    assert border["smallest_step_won_by"] == "tensor"
    assert picture.read_text(encoding="utf-8").startswith("<?xml")


def test_the_closed_forms_are_those_of_the_specification():
    """BERT's gradient: 722 MB from each of six workers; tensor parallelism sends more above 1,799 tokens of a step."""
    sent = bert_albert.step_seconds("bert", "data", 8.0, 6, 16) - bert_albert.step_seconds("bert", "data", 8e9, 6, 16)
    assert sent == pytest.approx(722e6 / 1e9, rel=2e-3)
    small, large = (
        [bert_albert.step_seconds("bert", kind, 1, 6, tokens) for kind in ("data", "tensor")] for tokens in (290, 310)
    )
    assert small[1] < small[0]
    assert large[1] > large[0]


@pytest.mark.parametrize("wrong", ["many", "0", "5;6"])
def test_reviews_that_are_no_numbers_are_refused(wrong, capsys):
    assert main(["reproduce", "bert-albert", "--reviews", wrong]) != 0
    assert "positive whole numbers" in capsys.readouterr().err
