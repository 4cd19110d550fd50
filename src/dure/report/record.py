"""The record of a run: one folder that can be read while the run goes on and after it was killed.

    config.json      configuration, versions, seed; written before the first step
    history.jsonl    one row per evaluation, flushed line by line; a torn last line is ignored
    summary.json     the figures of `dure train --json`; written at the end, complete or absent
    trace.json       the activities of all nodes over time, with `--trace` (`report.trace`)
    checkpoints/     created first and exclusively: two runs never share a folder

Numbers that are not finite are written as text (`report.files`). Reading checks the types of the entries that
reports use.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from dure.core.regular_file import CHECKPOINTS, read_regular
from dure.core.user_code import record
from dure.errors import RecordError, UsageError
from dure.report.files import JsonLines, Unwritten, from_json, has_writer, replacing, to_json

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
    (`run.resume`). `written` names the options of the configuration that are not defaults; older records have none.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    history: Sequence[Row] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    seed: int | None = None
    code: Mapping[str, Any] = field(default_factory=dict)
    written: Sequence[str] = ()
    steps: int | None = None
    """Mini-batches per worker that the run makes at most; older records have none."""

    def summary(self) -> dict[str, Any]:
        """The figures of `dure train --json`; for a run that did not finish, those of its last row of history."""
        if self.figures or not self.history:
            return dict(self.figures)
        last = self.history[-1]
        names = {"step": "steps", "bytes": "bytes_sent"}
        figures = {names.get(key, key): value for key, value in last.items()}
        return figures | ({"experience": _experience_of(self.history)} if "frames" in last else {})


def _experience_of(history: Sequence[Row]) -> dict[str, Any]:
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


CONFIG, HISTORY, SUMMARY, TRACE = "config.json", "history.jsonl", "summary.json", "trace.json"


class RunFolder:
    """The folder that a run writes: a context manager, made by `create`, `numbered` or `resume`.

    A file that cannot be written, as on a full disk, is noted in `unwritten`, and raises no error. A new run that is
    refused (`UsageError`) before it has written a row leaves no folder: the same command can be given again.
    """

    def __init__(self, path: Path, *, is_new: bool = False) -> None:
        self.path = path
        self._is_new = is_new
        self.unwritten = Unwritten()
        self._history: JsonLines | None = None

    @classmethod
    def create(cls, path: str | Path) -> RunFolder:
        """Take `path` for a new run. Raises `UsageError` if the folder exists and is not empty."""
        path = Path(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            taken = any(path.iterdir())
        except OSError as error:
            raise UsageError(f"cannot make the run folder {path}: {error.strerror}. Choose another --out.") from error
        if not taken:
            try:
                (path / CHECKPOINTS).mkdir()
            except FileExistsError:
                taken = True
        if taken:
            raise UsageError(
                f"the run folder {path} is not empty, and a run never overwrites another. "
                f"Choose another --out, remove the folder, or resume the run in it."
            )
        return cls(path, is_new=True)

    @classmethod
    def numbered(cls, parent: str | Path, name: str) -> RunFolder:
        """Make a folder `parent/name-001`, or with the next number that is free. `name` may be a strategy's text."""
        parent = Path(parent)
        stem = re.sub(r"[^A-Za-z0-9._=-]+", "-", name).strip("-.") or "run"
        try:
            parent.mkdir(parents=True, exist_ok=True)
            number = 1 + sum(1 for entry in parent.iterdir() if entry.name.startswith(f"{stem}-"))
            while True:
                path = parent / f"{stem}-{number:03d}"
                try:
                    path.mkdir()
                    (path / CHECKPOINTS).mkdir()
                    return cls(path, is_new=True)
                except FileExistsError:
                    number += 1
        except OSError as error:
            raise UsageError(f"cannot make a run folder in {parent}: {error.strerror}. Choose another.") from error

    @classmethod
    def resume(cls, path: str | Path, *, rows: int) -> RunFolder:
        """Continue the run in `path` from a checkpoint with the first `rows` of its history; later rows are dropped."""
        path = Path(path)
        require_run(path)
        folder = cls(path)
        folder.rewind(rows)
        (path / SUMMARY).unlink(missing_ok=True)
        (path / CHECKPOINTS).mkdir(exist_ok=True)
        return folder

    def rewind(self, rows: int) -> None:
        """Drop all but the first `rows` of the history."""
        self.close()
        path = self.path / HISTORY
        if not path.exists():
            return
        *lines, _torn = _read(path).split(b"\n")
        end = 0
        for line in lines:
            if not rows:
                break
            end, rows = end + len(line) + 1, rows - bool(line.strip())
        with path.open("r+b") as file:  # a shorter file needs no space on the disk
            file.truncate(end)

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def trace(self) -> Path:
        return self.path / TRACE

    def write_config(
        self,
        config: Mapping[str, Any],
        written: Sequence[str] = (),
        seed: int | None = None,
        code: Mapping[str, Any] = MappingProxyType({}),
        steps: int | None = None,
    ) -> None:
        """Write `config.json`: the configuration, the seed, the `code` that the configuration names, and versions.

        The versions are those of this environment. `written` names the options that are not defaults. `steps` are the
        mini-batches per worker.
        """
        found = {"config": config, "written": list(written), "seed": seed, "steps": steps}
        self._write(CONFIG, {**found, "versions": versions(), "code": dict(code)})

    def append(self, row: Row) -> None:
        """Append a row to the history; the operating system has it when `append` returns, unless the disk is full.

        A row that a full disk refused is written with a later one.
        """
        with self.unwritten.tolerated(HISTORY):
            if self._history is None:
                self._history = JsonLines(self.path / HISTORY)
            self._history.write(row)

    def look_for_removed(self) -> None:
        """Note the files of the record that were removed: writing to an open file shows no error."""
        self.close()
        for name in (CONFIG, HISTORY):
            if not (self.path / name).exists():
                self.unwritten.causes.setdefault(name, "it is not there any more")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`, which is complete or absent."""
        self._write(SUMMARY, summary)

    def close(self) -> None:
        if self._history is not None:
            with self.unwritten.tolerated(HISTORY):
                self._history.close()
            self._history = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self.close()
        if self._is_new and kind is not None and issubclass(kind, UsageError) and not (self.path / HISTORY).exists():
            with suppress(OSError):  # something else is in it
                self.checkpoints.rmdir()
                (self.path / CONFIG).unlink(missing_ok=True)
                self.path.rmdir()
        elif error is not None:
            record(self.path, "driver", error)

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        with self.unwritten.tolerated(name), replacing(self.path / name) as file:
            file.write(to_json(value, indent=2) + "\n")


def read_history(path: Path) -> list[dict[str, Any]]:
    """The rows of a `history.jsonl`; none if the file is missing.

    A last line without its end is ignored, as a kill leaves one. Other damage raises a RecordError with the line.
    """
    if not path.exists():
        return []
    *lines, _torn = _read(path).split(b"\n")
    return [_row(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = from_json(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise RecordError(f"line {number} of {path} is damaged ({error}). Remove the line to use the rest.") from error
    if not isinstance(row, dict):
        raise RecordError(f"line {number} of {path} is no row of a history: it holds {line[:40]!r}.")
    return check_row(row, f"line {number} of {path}")


def goes_on(path: Path) -> bool:
    """Whether a process of this machine writes the record of the run in `path`, or may still begin to."""
    if (path / SUMMARY).exists():
        return False
    return not (path / HISTORY).exists() or has_writer(path / HISTORY)


def require_run(path: Path) -> None:
    """Raise `UsageError` unless `path` is the folder of a run."""
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise UsageError(f"{path} {what}. Name the folder of a run, as given to --out.")
    if not (path / CONFIG).is_file():
        inside = sorted(str(found.parent) for found in path.glob(f"*/{CONFIG}"))
        hint = f" Did you mean {', '.join(inside[:3])}?" if inside else " Name the folder of a run, as given to --out."
        raise UsageError(f"{path} holds no run: there is no {CONFIG} in it.{hint}")


def _read(path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}.") from error


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises `RecordError`."""
    try:
        value = from_json(_read(path).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path} is damaged: {error}.") from error
    if not isinstance(value, dict):
        raise RecordError(f"{path} holds {type(value).__name__} where an object was expected.")
    return value


class _Open(BaseModel):
    model_config = ConfigDict(strict=True)


class _Config(_Open):
    config: dict[str, Any]
    written: list[str] = []
    seed: int | None = None
    steps: int | None = None
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
    machines: str = ""
    hosts: list[str] = []
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
