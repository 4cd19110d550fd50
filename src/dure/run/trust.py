"""Checks the code that a run's record names, before a resumed run executes it.

A record keeps the path and the SHA-256 of each file. Without `--trust`, a file is executed only if its path and its
content are those of the record. A file inside the run's own folder needs `--trust` in any case: whoever made the folder
could have made the record too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dure.core import user_code
from dure.core.spec_text import parse_member, parse_members
from dure.errors import UsageError
from dure.run.strategy import AXES

MEMBERS = ("strategy", *AXES)
"""Options whose texts name members, and so may name code as FILE.py:NAME."""


def fingerprints(options: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The absolute `path` and the `sha256` of each file that the `options` of a run name, by its text there."""
    return {
        file: {"path": str(Path(file).resolve()), "sha256": _sha256(Path(file))}
        for file in _named(options)
        if Path(file).is_file()
    }


def check(folder: Path, options: Mapping[str, Any], recorded: Any) -> None:
    """Raise `UsageError` if the run in `folder` with its `options` would execute code that differs from `recorded`."""
    for file in _named(options):
        path = Path(file).resolve()
        problem = _problem(folder.resolve(), path, recorded.get(file) if isinstance(recorded, Mapping) else None)
        if problem:
            raise UsageError(
                f"resuming {folder} runs the code in {path}, and {problem}. Look at the file; to run it as it is, "
                "give --trust (trust=True in Python)."
            )


def _problem(folder: Path, path: Path, recorded: Any) -> str:
    if not isinstance(recorded, Mapping):
        return "the run's record has no hash of it"
    if recorded.get("path") != str(path):
        return f"when the run began it was {recorded.get('path')}"
    if path.is_relative_to(folder):
        return "the file lies in the folder of the run, so that whoever made the folder has made it too"
    if not path.is_file():
        return ""  # the loader reports it
    found = _sha256(path)
    if recorded.get("sha256") != found:
        return f"it has changed since the run began: its SHA-256 was {recorded.get('sha256')} and is {found}"
    return ""


def _named(options: Mapping[str, Any]) -> Iterator[str]:
    """The files in texts such as "lab/job.py:make" and "lab/sync.py:Mine:period=2 ps"."""
    texts = [str(options.get(option) or "") for option in MEMBERS]
    members = [call.name for text in texts for word in text.split() for call in parse_members(word)]
    files = {own[0] for name in members if (own := user_code.split(name)) is not None}
    if options.get("job"):
        job = parse_member(str(options["job"]))
        named = [job.name.rpartition(":")[0], *(user_code.file_of(value) for value in job.given.values())]
        files |= {file for file in named if file.endswith(".py")}
    yield from sorted(files)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
