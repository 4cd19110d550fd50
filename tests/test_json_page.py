"""The page on the JSON of commands names every field that a command prints with `--json`, and none besides."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dure.cli import commands

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "reference" / "json.md").read_text(encoding="utf-8")

TRAIN = "train digits-mlp --on virtual --workers 2 --steps 4"
COMMANDS = {
    "dure train": (
        f"{TRAIN} --sync ssp:bound=3 --topology ps:shards=2",
        f"{TRAIN} --sync ad-psgd",
        f"{TRAIN} --partition gpipe:stages=2",
        f"{TRAIN} --codec 1bit",
        "train digits-mlp --workers 2 --steps 4 --out run",
    ),
    "dure compare": ("compare digits-mlp --strategy bsp --strategy ssp --on virtual --workers 2 --steps 4",),
    "dure report": ("report run --out again.html",),
    "dure plan": (
        "plan digits-mlp --on virtual --workers 2 --within 6 --steps 20 --target-loss 2.3 --learn 1",
        "plan resnet50 --on 2x2,v100-sxm2-16gb,@,100,Gbit/s --within 6 --emit torchrun",
    ),
    "dure probe": ("probe digits-mlp --workers 2 --codec 1bit",),
    "dure methods": (
        "methods ssp",
        "methods gossip:graph=ring --workers 8",
        "methods ssp --draw",
        "methods pipedream:stages=4 --draw",
    ),
    "dure devices": ("devices",),
}
ALWAYS = ("dure train", "dure plan", "dure methods", "dure devices")
"""Commands whose runs above print all fields that need no special hardware."""

RARE = re.compile(
    r"devices\[\]$|devices$|numerics|hybrid|experience|version_skew|generations|unfinished\.|unwritten\.|deaths\.|evicted"
    r"|open|refused\[|left\[|curves\[|ddp_script|memory_limit|payoff\.link"
)
"""Fields of failures, of accelerators, of rare strategies, and those that depend on the seconds of a plan."""


def section(heading: str) -> str:
    return PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def documented(heading: str) -> list[str]:
    """The fields in the first column of the tables of a section."""
    firsts = re.findall(r"^\| (`.*?`) \|", section(heading), re.MULTILINE)
    return [name for cell in firsts for name in re.findall(r"`([^`]+)`", cell)]


def pattern(name: str) -> re.Pattern[str]:
    text = re.escape(name).replace(r"\*\*", "<all>").replace(r"\*", r"[^\[\]]+?").replace("<all>", ".*")
    return re.compile(text)


def prefixes(name: str) -> Iterator[str]:
    """The list or the object in which a field is, and those around it."""
    return (name[: found.start()] for found in re.finditer(r"\.|\[", name))


EMPTY = " (empty)"


def flat(value: Any, path: str = "") -> Iterator[str]:
    """The path of each value, with [] for an item of a list; that of an empty list or object is marked."""
    if isinstance(value, dict | list) and not value:
        yield path + EMPTY
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from flat(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for item in value:
            yield from flat(item, f"{path}[]")
    else:
        yield path


def printed(words: str, folder: Path) -> dict[str, Any]:
    sources = os.pathsep.join(str(ROOT / part) for part in ("src", "jobs/src", "studies/src"))
    arguments = [word.replace(",", " ") if "x2," in word else word for word in words.split()]
    command = [sys.executable, "-m", "dure", *arguments]
    done = subprocess.run(
        [*command, "--json"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": sources, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], set[str]]:
    """The paths of all values that the runs of a command print, by its name."""
    folder = tmp_path_factory.mktemp("json")

    @cache
    def of(name: str) -> set[str]:
        if name == "dure report":
            of("dure train")  # writes the run
        return {path for words in COMMANDS[name] for path in flat(printed(words, folder))}

    return of


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("json")
@pytest.mark.parametrize("name", COMMANDS)
def test_every_field_is_on_the_page(name: str, outputs: Callable[[str], set[str]]) -> None:
    known = documented(name)
    if name in ("dure compare", "dure report"):
        known += [f"runs[].{each}" for each in documented("dure train")]
    patterns = [pattern(each) for each in known]
    around = [pattern(f"{prefix}{EMPTY}") for each in known for prefix in prefixes(each)]
    missing = {path for path in outputs(name) if not any(each.fullmatch(path) for each in (*patterns, *around))}
    assert not missing


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("json")
@pytest.mark.parametrize("name", ALWAYS)
def test_every_field_of_the_page_is_printed(name: str, outputs: Callable[[str], set[str]]) -> None:
    for each in documented(name):
        if not RARE.search(each):
            found = pattern(each)
            assert any(found.fullmatch(path) for path in outputs(name)), each


def test_every_command_is_on_the_page() -> None:
    for name in commands.COMMANDS:
        assert f"\n## dure {name}\n" in PAGE or f"| `dure {name}" in section("Other commands"), name
