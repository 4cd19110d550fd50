"""The page on troubleshooting has every exit status and every error class."""

import inspect
import re
import shlex
from pathlib import Path

import pytest

from dure import errors
from dure.cli.commands import FAILED, LACKING
from dure.cli.main import main
from dure.errors import DamagedMessage, DureError, RemoteError, UsageError

PAGE = (Path(__file__).parents[1] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
CLASSES = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, DureError)}
ROWS = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| (.+) \|$", PAGE, re.MULTILINE)


def test_the_page_has_every_error_class_once():
    assert sorted(name for name, *_ in ROWS) == sorted(CLASSES)


def test_each_error_class_is_in_the_section_of_its_exit_status():
    sections = dict(re.findall(r"^### (.+?)\n(.*?)(?=^###|\Z)", PAGE, re.MULTILINE | re.DOTALL))
    for name, kind in CLASSES.items():
        (place,) = (head for head, text in sections.items() if f"\n| `{name}` |" in text)
        between = issubclass(kind, RemoteError | DamagedMessage)
        assert (place == "Wrong usage") == issubclass(kind, UsageError), name
        assert (place in ("Connections", "Signals between processes")) == between, name


def test_the_page_has_every_exit_status():
    rows = [int(status) for status in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)]
    assert rows == [0, FAILED, 2, LACKING, 128 + 2, 128 + 15]


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("train digits-mlp --steps 0", 2),
        ('train digits-mlp --strategy "ssp collective"', 2),
        ("train digits-mlp --on bad.yaml", 2),
        ("train quadratic --on virtual --lr 1e6 --workers 2 --steps 100", 1),
        ("train digits-mlp --on virtual --seconds 1e-6 --workers 2 --sync downpour", 1),
    ],
)
def test_a_message_of_the_page_is_what_a_command_says(words, status, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text("machines: [{count: 2, sped: 2}]\n")
    assert main(shlex.split(words)) == status
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("dure: ")]
    assert said.removeprefix("dure: ") in PAGE
