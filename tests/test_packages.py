"""What the source distributions and wheels hold, and an environment that has only the wheels."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from support.core_only import ROOT, installed, put, run

import dure

NAMES = ("dure", "dure_jobs", "dure_studies")

USER = """
from pathlib import Path

import torch

import dure

method = dure.SSP(bound=3)
run = dure.train("digits-mlp", sync=method, topology="ps:shards=2", on="local", workers="2..4", out=Path("run"))
print(run.summary()["accuracy"], len(run.history))
print(dure.plan("digits-mlp", on="lab.yaml", within=5).strategy)
print(dure.compare("quadratic", "bsp", "ssp", on=("local", "virtual"), out="runs").report)
model = torch.nn.Linear(3, 1)
with dure.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), sync="averaging:period=8") as replica:
    replica.step()
"""

WRONG = {
    'dure.train("digits-mlp", steps="five")': '"steps" to "train" has incompatible type "str"',
    'dure.train("digits-mlp", step=5)': 'Unexpected keyword argument "step" for "train"',
    'dure.compare("digits-mlp", "bsp", dtype="float16")': '"dtype" to "compare" has incompatible type',
    'dure.plan("digits-mlp", within="long")': '"within" to "plan" has incompatible type "str"',
    "dure.SSP(bound=[])": '"bound" to "SSP" has incompatible type',
}
"""Lines that a type checker must refuse, each with a part of its error."""


def release():
    spec = spec_from_file_location("release", ROOT / "tools" / "release.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of the distributions: DURE_DIST, which the release script sets, else built now."""
    if "DURE_DIST" in os.environ:
        return Path(os.environ["DURE_DIST"])
    folder = tmp_path_factory.mktemp("dist")
    release().build(ROOT, folder)
    return folder


@pytest.fixture(scope="module")
def fresh(built, tmp_path_factory):
    """The Python of an environment that has the three wheels and what they require."""
    return installed(tmp_path_factory.mktemp("fresh"), sorted(built.glob("*.whl")))


def unpacked(built, name, folder):
    (packed,) = built.glob(f"{name}-*.tar.gz")
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="data")
    return folder / packed.name.removesuffix(".tar.gz")


def test_the_version_and_the_install_line_stand_alike_everywhere():
    script = release()
    assert script.versions(ROOT) == {dure.__version__}
    for name in script.FIRST_LINES:
        first = re.search(r"^(pip install .*?)(?:  .*)?$", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
        assert first, name
        assert first[1] in (script.CHECKOUT, script.PUBLISHED), name
    tags = subprocess.run(["git", "tag", "--points-at", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert {tag for tag in tags.stdout.split() if tag[:1] == "v"} <= {f"v{dure.__version__}"}


def test_a_release_writes_its_version_everywhere(tmp_path):
    script = release()
    for name in (*script.PLACES, *script.FIRST_LINES, "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    script.write_version(tmp_path, "7.8.9", "2030-01-02")
    assert script.versions(tmp_path) == {"7.8.9"}
    for name in script.FIRST_LINES:
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert script.CHECKOUT not in text
        assert f"\n{script.PUBLISHED}" in text
    assert "date-released: 2030-01-02" in (tmp_path / "CITATION.cff").read_text(encoding="utf-8")
    assert "## Unreleased\n\n## 7.8.9 (2030-01-02)\n" in (tmp_path / "CHANGELOG.md").read_text(encoding="utf-8")
    left = [name for name in script.PLACES if dure.__version__ in (tmp_path / name).read_text(encoding="utf-8")]
    assert left == []


@pytest.mark.parametrize(
    ("version", "change", "refusal"),
    [
        ("0.2", None, "three numbers"),
        ("0.2.0", ("new.txt", "x"), "new.txt"),
        ("0.1.0", None, "the tag v0.1.0 exists"),
        ("0.2.0", ("CHANGELOG.md", "# Changes\n\n## Unreleased\n\n## 0.1.0\n\nold\n"), "says nothing"),
    ],
)
def test_a_tree_that_is_not_fit_for_a_release_is_refused(version, change, refusal, tmp_path):
    script = release()
    (tmp_path / "CHANGELOG.md").write_text("# Changes\n\n## Unreleased\n\nnew\n")
    if change and change[0] == "CHANGELOG.md":
        (tmp_path / change[0]).write_text(change[1])
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"], ["tag", "v0.1.0"]):
        own = ["-c", "user.name=x", "-c", "user.email=x@localhost"]
        subprocess.run(["git", *own, *words], cwd=tmp_path, check=True)
    if not change:
        script.check_tree(tmp_path, "0.1.1")
    elif change[0] != "CHANGELOG.md":
        (tmp_path / change[0]).write_text(change[1])
    with pytest.raises(script.NotReleasable, match=refusal):
        script.check_tree(tmp_path, version)


@pytest.mark.long
@pytest.mark.xdist_group("packages")
def test_source_distributions_have_the_documentation_and_the_package(built, tmp_path):
    for name, folder in zip(NAMES, (ROOT, ROOT / "jobs", ROOT / "studies"), strict=True):
        source = unpacked(built, name, tmp_path)
        tracked = subprocess.run(["git", "ls-files"], cwd=folder, capture_output=True, text=True, check=True).stdout
        parts = ("src", "docs", "examples") if name == "dure" else ("src",)
        expected = {file for file in tracked.splitlines() if file.startswith(parts) or "/" not in file}
        found = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
        assert expected - found - {".gitignore", "conftest.py", "Makefile"} == set(), name
        assert not {file for file in found if file.startswith("tests")}


@pytest.mark.long
@pytest.mark.xdist_group("packages")
def test_wheels_have_every_module_and_a_page_whose_links_work_anywhere(built):
    for name, folder in zip(NAMES, (ROOT, ROOT / "jobs", ROOT / "studies"), strict=True):
        (path,) = built.glob(f"{name}-*.whl")
        with zipfile.ZipFile(path) as wheel:
            files = set(wheel.namelist())
            (about,) = (file for file in files if file.endswith(".dist-info/METADATA"))
            metadata = Parser().parsestr(wheel.read(about).decode())
        package = folder / "src" / name
        kept = {"*.py", "*.pyi", "*.j2", "*.css", "*.js", "*.toml", "*.npz", "py.typed"}
        wanted = {str(file.relative_to(folder / "src")) for form in kept for file in package.rglob(form)}
        assert wanted - files == set(), name
        assert (metadata["Name"], metadata["Version"]) == (name.replace("_", "-"), dure.__version__)
        page = metadata.get_payload()
        assert len(page) > 500
        relative = [target for target in re.findall(r"\]\(([^)]+)\)", page) if not re.match(r"https?://|#", target)]
        assert relative == [], f"the page of {name} on a package index has links to files"


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("packages")
def test_the_first_command_of_the_readme_runs_without_the_checkout(built, fresh, tmp_path):
    source = unpacked(built, "dure", tmp_path / "source")
    home = tmp_path / "home"
    home.mkdir()
    shutil.copytree(source / "examples", home / "examples")
    text = (source / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    command = shlex.split(re.search(r"^dure (.*)$", text, re.MULTILINE)[1], comments=True)
    done = run(fresh, "-m", "dure", *command, folder=home, seconds=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    place = run(fresh, "-c", "import dure, dure_jobs; print(dure.__file__, dure_jobs.__file__)", folder=home).stdout
    assert str(ROOT) not in place
    listed = run(fresh, "-m", "dure", "reproduce", folder=home)
    assert (listed.returncode, "table1" in listed.stdout + listed.stderr) == (0, True), listed.stderr
    assert "mnist-mlp" in run(fresh, "-m", "dure", "train", "mnist-ml", folder=home).stderr


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("packages")
def test_a_type_checker_knows_the_options(fresh, tmp_path):
    script = tmp_path / "user.py"
    script.write_text(USER + "\n".join(WRONG) + "\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(fresh), script.name]
    plain = {name: value for name, value in os.environ.items() if name not in ("MYPYPATH", "PYTHONPATH")}
    done = subprocess.run(command, cwd=tmp_path, env=plain, capture_output=True, text=True, check=False, timeout=280)
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    first = USER.count("\n") + 1
    assert [int(line.split(":")[1]) for line in errors] == [*range(first, first + len(WRONG))], done.stdout
    for line, wanted in zip(errors, WRONG.values(), strict=True):
        assert wanted in line


@pytest.mark.long
@pytest.mark.parametrize("name", ["python3.12", "python3.13"])
def test_wheels_run_on_other_interpreters(name, built, tmp_path):
    found = shutil.which(name)
    if (
        found is None
        or subprocess.run([found, "-c", "import torch, tyro"], capture_output=True, check=False).returncode
    ):
        pytest.skip(f"there is no {name} with torch and what else dure requires")
    subprocess.run([found, "-m", "venv", "--without-pip", "--system-site-packages", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    put(python, sorted(built.glob("*.whl")))
    done = run(python, "-m", "dure", "train", "digits-mlp", "--on", "virtual", "--steps", "20", folder=tmp_path)
    assert done.returncode == 0, done.stderr
