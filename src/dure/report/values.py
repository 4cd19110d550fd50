"""The record of a run as a value."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
"""A line of `history.jsonl`."""


def versions() -> dict[str, str]:
    """Versions of the packages that decide the bits of a run, from their metadata: no package is imported."""
    found = {"python": platform.python_version()}
    for package in ("dure", "torch", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed as a package"
    return found


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The record of one run, from training or from its folder.

    `config` is the configuration that was used, `history` the rows of `history.jsonl`, `figures` the content of
    `summary.json` (empty for a run that did not finish). `code` has the files that the configuration names
    (`trust.fingerprints`).
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    history: Sequence[Row] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    seed: int | None = None
    code: Mapping[str, Any] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """The figures of `dure train --json`; for a run that did not finish, those of its last row of history."""
        if self.figures or not self.history:
            return dict(self.figures)
        last = self.history[-1]
        names = {"step": "steps", "bytes": "bytes_sent"}
        return {names.get(key, key): value for key, value in last.items()}
