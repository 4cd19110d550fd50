"""`dure reproduce` finds studies by the entry points of installed distributions."""

import json
from importlib.metadata import EntryPoints

import pytest

from dure.cli import reproduce
from dure.cli.main import main

STUDY = """
from typing import Annotated

from rich.table import Table
from tyro.conf import arg

quick = {"rounds": 1}


def reproduce(*, rounds: Annotated[int, arg(help="Rounds of the example.")] = 3):
    return {"rounds": rounds}


def table(result):
    shown = Table(f"{result['rounds']} rounds")
    shown.add_row("")
    return shown
"""


OBJECT = """
from types import SimpleNamespace

from study_of_a_test import reproduce, table

STUDY = SimpleNamespace(reproduce=reproduce, table=table, quick={"rounds": 5})
"""

ENTRY_POINTS = """[dure.studies]
example = study_of_a_test
held = object_of_a_test
named = object_of_a_test:STUDY
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A distribution with a study in each form: functions of a module, and an object that a module has."""
    (tmp_path / "study_of_a_test.py").write_text(STUDY, encoding="utf-8")
    (tmp_path / "object_of_a_test.py").write_text(OBJECT, encoding="utf-8")
    info = tmp_path / "study_of_a_test-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: study-of-a-test\nVersion: 1\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(("flags", "rounds"), [([], 3), (["--quick"], 1), (["--quick", "--rounds", "2"], 2)])
def test_a_study_of_another_distribution_is_found(flags, rounds, installed, capsys):
    assert main(["reproduce", "example", *flags, "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"rounds": rounds}
    assert f"{rounds} rounds" in shown.err


@pytest.mark.parametrize("name", ["held", "named"])
def test_a_study_may_be_an_object(name, installed, capsys):
    assert main(["reproduce", name, "--quick", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"rounds": 5}


def test_the_help_of_a_study_has_its_own_flags(installed, capsys):
    with pytest.raises(SystemExit):
        main(["reproduce", "example", "--quick", "--help"])
    shown = capsys.readouterr().out
    assert "Rounds of the example. (default: 1)" in shown
    assert "--seeds" not in shown


def test_flags_may_stand_before_the_name(installed, capsys):
    assert main(["reproduce", "--json", "--rounds", "7", "example"]) == 0
    assert json.loads(capsys.readouterr().out) == {"rounds": 7}


def test_a_value_that_is_no_number_is_refused(installed, capsys):
    assert main(["reproduce", "example", "--rounds", "few"]) == 2
    assert "rounds should be a valid integer" in capsys.readouterr().err


def test_a_misspelt_name_has_the_nearest(installed, capsys):
    assert main(["reproduce", "exmaple"]) == 2
    assert 'Did you mean "example"?' in capsys.readouterr().err


def test_a_flag_that_a_study_does_not_take_is_refused(installed, capsys):
    assert main(["reproduce", "example", "--seeds", "3"]) == 2
    assert capsys.readouterr().err == "dure: example has no use for --seeds; it takes --rounds.\n"


@pytest.mark.parametrize("arguments", [[], ["table1"], ["tabel1"], ["table1", "--rounds", "3"], ["--all"]])
def test_without_studies_the_command_names_the_install_line(arguments, monkeypatch, capsys):
    monkeypatch.setattr(reproduce, "entry_points", lambda group: EntryPoints())
    assert main(["reproduce", *arguments]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == (
        "",
        "dure: the studies of papers are a distribution of their own: pip install dure-studies.\n",
    )
