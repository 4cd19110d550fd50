"""Checkpoints on disk: each is complete, or does not count.

    checkpoints/
      step-200/                one folder per checkpoint, never written to again
        worker-0.safetensors   a part's tensors
        worker-0.json          and its plain values
        ...
        manifest.json          every file's size and xxh3, and its own: written last
      LATEST                   the name of the newest folder

A checkpoint is written to `step-200.tmp`, flushed to the disk, and renamed. If the process is killed or the disk is
full meanwhile, the previous checkpoint stays as it was. `load` takes the newest folder whose files all match their
manifest, and lists the folders that it passed over.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from dure.core.regular_file import LATEST, check_regular, read_regular
from dure.core.state import State
from dure.errors import CheckpointError, DureError

if TYPE_CHECKING:
    import torch

KEEP = 3
"""Checkpoints that stay on the disk."""

FORMAT = 1

UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
    SafetensorError,
    CheckpointError,
)
"""Errors that a damaged checkpoint raises when it is read."""


Parts = Mapping[str, State]
"""The state of each node, by the name of its part in a checkpoint."""


class PartFiles(Parts):
    """The parts of a checkpoint in `folder`: their `plain` values, and tensors that are read when they are asked for.

    A process so reads the tensors of its own part alone.
    """

    def __init__(self, folder: Path, plain: Mapping[str, dict[str, Any]]) -> None:
        self.plain = plain
        self._folder = folder
        for name in plain:
            with self._opened(name):  # raises the error of a file that is none
                pass

    def __getitem__(self, name: str) -> State:
        plain = self.plain[name]  # raises the error of a part that is not there
        return State(load_file(self._folder / f"{name}.safetensors"), plain)

    def __iter__(self) -> Iterator[str]:
        return iter(self.plain)

    def __len__(self) -> int:
        return len(self.plain)

    def tensors(self, name: str) -> list[str]:
        """The names of the tensors of a part."""
        with self._opened(name) as file:
            return list(file.keys())

    def read(self, name: str, tensor: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements `start` to `stop` of a flat tensor of a part; no others are read."""
        with self._opened(name) as file:
            found: torch.Tensor = file.get_slice(tensor)[start:stop]
        return found

    def _opened(self, name: str) -> Any:
        return safe_open(self._folder / f"{name}.safetensors", "pt")


def tensor_of(parts: Parts, name: str, tensor: str) -> torch.Tensor:
    """A tensor of a part; the others of a part on the disk are not read."""
    return parts.read(name, tensor) if isinstance(parts, PartFiles) else parts[name].tensors[tensor]


@dataclass(slots=True)
class Checkpoint:
    """A checkpoint that was found whole: its `step`, its parts by name, and the folders that were passed over."""

    step: int
    parts: PartFiles
    passed_over: list[str]


def begin(folder: Path, step: int) -> Path:
    """Make an empty folder for the parts of checkpoint `step`."""
    draft = folder / f"step-{step}.tmp"
    explaining_errors(draft, lambda: _make_empty(draft))
    return draft


def _make_empty(draft: Path) -> None:
    if draft.exists():
        shutil.rmtree(draft)
    draft.mkdir(parents=True)


def write_part(draft: Path, name: str, part: State) -> None:
    """Write one part. Several processes may write their parts at the same time.

    Raises:
        CheckpointError: the disk is full, or the folder cannot be written.
    """

    def write() -> None:
        tensors = {key: tensor.cpu().contiguous() for key, tensor in part.tensors.items()}
        save_file(tensors, draft / f"{name}.safetensors")
        _flush(draft / f"{name}.safetensors")

    explaining_errors(draft, write)
    write_plain(draft, name, part.plain)


def write_plain(draft: Path, name: str, plain: Mapping[str, Any]) -> None:
    """Write the plain values of one part, whose tensors are written apart. Raises as `write_part`."""
    explaining_errors(draft, lambda: _write_text(draft / f"{name}.json", json.dumps(plain, sort_keys=True)))


def commit(folder: Path, step: int, info: Mapping[str, Any] | None = None) -> Path:
    """Make the parts in the draft of checkpoint `step` the newest checkpoint."""
    draft, final = folder / f"step-{step}.tmp", folder / f"step-{step}"

    def write() -> None:
        files = {path.name: _fingerprint(path) for path in sorted(draft.iterdir())}
        manifest = {"format": FORMAT, "step": step, "files": files, "info": dict(info or {})}
        manifest["xxh3"] = _own_digest(manifest)
        _write_text(draft / "manifest.json", json.dumps(manifest, indent=1, sort_keys=True))
        _flush(draft)
        if final.exists():
            shutil.rmtree(final)
        os.replace(draft, final)
        _write_text(folder / f"{LATEST}.tmp", final.name)
        os.replace(folder / f"{LATEST}.tmp", folder / LATEST)
        _flush(folder)

    explaining_errors(folder, write)
    return final


def discard(folder: Path, step: int) -> None:
    """Remove the draft of a checkpoint that could not be finished."""
    shutil.rmtree(folder / f"step-{step}.tmp", ignore_errors=True)


def load(folder: Path) -> Checkpoint:
    """The newest complete checkpoint under `folder`.

    Raises:
        CheckpointError: there is none.
    """
    passed_over: list[str] = []
    for candidate in sorted(folder.glob("step-*"), key=_step_of, reverse=True):
        if candidate.suffix == ".tmp":
            passed_over.append(f"{candidate.name}: not finished")
            continue
        try:
            return Checkpoint(_step_of(candidate), _read(candidate), passed_over)
        except UNREADABLE as error:
            passed_over.append(f"{candidate.name}: {error}")
    seen = f" Passed over: {'; '.join(passed_over)}." if passed_over else ""
    raise CheckpointError(f"no complete checkpoint in {folder}.{seen} Start without --resume, or name another folder.")


@contextmanager
def fitting(part: str) -> Iterator[None]:
    """While open, turn the errors of state that is missing or of another form into a `CheckpointError` about `part`."""
    try:
        yield
    except DureError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f'the part "{part}" of the checkpoint does not fit this run ({type(error).__name__}: {error}). It is of '
            "another job, strategy or version, or incomplete: resume the run that wrote it, or start anew."
        ) from error


def check_origin(checkpoint: Checkpoint, origin: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` if the run that wrote a checkpoint had another job, strategy or size than `origin`."""
    with fitting("run"):
        wrote = dict(checkpoint.parts["run"].plain.get("origin", origin))  # older checkpoints have no origin
    differ = [
        f"{name} {wrote.get(name)} in place of {value}" for name, value in origin.items() if wrote.get(name) != value
    ]
    if differ:
        raise CheckpointError(
            f"the checkpoint of step {checkpoint.step} is of another run: {', '.join(differ)}. Resume the run that "
            "wrote it, or start anew."
        )


def rows(checkpoint: Checkpoint) -> int:
    """The number of history rows in a checkpoint of a run."""
    with fitting("run"):
        return len(checkpoint.parts["run"].plain["history"])


def prune(folder: Path, keep: int = KEEP) -> None:
    """Remove all but the newest `keep` checkpoints."""
    done = [path for path in folder.glob("step-*") if path.suffix != ".tmp"]
    for old in sorted(done, key=_step_of)[:-keep]:
        shutil.rmtree(old)


def _step_of(path: Path) -> int:
    digits = path.name.removeprefix("step-").removesuffix(".tmp")
    return int(digits) if digits.isdecimal() else -1


def _read(candidate: Path) -> PartFiles:
    manifest = _read_object(candidate / "manifest.json")
    if manifest["format"] != FORMAT:
        raise CheckpointError(f"format {manifest['format']}, and this version reads {FORMAT}")
    if manifest.pop("xxh3") != _own_digest(manifest) or manifest["step"] != _step_of(candidate):
        raise CheckpointError("manifest.json is damaged: it does not match itself, or its folder")
    for name, fingerprint in manifest["files"].items():
        if Path(name).name != name:
            raise CheckpointError(f"manifest.json names {name!r}, which is no file of this folder")
        check_regular(candidate / name)
        size = (candidate / name).stat().st_size  # a sparse file can claim more bytes than anyone could read
        if size != fingerprint["size"] or _fingerprint(candidate / name) != fingerprint:
            raise CheckpointError(f"{name} is damaged: it does not match the manifest")
    names = [name.removesuffix(".json") for name in manifest["files"] if name.endswith(".json")]
    unlisted = next((name for name in names if f"{name}.safetensors" not in manifest["files"]), None)
    if unlisted is not None:
        raise CheckpointError(f"manifest.json does not name {unlisted}.safetensors")
    return PartFiles(candidate, {name: _read_object(candidate / f"{name}.json") for name in names})


def _read_object(path: Path) -> dict[str, Any]:
    value = json.loads(read_regular(path))
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} holds {type(value).__name__} where an object was expected")
    return value


def _own_digest(manifest: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(manifest, sort_keys=True).encode())


def _fingerprint(path: Path) -> dict[str, Any]:
    digest = xxhash.xxh3_64()
    check_regular(path)
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return {"size": path.stat().st_size, "xxh3": digest.hexdigest()}


def _write_text(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _kept(place: Path) -> str:
    """Names the checkpoint that a run still has after one could not be written to `place`."""
    folder = next((each for each in (place, *place.parents[:1]) if (each / LATEST).exists()), None)
    if folder is None:
        return "There is no earlier one."
    return f"The previous checkpoint is whole: {(folder / LATEST).read_text(encoding='utf-8').strip()}."


def explaining_errors(place: Path, action: Callable[[], object]) -> None:
    """Do `action`, which writes to `place`; its errors become a `CheckpointError`."""
    try:
        action()
    except (OSError, SafetensorError) as error:
        free = shutil.disk_usage(place.parent if place.parent.exists() else Path.cwd()).free
        raise CheckpointError(
            f"cannot write the checkpoint to {place}: {error} ({free / 1e6:.1f} MB free). {_kept(place)}"
        ) from error
