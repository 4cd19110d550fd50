"""A short form of each family of studies, and what the distribution declares."""

import json
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import dure
import dure_studies
from dure.cli.main import main
from dure.cli.reproduce import PAPERS, STUDIES, find
from dure_studies import study, table1

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_counts_of_table1_are_those_of_the_formulas(monkeypatch, capsys):
    sizes = {"WIDTH": (8,), "LAYERS": (4,), "SAMPLES": (6,), "BATCHES": 12, "NODES": (2,), "PERIODS": (3,)}
    for name, value in sizes.items():
        monkeypatch.setattr(table1, name, value)
    schemes = {name: table1.SCHEMES[name] for name in ("gradients", "pipelined")}
    monkeypatch.setattr(table1, "SCHEMES", schemes)
    monkeypatch.setattr(table1, "SCHEMES_OF_PROCESSES", {})
    assert main(["reproduce", "table1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert {row["scheme"] for row in rows} == set(schemes)
    for row in rows:
        for kind, count in row["counted"].items():
            assert count is None or count == pytest.approx(row["formula"][kind], rel=1e-9), (row, kind)


def test_each_name_is_a_study_of_a_module():
    found = entry_points(group=STUDIES)
    assert {point.name: point.value for point in found} == PROJECT["entry-points"][STUDIES]
    assert {point.name: point.value for point in entry_points(group=PAPERS)} == PROJECT["entry-points"][PAPERS]
    for point in found:
        assert isinstance(getattr(point.load(), "STUDY", None), study.Study | None)
        assert callable(find(point.name).reproduce)
        assert callable(find(point.name).table)
    folder = Path(dure_studies.__file__).parent
    texts = {path: path.read_text("utf-8") for path in folder.rglob("*.py")}
    of_study = [path for path, text in texts.items() if "\ndef reproduce(" in text or "\nSTUDY = " in text]
    named = {point.module.rpartition(".")[2] for point in [*found, *entry_points(group=PAPERS)]}
    assert named == {path.stem if path.parent == folder else path.parent.name for path in of_study}


def test_the_version_is_that_of_dure():
    assert PROJECT["version"] == dure.__version__
    tied = [line for line in PROJECT["dependencies"] if line.startswith("dure")]
    assert tied
    assert all(line.endswith(f"=={dure.__version__}") for line in tied)
