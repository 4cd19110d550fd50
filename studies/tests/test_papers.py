"""The rows of the papers: each has a command that works, or names the feature that it needs."""

import json
import shlex
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from dure.cli.commands import Train
from dure.cli.main import main, parse
from dure.cli.reproduce import STUDIES
from dure_studies.papers import PaperRow, papers

ROOT = Path(__file__).parents[2]
ROWS = [(paper.name, row) for paper in papers() for row in paper.rows]
COMMANDS = sorted({row.command for _, row in ROWS if row.command})


def test_each_row_has_a_result_or_names_what_it_needs():
    for paper, row in ROWS:
        assert row.part, paper
        assert row.claim, (paper, row.part)
        assert row.missing or (row.command and row.result), (paper, row.part)


def test_parts_of_a_paper_are_told_apart_by_their_claims():
    places = [(paper, row.part, row.claim) for paper, row in ROWS]
    assert len(places) == len(set(places))


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_is_one(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    program, *arguments = shlex.split(command.removeprefix("sudo "))
    if program == "python":
        assert Path(arguments[0]).is_file()
        return
    assert program == "dure"
    parsed = parse(arguments, {})
    if isinstance(parsed, Train):
        parsed.chosen()
    if arguments[0] == "reproduce":
        assert arguments[1] in entry_points(group=STUDIES).names


def test_each_result_that_can_be_reproduced_has_a_row():
    shown = {shlex.split(command.removeprefix("sudo "))[2] for command in COMMANDS if "dure reproduce " in command}
    assert shown == set(entry_points(group=STUDIES).names)


def test_each_study_has_a_page_and_a_line_in_their_list():
    pages = {
        path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "research" / "studies").glob("*.md")
    }
    listed = pages.pop("index")
    assert {*pages, "published"} == set(entry_points(group=STUDIES).names)
    for name, text in pages.items():
        assert text.startswith(f"# `{name}`: ")
        assert f"\ndure reproduce {name}" in text
        question = " ".join(text.partition("**Question.** ")[2].partition("\n\n")[0].split())
        assert f"| [`{name}`]({name}.md) | {question} |" in listed


def test_a_misspelt_command_is_found():
    with pytest.raises(SystemExit):
        parse(["train", "mnist-mlp", "--stesp", "3"], {})


def test_without_a_name_all_rows_are_listed(capsys):
    assert main(["reproduce", "--json"]) == 0
    out = capsys.readouterr()
    found = json.loads(out.out.splitlines()[-1])["rows"]
    assert [(row.pop("paper"), PaperRow(**row)) for row in found] == ROWS
    assert "one-weird-trick" in out.err


def test_a_flag_without_a_name_is_refused(capsys):
    assert main(["reproduce", "--rounds", "3"]) == 2
    assert "--rounds belongs to one result" in capsys.readouterr().err
