"""Documentation runs: the README's Python blocks, the examples against their golden output, and a page per method."""

import argparse
import dataclasses
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

import dure
from dure.cli.commands import COMMANDS
from dure.core.catalogue import load, paper
from dure.core.spec_text import value_text
from dure.job.job import Job
from dure.job.names import BUILT_IN, SHAPES
from dure.job.optimizer import OptimizerSpec
from dure.run.strategy import AXES, JOINS, REMEDY
from dure.run.strategy import catalogue as one_catalogue
from dure.runtime.virtual.cluster import Cluster

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("[0-9][0-9]_*.py"))
HALF_A_MINUTE = ("05_trainer_hook", "06_pipeline", "07_bert_pipeline")
"""Examples that `make soak` runs: other tests train pipelines, and with hooks."""
PAGES = [ROOT / "README.md", ROOT / "README.ko.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(path):
    """Python code blocks of a page, apart from those marked `python no-run`."""
    return re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def run_python(*arguments, cwd):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=110
    )


CODE = [(page, index) for page in PAGES for index, _ in enumerate(blocks(page))]

RUN_ALL = """
import json, os, runpy, sys, traceback

if __name__ == "__main__":
    for folder in sys.argv[1:]:
        os.chdir(folder)
        try:
            runpy.run_path("block.py", run_name="__main__")
            print(json.dumps([folder, ""]), flush=True)
        except BaseException:
            print(json.dumps([folder, traceback.format_exc()]), flush=True)
"""


@pytest.fixture(scope="module")
def raised_by(tmp_path_factory, request):
    """The error of each block whose test was asked for: all run in one process, in folders and namespaces of their
    own, so that torch is imported once."""
    asked = [item.callspec.params for item in request.session.items if "raised_by" in getattr(item, "fixturenames", ())]
    folders = {}
    for page, index in ((params["page"], params["index"]) for params in asked):
        folders[page, index] = tmp_path_factory.mktemp(page.stem)
        (folders[page, index] / "block.py").write_text(blocks(page)[index], encoding="utf-8")
    program = tmp_path_factory.mktemp("program") / "run_all.py"
    program.write_text(RUN_ALL, encoding="utf-8")
    done = run_python(str(program), *map(str, folders.values()), cwd=program.parent)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["/')]
    found = dict(lines)
    return {block: found.get(str(folder), f"it did not run: {done.stderr}") for block, folder in folders.items()}


@pytest.mark.xdist_group("blocks")
@pytest.mark.parametrize(
    ("page", "index"),
    [
        (page, index) if page.stem in ("README", "add-method") else pytest.param(page, index, marks=pytest.mark.long)
        for page, index in CODE
    ],
    ids=lambda value: value.name if isinstance(value, Path) else str(value),
)
def test_python_blocks_run(page, index, raised_by):
    assert raised_by[page, index] == ""


@pytest.mark.parametrize(
    ("page", "example"),
    [
        ("add-method", "03_post_local"),
        ("add-codec", "08_float8"),
        ("add-topology", "09_star"),
        ("add-pipeline", "10_eager_1f1b"),
    ],
)
def test_the_member_on_a_page_is_that_of_its_example(page, example):
    """The laws of members have rows for the examples."""
    text = (ROOT / "docs" / "how-to" / f"{page}.md").read_text(encoding="utf-8")
    member = re.search(r"^:caption: \w+\.py\n\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)[1]
    assert member.strip() in (ROOT / "examples" / f"{example}.py").read_text(encoding="utf-8")


@pytest.mark.long
@pytest.mark.parametrize(
    "example",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.soak] if path.stem in HALF_A_MINUTE else [])
        for path in EXAMPLES
    ],
)
def test_examples_print_their_golden_output(example, tmp_path):
    if "from transformers import" in example.read_text(encoding="utf-8") and not find_spec("transformers"):
        pytest.skip("the example needs transformers and accelerate: make setup")
    done = run_python(str(example), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    golden = example.with_suffix(".out")
    if golden.exists():
        assert done.stdout == golden.read_text(encoding="utf-8")


METHODS = {**one_catalogue("sync"), **one_catalogue(REMEDY)}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_page_that_cites_its_paper(name):
    page = (ROOT / "docs" / "choosing" / "methods" / f"{name}.md").read_text(encoding="utf-8")
    author = paper(load(METHODS[name])).split()[0].rstrip(",")
    assert author in page
    for part in ("## When to use it", "## When not", "## One slow worker", "## Bytes"):
        assert part in page


@pytest.fixture(scope="module")
def measured():
    """Strategy, steps and rate of each row of the table that the script makes."""
    spec = importlib.util.spec_from_file_location("time_to_accuracy", ROOT / "bench" / "time_to_accuracy.py")
    bench = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(ROOT / "bench"))  # of the modules that scripts share
    try:
        spec.loader.exec_module(bench)
    finally:
        sys.path.remove(str(ROOT / "bench"))
    return [(row.strategy, row.steps, row.options.get("lr")) for row in bench.METHODS.values()]


@pytest.mark.parametrize("name", METHODS)
def test_the_command_on_a_page_is_one_that_was_measured(name, measured):
    page = (ROOT / "docs" / "choosing" / "methods" / f"{name}.md").read_text(encoding="utf-8")
    command = re.search(r"^dure train mnist-mlp (.*one_slow_of_16.*)$", page, flags=re.MULTILINE)
    parser = argparse.ArgumentParser()
    for option, kind in (("--sync", str), ("--on", str), ("--steps", int), ("--lr", float)):
        parser.add_argument(option, type=kind)
    given = parser.parse_args(shlex.split(command[1]))
    assert (given.sync, given.steps, given.lr) in measured


def test_the_page_of_papers_is_what_its_script_writes():
    spec = importlib.util.spec_from_file_location("papers", ROOT / "docs" / "papers.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    again = "its source says something else by now: run python docs/papers.py"
    assert (ROOT / "docs" / "research" / "papers.md").read_text(encoding="utf-8") == script.page(), again


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


LINES = {line for page in PAGES for line in re.findall(r'--on "([^"]+)"', page.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("line", sorted(LINES))
def test_machines_in_a_line_of_a_page_are_a_cluster(line):
    assert Cluster.described(line).workers > 1


def test_the_readme_shows_blocks_and_its_commands_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert len(blocks(ROOT / "README.md")) >= 1
    for target in set(re.findall(r"make (\w+)", text)):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_the_lab_of_the_readme_has_a_slower_machine(tmp_path):
    (text,) = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    file = tmp_path / "lab.yaml"
    file.write_text(text)
    cluster = dure.Cluster.from_yaml(file)
    assert cluster.workers == 4
    assert len({kind.speed for kind in cluster.machines}) == 2


@pytest.mark.long
def test_the_table_of_the_readme_is_that_of_its_command():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "dure compare digits-mlp --on examples/lab.yaml --steps 300\n" in text
    spec = importlib.util.spec_from_file_location("first_minute", ROOT / "docs" / "first_minute.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    found = script.runs()
    assert script.table(found) in text, f"run python {script.__file__}, and write its table into the README"
    drawn = script.picture(found)
    for entry in found:
        assert f"{entry.label}: " in drawn
    names = re.compile(r">([^<>]+: [\d.]+ m?s)<")
    assert names.findall(drawn) == names.findall(script.PICTURE.read_text(encoding="utf-8"))


def test_the_korean_readme_has_the_figures_links_and_commands_of_the_english():
    fence, comment = re.compile(r"^```\w+\n.*?^```", re.MULTILINE | re.DOTALL), re.compile(r"#.*")
    english, korean = (
        text.replace("README.ko.md", "README.md").replace("\u2013", " ")
        for text in ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.ko.md"))
    )
    code = [[comment.sub("", block).split() for block in fence.findall(text)] for text in (english, korean)]
    assert code[0] == code[1]
    for form in (r"\d+\.\d+|\d\d+", r"`[^`]+`"):
        found = [sorted(set(re.findall(form, fence.sub("", text)))) for text in (english, korean)]
        assert found[0] == found[1]
    links = [set(re.findall(r"\]\(([^)]+)\)", text)) for text in (english, korean)]
    assert links[1] - links[0] == {"docs/start/ko.md", "docs/glossary.md"}
    assert links[0] - links[1] == set()


def test_the_errors_of_predictions_in_the_readme_are_those_of_the_benchmark():
    """The README and the page state the median, the 90th percentile, and the worst of all tables."""
    page = (ROOT / "docs" / "explanations" / "accuracy.md").read_text(encoding="utf-8")
    tables = page.partition("**The benchmark**")[2].partition("## On one machine")[0]
    errors = sorted(map(float, re.findall(r"\| ([+-][\d.]+)% \|$", tables, flags=re.MULTILINE)), key=abs)
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    half, most = max(map(abs, errors[: len(errors) // 2])), abs(errors[len(errors) * 9 // 10 - 1])
    stated = f"half are within {half:g} %, nine of ten within {most:g} %, and the worst is {-errors[-1]:g} % too low"
    assert f"{len(errors)} predictions" in text
    assert stated in text
    assert stated in " ".join(page.partition("## Between accelerators")[0].split())


def test_the_page_of_jobs_tells_every_field_of_a_job():
    text = (ROOT / "docs" / "reference" / "jobs.md").read_text(encoding="utf-8")
    table = text.partition("## Fields of a Job")[2].partition("\n## ")[0]
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in table.splitlines() if line[:3] == "| `"]
    fields = dataclasses.fields(Job)
    assert [row[0] for row in rows] == [field.name for field in fields]
    for (name, _, default, meaning), field in zip(rows, fields, strict=True):
        assert meaning
        if field.default is not dataclasses.MISSING:
            assert default == (f'"{field.default}"' if isinstance(field.default, str) else str(field.default)), name
    assert str(Job.__dataclass_fields__["optimizer"].default_factory()) == str(OptimizerSpec("sgd", lr=0.1))
    for name in re.findall(r"`([A-Z]\w+)`", table):
        assert name in dure.__all__, name


def test_the_page_of_jobs_lists_every_job_and_its_parameters():
    text = (ROOT / "docs" / "reference" / "jobs.md").read_text(encoding="utf-8")
    table = text.partition("## Built-in jobs")[2].partition("\n## ")[0]
    rows = {
        cells[1].strip(" `"): cells[4] for line in table.splitlines() if (cells := line.split("|"))[1:] and "`" in line
    }
    learning = {name for name, place in BUILT_IN.items() if place.startswith("dure.rl")}
    offered = tomllib.loads((ROOT / "jobs" / "pyproject.toml").read_text())["project"]["entry-points"]["dure.jobs"]
    places = {**BUILT_IN, **offered}
    assert list(rows) == [name for name in places if name not in learning]
    for name, parameters in rows.items():
        module, _, function = places[name].partition(":")
        own = dict(inspect.signature(getattr(importlib.import_module(module), function)).parameters)
        own.pop("data_root", None)
        told = [f"{key}={value_text(each.default)}" if each.default != "" else key for key, each in own.items()]
        assert re.findall(r"`([^`]+)`", parameters) == told, name


def test_the_page_of_jobs_names_every_published_model():
    text = (ROOT / "docs" / "reference" / "jobs.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (`.*`) \|", text.partition("## Published models")[2].partition("All published models")[0], re.MULTILINE
    )
    assert [name for row in rows for name in re.findall(r"`([^`]+)`", row)] == [*SHAPES]


def test_every_public_name_has_one_place_in_the_reference():
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").rglob("*.md")]
    by_name = re.findall(r"^\.\. auto(?:class|function):: dure\.(\w+)(?:\(.*\))?$", "\n".join(pages), re.MULTILINE)
    axes = re.findall(r"^```\{members\} (.+)$", "\n".join(pages), re.MULTILINE)
    assert sorted(axes) == sorted([*AXES, *JOINS])
    of_axes = [place.rpartition(":")[2] for axis in axes for place in one_catalogue(axis).values()]
    assert sorted([*by_name, *of_axes]) == sorted(set(dure.__all__) - {"DureError"})  # with the other errors


def test_every_command_has_its_options_in_the_reference():
    text = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^```\{command\} (\w+)$", text, re.MULTILINE)) == sorted(COMMANDS)


def test_the_page_of_jobs_tells_every_parameter_of_all_published_models():
    text = (ROOT / "docs" / "reference" / "jobs.md").read_text(encoding="utf-8")
    table = text.partition("All published models")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| `?([^|`]+?)`? \|", table, re.MULTILINE))
    for name, place in SHAPES.items():
        module, _, function = place.partition(":")
        own = inspect.signature(getattr(importlib.import_module(module), function)).parameters
        assert rows.items() <= {key: value_text(each.default) for key, each in own.items()}.items(), name


def test_the_page_on_reinforcement_learning_tells_every_setting():
    text = (ROOT / "docs" / "how-to" / "reinforcement.md").read_text(encoding="utf-8")
    flags = {name.replace("-", "_") for name in re.findall(r"--([a-z-]+)", text)}
    told = {*re.findall(r"`(\w+)(?:=[^`]*)?`", text.partition("## Settings")[2].partition("##")[0]), *flags}
    for name, place in BUILT_IN.items():
        module, _, function = place.partition(":")
        if module == "dure.rl.jobs":
            parameters = inspect.signature(getattr(importlib.import_module(module), function)).parameters
            assert parameters.keys() - told == set(), name


def test_dependencies_have_their_reasons():
    page = (ROOT / "docs" / "about" / "dependencies.md").read_text(encoding="utf-8").lower()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    for requirement in itertools.chain(project["dependencies"], *extras.values()):
        name = re.match(r"[A-Za-z0-9-]+", requirement).group().lower()
        assert f"`{name}`" in page or name == "dure", requirement
    for extra in extras:
        assert f"`{extra}`" in page, extra


def test_the_picture_of_the_packages_is_that_of_the_contract():
    spec = importlib.util.spec_from_file_location("architecture", ROOT / "docs" / "architecture.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PICTURE.read_text(encoding="utf-8") == script.picture()
    packages = {path.parent.name for path in (ROOT / "src" / "dure").glob("*/__init__.py")}
    assert {name for floor in script.floors() for name in floor} == packages | {"errors"}
