"""Commands of the documentation run: each page in a folder of its own, block after block, as a reader types them.

A block of `shell` is run. Captions (`{code-block} shell` with `:caption:`) decide otherwise:

    Needs ...      is not run: the reader's hardware or software is missing here
    Takes ...      is run by `make soak`
    NAME.py        (any language) is a file of that name, which later commands use
    Output         (text) is the standard output of the block before: digits may differ, … stands for any lines
"""

import contextlib
import io
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from dure.cli.flags import parse
from dure.errors import DureError

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "README.ko.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^(`{3,})(?:\{code-block\} *)?(\w+)?[^\n`]*\n((?::\w+:[^\n]*\n)*)(.*?)^\1`*$", re.MULTILINE | re.DOTALL
)
DATA = re.compile(r"\b(mnist|cifar10|imdb|embedding-text)")
ELSEWHERE = re.compile(r"^(pip install|make|\.venv/bin|git clone|source)\b")
"""Commands that need a package index, or that are the tests themselves."""


class Block(NamedTuple):
    language: str
    caption: str
    text: str

    @property
    def is_shell(self):
        return self.language == "shell"

    @property
    def is_run(self):
        return self.is_shell and not self.caption.startswith(("Needs", "Takes"))


def blocks(path):
    found = []
    for match in BLOCK.finditer(path.read_text(encoding="utf-8")):
        caption = re.search(r":caption: *\"?(.*?)\"?$", match[3], re.MULTILINE)
        found.append(Block(match[2] or "", caption[1] if caption else "", match[4]))
    return found


def name(path):
    return str(path.relative_to(ROOT).with_suffix(""))


SHELLS = {name(page): blocks(page) for page in PAGES if any(block.is_shell for block in blocks(page))}


@pytest.fixture
def folder(tmp_path):
    """A folder as a reader's: with the examples, as in a checkout."""
    for each in ("examples", "bench", "docs"):
        (tmp_path / each).symlink_to(ROOT / each)
    return tmp_path


def environment():
    sources = os.pathsep.join(str(ROOT / part) for part in ("src", "jobs/src", "studies/src"))
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])  # of torchrun, so that pages run beside each other
    found = {"PYTHONPATH": sources, "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "140", "PET_MASTER_PORT": port}
    return {**os.environ, **found}


def lines(text):
    """The commands of a block, with continued lines joined and comments removed."""
    joined = re.sub(r"\\\n\s*", "", text)
    return [line for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def run(block, folder):
    """The standard output of a block."""
    text = "\n".join(line for line in lines(block.text) if not ELSEWHERE.match(line))
    variables = environment()
    if "--emit" in text:  # an option that the environment gives is part of an emitted text
        variables.pop("DURE_DATA", None)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text], cwd=folder, env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, (
        f"{block.text}\nended with {done.returncode}:\n{done.stderr[-4000:]}{done.stdout[-2000:]}"
    )
    return done.stdout


def check_output(shown, printed):
    """Each line of `shown` begins a line of `printed`, in this order; digits and the widths of columns may differ."""
    rest = iter([_figures_aside(line) for line in printed.splitlines()])
    for line in shown.splitlines():
        if line.strip() not in ("", "…"):
            is_there = any(each.startswith(_figures_aside(line)) for each in rest)
            assert is_there, f"not printed, or not in this place: {line}\n\n{printed}"


def _figures_aside(line):
    """`line` without the values of numbers, the units of seconds, and the widths of columns."""
    return " ".join(re.sub(r"[\d.,]+( (µs|ms|s)\b)?", "0", line).split())


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", SHELLS)
def test_the_commands_of_a_page_run(page, folder):
    printed, without_data = "", False
    for block in SHELLS[page]:
        if block.caption == "Output":
            check_output(block.text, printed)
        elif re.fullmatch(r"[\w./-]+\.\w+", block.caption) and not block.is_shell:
            (folder / block.caption).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.caption).write_text(block.text, encoding="utf-8")
        elif block.is_run and DATA.search(block.text) and "DURE_DATA" not in os.environ:
            without_data = True
        elif block.is_run:
            printed = run(block, folder)
    if without_data:
        pytest.skip("some commands of the page need data sets: DURE_DATA names no folder of them")


SLOW = [(page, index) for page, all_ in SHELLS.items() for index, block in enumerate(all_) if "Takes" in block.caption]


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("page", "index"), SLOW)
def test_the_commands_that_take_minutes_run(page, index, folder):
    for block in SHELLS[page][:index]:
        if block.is_run:
            run(block, folder)
    run(SHELLS[page][index], folder)


def refusal(arguments):
    """The exit status with which the parser refuses `arguments`, and its text."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            parse(arguments, {})
        except DureError:  # a file that an earlier block writes
            pass
        except SystemExit as end:
            return end.code, said.getvalue()
    return 0, ""


@pytest.mark.parametrize("page", SHELLS)
def test_the_options_of_commands_exist(page, monkeypatch):
    """The commands of blocks that no test runs too."""
    monkeypatch.chdir(ROOT)
    for line in (line for block in SHELLS[page] if block.is_shell for line in lines(block.text)):
        words = shlex.split(line, comments=True)
        if "dure" not in words or "|" in words or words[0] == "pip" or words[-1] == "--version":
            continue
        status, said = refusal(_arguments(words))
        assert not status, f"{line}\n{said}"


def _arguments(words):
    """The words after `dure`, up to a redirection or another command."""
    rest = words[words.index("dure") + 1 :]
    ends = [index for index, word in enumerate(rest) if word.startswith((">", "&", "2>", ";"))]
    return [word.rstrip(";") for word in rest[: min(ends, default=len(rest))]]
