"""The table of costs: counts of real runs are the formulas' numbers."""

import json

import pytest
import torch

from dure.cli.main import main
from dure_studies import table1
from dure_studies.table1 import SCHEMES, EpochSizes, OperationCounter, formula


def test_counts_of_runs_are_those_of_the_formulas(monkeypatch, capsys):
    sizes = {"WIDTH": (8,), "LAYERS": (4,), "SAMPLES": (6,), "BATCHES": 36, "NODES": (2,), "PERIODS": (3,)}
    for name, value in sizes.items():
        monkeypatch.setattr(table1, name, value)
    monkeypatch.setattr(table1, "SCHEMES_OF_PROCESSES", {"async": SCHEMES["async"]})
    assert main(["reproduce", "table1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert {row["scheme"] for row in rows} == set(SCHEMES)
    assert [row["time"] for row in rows].count("real") == 1
    for row in rows:
        for kind, count in row["counted"].items():
            assert count is None or count == pytest.approx(row["formula"][kind], rel=1e-9), (row, kind)


def test_the_worked_example_of_the_orders():
    """N = 2048, L = 8, T = 256, M = 1000, K = 8: 6.711e10 words through the servers, 7.340e9 over seven links."""
    at = EpochSizes(2048, 8, 256, 1000, 8, 1)
    assert formula(SCHEMES["gradients"], at).words == pytest.approx(6.711e10, rel=1e-3)
    assert formula(SCHEMES["pipelined"], at).words == pytest.approx(7.340e9, rel=1e-3)
    assert formula(SCHEMES["averaging"], at).words / (formula(SCHEMES["pipelined"], at).words / 7) == pytest.approx(64)


def test_an_addition_of_a_multiple_counts_two_operations_for_each_value():
    with OperationCounter(least=4) as found:
        values = torch.ones(8)
        values.add_(values, alpha=0.5)
        values.add_(1.0)
        torch.ones(3).add_(1.0)
        torch.ones(2, 3) @ torch.ones(3, 5)
    assert (found.vectors, found.products) == (8 + 16 + 8, 2 * 2 * 3 * 5)
