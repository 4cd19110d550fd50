"""An environment with this checkout and what its core requires, without the packages of its extras."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import venv
from importlib.metadata import distribution
from pathlib import Path

ROOT = Path(__file__).parents[2]


def core_only(folder: Path, *, jobs: bool = False) -> Path:
    """Make a virtual environment in `folder`, with `dure-jobs` if asked for; return its Python.

    The packages are links to those of this environment.
    """
    python, site = linked(folder, project(ROOT)["dependencies"])
    sources = [ROOT / "src", *([ROOT / "jobs" / "src"] if jobs else [])]
    (site / "sources.pth").write_text("".join(f"{path}\n" for path in sources))
    if jobs:
        offer(site, "dure-jobs", project(ROOT / "jobs")["entry-points"]["dure.jobs"])
    return python


def installed(folder: Path, wheels: list[Path]) -> Path:
    """Make a virtual environment in `folder` with `wheels` and links to all that they require; return its Python.

    Raises `subprocess.CalledProcessError` if a requirement is not met: of the wheels, also by each other.
    """
    needed = [*project(ROOT)["optional-dependencies"]["report"]]
    for source in (ROOT, ROOT / "jobs", ROOT / "studies"):
        needed += [line for line in project(source)["dependencies"] if not line.startswith("dure")]
    python, _ = linked(folder, needed)
    put(python, wheels)
    return python


def put(python: Path, wheels: list[Path]) -> None:
    """Install `wheels` into the environment of `python`, without a network; check that their requirements are met."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # where pip would find dure
    for words in (["install", "--no-deps", "--no-index", *map(str, wheels)], ["check"]):
        subprocess.run([sys.executable, "-m", "pip", "--quiet", "--python", str(python), *words], env=clean, check=True)


def linked(folder: Path, requirements: list[str]) -> tuple[Path, Path]:
    """A virtual environment with links to `requirements` and theirs: its Python and its folder of packages."""
    venv.create(folder / "venv", symlinks=True)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    for name in required(requirements):
        for entry in entries(name):
            if not (site / entry.name).exists():
                (site / entry.name).symlink_to(entry)
    return folder / "venv" / "bin" / "python", site


def project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def offer(site: Path, name: str, jobs: dict[str, str]) -> None:
    """Install in `site` a distribution called `name` that offers `jobs`."""
    info = site / f"{name.replace('-', '_')}-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    lines = "".join(f"{job} = {place}\n" for job, place in jobs.items())
    (info / "entry_points.txt").write_text(f"[dure.jobs]\n{lines}")


def required(requirements: list[str]) -> set[str]:
    """The names of `requirements` and of what they require, without extras."""
    found: set[str] = set()
    left = [*requirements]
    while left:
        text = left.pop()
        name = re.match(r"[\w.-]+", text).group().lower()
        if name not in found and "extra ==" not in text and applies(text):
            found.add(name)
            left += distribution(name).requires or []
    return found


def applies(requirement: str) -> bool:
    from packaging.requirements import Requirement

    marker = Requirement(requirement).marker
    return marker is None or marker.evaluate()


def entries(name: str) -> set[Path]:
    """The files and folders of a distribution that stand in the folder of packages."""
    found = distribution(name)
    site = Path(found.locate_file(""))
    return {site / file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}


def run(python: Path, *arguments: str, folder: Path, seconds: float = 110) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(folder)}
    command = [str(python), *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )


if __name__ == "__main__":
    print(core_only(Path(sys.argv[1]), jobs="jobs" in sys.argv[2:]))
