"""`dure reproduce` finds studies by the entry points of installed distributions."""

import json
import sys
from importlib.metadata import EntryPoints

import pytest

from dure.cli import reproduce
from dure.cli.main import main
from dure.core import packages

STUDY = """
from typing import Annotated

from rich.table import Table
from tyro.conf import arg

quick = {"rounds": 1}


def reproduce(*, rounds: Annotated[int, arg(help="Rounds of the example.")] = 3, batch_size: int = 1):
    return {"rounds": rounds * batch_size}


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

OBJECTS = """held = object_of_a_test
named = object_of_a_test:STUDY
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A distribution with a study in each form: functions of a module, and an object that a module has."""
    (tmp_path / "object_of_a_test.py").write_text(OBJECT, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return install(tmp_path, "study_of_a_test", STUDY, more=OBJECTS)


def install(folder, module, text, value=None, more=""):
    (folder / f"{module}.py").write_text(text, encoding="utf-8")
    info = folder / f"{module}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[dure.studies]\nexample = {value or module}\n{more}", encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("flags", "rounds"), [([], 3), (["--quick"], 1), (["--quick", "--rounds", "2"], 2), (["--batch-size", "5"], 15)]
)
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
    assert capsys.readouterr().err == "dure: example has no use for --seeds; it takes --rounds, --batch-size.\n"


TABLE = "def table(result): ...\n"


@pytest.mark.parametrize(
    ("text", "value", "said"),
    [
        ("import absent_package\n", None, "of wrong is wrong, and its import raised ModuleNotFoundError"),
        (STUDY, "wrong:nothing", "its import raised AttributeError: module 'wrong' has no attribute 'nothing'"),
        (STUDY, "wrong, more", "of wrong is 'wrong, more' in its entry points: write MODULE or MODULE:OBJECT."),
        (STUDY, "wrong:reproduce", "of wrong is wrong:reproduce, which has no function reproduce."),
        (TABLE, None, "of wrong is wrong, which has no function reproduce."),
        ("def reproduce(): ...\n", None, "of wrong is wrong, which has no function table."),
        (
            f"def reproduce(rounds: int): ...\n{TABLE}",
            None,
            "the parameter rounds of reproduce in the study example needs",
        ),
        (
            f"def reproduce(rounds=3): ...\n{TABLE}",
            None,
            "the parameter rounds of reproduce in the study example needs",
        ),
        (f"def reproduce(rounds: 'Most' = 3): ...\n{TABLE}", None, "cannot be read: NameError: name 'Most' is not"),
        (f"def reproduce(rates: list = []): ...\n{TABLE}", None, "cannot be read: ValueError: mutable default"),
        (f"{STUDY}quick = {{'round': 1}}\n", None, "quick of the study example has 'round'"),
        (f"{STUDY}quick = 3\n", None, "the flags of the study example cannot be read: TypeError: 'int' object is not"),
    ],
)
def test_a_study_that_cannot_be_used_is_refused_with_the_cause(text, value, said, tmp_path, monkeypatch, capsys):
    install(tmp_path, "wrong", text, value)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wrong", raising=False)
    assert main(["reproduce", "example", "--quick"]) == 2
    assert said in capsys.readouterr().err


def test_a_study_of_two_distributions_is_refused(installed, capsys):
    install(installed, "another", STUDY)
    assert main(["reproduce", "example"]) == 2
    said = "several installed packages offer a study example: another, study_of_a_test. Uninstall all but one of them."
    assert capsys.readouterr().err == f"dure: {said}\n"


def test_an_unknown_name_has_the_install_line_where_only_others_offer_studies(installed, monkeypatch, capsys):
    monkeypatch.setattr(reproduce, "PAPERS", "group.of.nobody")
    assert main(["reproduce", "nothing"]) == 2
    assert capsys.readouterr().err.endswith(" Studies of papers come with pip install dure-studies.\n")


@pytest.mark.parametrize("arguments", [[], ["table1"], ["tabel1"], ["table1", "--rounds", "3"], ["--all"]])
def test_without_studies_the_command_names_the_install_line(arguments, monkeypatch, capsys):
    monkeypatch.setattr(packages, "entry_points", lambda group: EntryPoints())
    assert main(["reproduce", *arguments]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == (
        "",
        "dure: the studies of papers are a distribution of their own: pip install dure-studies.\n",
    )
