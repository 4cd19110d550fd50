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
        figures = {names.get(key, key): value for key, value in last.items()}
        return figures | ({"experience": _experience(self.history)} if "frames" in last else {})


def _experience(history: Sequence[Row]) -> dict[str, Any]:
    """The figures of reinforcement learning in a history, in the form that a summary has (`dure.rl.companions`)."""
    last = history[-1]
    returns = [row["mean_return"] for row in history if row.get("mean_return") is not None]
    replay = {"size": "replay_size", "inserts": "inserts", "samples": "replay_samples", "ratio": "replay_ratio"}
    return {
        **{name: last.get(name) for name in ("frames", "episodes", "recent_return")},
        "frames_per_second": last["frames"] / last["seconds"] if last["frames"] and last["seconds"] else None,
        "mean_return": returns[-1] if returns else None,
        "best_return": max(returns, default=None),
        "replay": {name: last.get(key) for name, key in replay.items()},
        "param_lag": {"mean": last.get("param_lag")},
    }
