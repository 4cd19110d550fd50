"""`dure methods NAME --draw`: the timetable on the terminal, and the file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dure.cli.drawing import draw
from dure.cli.main import main

DOCS = Path(__file__).parents[2] / "docs"


def told(capfd, *arguments):
    """The exit status, the standard output and the errors of a command."""
    status = main(["methods", *arguments])
    return status, *capfd.readouterr()


def test_a_drawing_shows_the_timetable_and_the_figures(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "70")
    status, shown, _ = told(capfd, "pipedream:stages=3", "--draw")
    assert status == 0
    lines = [line.rstrip() for line in shown.splitlines()]
    rows = [line for line in lines if line.startswith("k=")]
    assert rows[0] == "k=1 |  F1  F2  F3   .   .  B1  F4  B2  F5  B3  F6  B4  F7  B5  F8  B6"
    assert rows[2] == "k=3 |   .   .  F1  B1  F2  B2  F3  B3  F4  B4  F5  B5  F6  B6  F7  B7"
    assert [line.split()[-1] for line in lines if "% " in line][-3:] == ["2", "1", "0"]
    assert lines[-1] == "In color: pipedream.svg"
    assert ElementTree.parse(tmp_path / "pipedream.svg").getroot().get("role") == "img"


def drawn():
    """The members and the files of the commands of the gallery that draw."""
    page = (DOCS / "gallery.md").read_text(encoding="utf-8")
    return re.findall(r"^dure methods (\S+) --draw (\S+)$", page, re.MULTILINE)


@pytest.mark.parametrize(("member", "file"), drawn())
def test_a_picture_of_the_gallery_is_the_one_of_its_command(member, file, tmp_path):
    draw(member, [tmp_path / file])
    assert (tmp_path / file).read_text() == (DOCS / "images" / file).read_text()


def test_each_picture_of_the_gallery_has_its_command():
    page = (DOCS / "gallery.md").read_text(encoding="utf-8")
    pictures = re.findall(r"^!\[.+\]\(images/(\S+)\)$", page, re.MULTILINE)
    assert len(drawn()) == 3
    assert len(pictures) == len(re.findall(r"^!\[.+\n\n```.*\n(?::caption: Takes.*\n)?dure ", page, re.MULTILINE)) >= 8
    for picture in pictures:
        assert (DOCS / "images" / picture).stat().st_size < 300_000, picture


def test_the_figures_are_there_as_json(capfd, tmp_path):
    path = tmp_path / "v.svg"
    status, shown, _ = told(capfd, "zero-bubble:stages=2,micro=4,schedule=v", "--draw", str(path), "--json")
    drawing = json.loads(shown)["drawing"]
    assert (status, drawing["picture"], drawing["ticks"]) == (0, str(path), 49)
    assert [worker["stages"] for worker in drawing["workers"]] == [[1, 4], [2, 3]]
    assert path.exists()


def test_the_drawing_of_a_mesh_is_that_of_its_pipeline(tmp_path):
    alone = draw("1f1b:stages=2,micro=3", [tmp_path / "alone.svg"])
    mesh = draw("1f1b:stages=2,micro=3+tensor:ways=2", [tmp_path / "mesh.svg"])
    assert mesh.row["workers"] == alone.row["workers"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--draw", "pipedream"], "--draw needs a method or a partition before it"),
        (["ps", "--draw"], '"ps" is a topology, not a partition'),
        (["ssp", "--draw", "a.svg", "b.svg"], "--draw writes one file, and 2 are named: a.svg, b.svg"),
        (["ssp", "--draw", "nowhere/a.svg"], "cannot write nowhere/a.svg: there is no folder nowhere"),
        (["none", "--draw"], "none makes no stages"),
        (["tensor", "--draw"], "tensor makes no stages, and a drawing shows stages"),
        (["gpipe", "--draw", "a.svg", "b.svg"], "--draw writes one file, and 2 are named: a.svg, b.svg"),
        (["gpipe", "--draw", "nowhere/a.svg"], "cannot write nowhere/a.svg: there is no folder nowhere"),
        (["gpipe:stages=0", "--draw"], "stages=0 splits nothing"),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments, message, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, said = told(capfd, *arguments)
    assert status == 2
    assert message in said
    assert list(tmp_path.iterdir()) == []
