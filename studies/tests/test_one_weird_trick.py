"""One weird trick beside data parallelism: shares, bytes against the formulas, and results."""

import json

import pytest

from dure.cli.main import main
from dure.job.shapes.images import vgg16
from dure_studies import one_weird_trick


def test_the_rows_agree_with_the_formulas(monkeypatch, capsys):
    monkeypatch.setattr(one_weird_trick, "REAL_STEPS", 3)
    monkeypatch.setattr(one_weird_trick, "SCHEMES", ("mixed",))
    monkeypatch.setattr(one_weird_trick, "WORKERS", 4)
    assert main(["reproduce", "one-weird-trick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    alexnet, vgg16 = found["shares"]
    assert alexnet["parameters"] == 61_100_840
    assert alexnet["share_of_parameters"] == pytest.approx(0.05, abs=0.02)
    assert alexnet["share_of_operations"] == pytest.approx(0.95, abs=0.04)
    assert vgg16["parameters"] == 138_357_544
    for row in found["rows"]:
        assert row["bytes_per_step"] == row["bytes_by_formula"]
        if row["time"] == "real":
            assert row["difference"]["float32"] < 1e-6
            assert row["difference"]["float64"] < 1e-12
    virtual = {row["scheme"]: row["seconds_per_step"] for row in found["rows"] if row["time"] == "virtual"}
    assert virtual["mixed"] < virtual[None]


def test_the_formula_counts_pairs_of_dense_layers():
    """VGG-16: 14,714,688 parameters in convolutions, 25,088 features, one pair with 4,096 outputs; W = 2, T = 1."""
    assert one_weird_trick.bytes_of(vgg16().model(), workers=2, samples=1, itemsize=4) == {
        "data": 8 * 138_357_544,
        **dict.fromkeys(("gather", "turns", "mixed"), 8 * (14_714_688 + 2 * (25_088 + 4_096))),
    }
