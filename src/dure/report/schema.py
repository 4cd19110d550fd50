"""Types of the entries of a run's record that reports read. Other entries are not checked."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from dure.errors import RecordError


class _Open(BaseModel):
    model_config = ConfigDict(strict=True)


class _Config(_Open):
    config: dict[str, Any]
    seed: int | None = None
    versions: dict[str, str] = {}


class _Row(_Open):
    seconds: float
    step: float = 0
    updates: float = 0
    samples: float = 0
    bytes: float = 0
    loss: float | None = None
    accuracy: float | None = None
    consensus: float | None = None
    frames: float | None = None
    mean_return: float | None = None
    recent_return: float | None = None
    replay_size: float | None = None
    inserts: float | None = None
    replay_samples: float | None = None
    replay_ratio: float | None = None
    param_lag: float | None = None


class _VersionCounts(_Open):
    histogram: dict[str, int] = {}


class _Graph(_Open):
    neighbors: str
    gap: float
    averagings_to_halve: float
    workers: int
    edges: list[list[int]]


class _BreakEven(_Open):
    coding: float = 0.0
    link: float | None = None
    break_even: float | None = None
    steps: list[dict[str, float]] = []


class _Replay(_Open):
    size: float | None = None
    inserts: float | None = None
    samples: float | None = None
    ratio: float | None = None
    bytes: float | None = None


class _ParamLag(_Open):
    mean: float | None = None
    max: float | None = None


class _Experience(_Open):
    env: str = ""
    actors: int | None = None
    frames: float | None = None
    frames_per_second: float | None = None
    episodes: float | None = None
    mean_return: float | None = None
    best_return: float | None = None
    recent_return: float | None = None
    replay: _Replay = _Replay()
    param_lag: _ParamLag = _ParamLag()


class _Figures(_Open):
    strategy: dict[str, str] | str = ""
    workers: int = 1
    devices: list[str] = []
    loss: float | None = None
    accuracy: float | None = None
    best_accuracy: float | None = None
    staleness: _VersionCounts | None = None
    version_skew: _VersionCounts | None = None
    graph: _Graph | None = None
    payoff: _BreakEven | None = None
    experience: _Experience | None = None


def check_config(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Check the content of `config.json`. Raises `RecordError`, which names `where`."""
    return _checked(_Config, values, where)


def check_row(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Check a row of a history. Raises `RecordError`, which names `where`."""
    return _checked(_Row, values, where)


def check_figures(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Check the content of `summary.json`. Raises `RecordError`, which names `where`."""
    return _checked(_Figures, values, where)


def _checked(kind: type[BaseModel], values: dict[str, Any], where: str) -> dict[str, Any]:
    try:
        kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        reason = first["msg"].removeprefix("Input ")
        shown = "" if first["type"] == "missing" else f", and holds {str(first['input'])[:40]!r}"
        raise RecordError(
            f"{where} is not what dure wrote: {place} {reason[:1].lower()}{reason[1:]}{shown}."
        ) from error
    return values
