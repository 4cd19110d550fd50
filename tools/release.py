"""Prepares a release of the three distributions: dure, dure-jobs, dure-studies.

    python tools/release.py 0.2.0

It checks the tree, writes the version and the date wherever they stand, lets the first lines of both READMEs install
from the package index, builds into dist/, and checks what was built. It commits, tags and uploads nothing: it
prints these commands at the end.

`src/dure/__init__.py` has the version. The other places repeat it, because each source distribution must be complete
alone: `PLACES` lists them, and a test compares.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]

DISTRIBUTIONS = (".", "jobs", "studies")
"""Their folders."""

PLACES = {
    "src/dure/__init__.py": r'(?<=__version__ = ")[^"]+',
    "jobs/pyproject.toml": r'(?<=^version = ")[^"]+|(?<===)[\d.]+',
    "studies/pyproject.toml": r'(?<=^version = ")[^"]+|(?<===)[\d.]+',
    "CITATION.cff": r"(?<=^version: ).+",
}
"""The files that have the version, and the places in each."""

FIRST_LINES = ("README.md", "README.ko.md")
CHECKOUT, PUBLISHED = 'pip install ".[all]" ./jobs ./studies', 'pip install "dure[all]"'
"""The line that installs dure, before and after it is on a package index."""

UNRELEASED = "## Unreleased\n"


class NotReleasable(Exception):
    """The tree, the version or what was built is not fit for a release."""


def versions(root: Path) -> set[str]:
    """All versions that the files of `PLACES` have."""
    return {
        version
        for name, place in PLACES.items()
        for version in re.findall(place, (root / name).read_text(encoding="utf-8"), re.MULTILINE)
    }


def check_tree(root: Path, version: str) -> None:
    """Raise `NotReleasable` if files are not committed, the version is no new one, or nothing is said about it."""
    if re.fullmatch(r"\d+\.\d+\.\d+", version) is None:
        raise NotReleasable(f"a version is three numbers, as in 0.2.0, and {version!r} is none.")
    changed = _git(root, "status", "--porcelain")
    if changed:
        raise NotReleasable(f"commit or remove these files first:\n{changed}")
    if _git(root, "tag", "--list", f"v{version}"):
        raise NotReleasable(f"the tag v{version} exists: give a later version.")
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    if not text.partition(UNRELEASED)[2].partition("\n## ")[0].strip():
        raise NotReleasable("CHANGELOG.md says nothing under '## Unreleased': write what has changed for users.")


def write_version(root: Path, version: str, date: str) -> None:
    """Write the version and the date into all files that have them, and the line that installs dure."""
    for name, place in PLACES.items():
        _replace(root / name, lambda text, place=place: re.sub(place, version, text, flags=re.MULTILINE))
    _replace(
        root / "CITATION.cff", lambda text: re.sub(r"^date-released: .+", f"date-released: {date}", text, flags=re.M)
    )
    _replace(root / "CHANGELOG.md", lambda text: text.replace(UNRELEASED, f"{UNRELEASED}\n## {version} ({date})\n", 1))
    for name in FIRST_LINES:
        _replace(root / name, lambda text: text.replace(CHECKOUT, PUBLISHED, 1))


def build(root: Path, folder: Path) -> None:
    """Build the three source distributions from the tracked files, and the wheels from them, into `folder`."""
    work = folder / "work"
    for name in _git(root, "ls-files").splitlines():
        if (root / name).is_file():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, work / name)
    for distribution in DISTRIBUTIONS:
        packed = folder / _built("build_sdist", work / distribution, folder)
        with tarfile.open(packed) as archive:
            archive.extractall(work / "unpacked", filter="data")
        _built("build_wheel", work / "unpacked" / packed.name.removesuffix(".tar.gz"), folder)
    shutil.rmtree(work)


def _built(kind: str, source: Path, folder: Path) -> str:
    """The name of the file that setuptools builds; without a network, as setuptools is installed."""
    command = f"from setuptools import build_meta; print(build_meta.{kind}({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", command], cwd=source, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotReleasable(f"{kind} of {source.name} failed:\n{done.stderr}")
    return done.stdout.splitlines()[-1]


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True).stdout.strip()


def _replace(path: Path, change: Callable[[str], str]) -> None:
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")


def main(version: str) -> None:
    """Prepare the release `version` of this checkout."""
    check_tree(ROOT, version)
    write_version(ROOT, version, datetime.now(UTC).date().isoformat())
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir()
    build(ROOT, dist)
    tests = [sys.executable, "-m", "pytest", "-q", "tests/test_packages.py"]
    if subprocess.run(tests, cwd=ROOT, env={**os.environ, "DURE_DIST": str(dist)}, check=False).returncode:
        raise NotReleasable("what was built fails its tests, see above; `git restore .` takes the version back.")
    print(f"dist/ is checked. Publish it:\n    git commit -am 'Release {version}' && git tag v{version}")
    print(f"    git push origin HEAD v{version} && python -m twine upload dist/*")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except NotReleasable as error:
        sys.exit(f"release: {error}")
