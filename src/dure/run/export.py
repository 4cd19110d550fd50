"""Models of runs for other programs, and back: `dure export` and `dure import`.

    run folder --export--> safetensors    the model's state_dict, for load_state_dict
                       --> DCP            model and optimizer, for torch.distributed.checkpoint and fully_shard
    run folder <--import-- either         one more checkpoint, from which --resume goes on

A model is read and written parameter by parameter, an optimizer's state vector by vector.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from dure.core.regular_file import CHECKPOINTS, check_output, check_regular
from dure.core.state import State
from dure.errors import UsageError
from dure.job.replica import Replica
from dure.run import checkpoint
from dure.run.checkpoint import PartFiles, fitting
from dure.run.config import TrainConfig
from dure.run.dcp import TorchFolder, load_buffer, names_of
from dure.run.dcp import write as write_dcp
from dure.run.prebuilt import Prebuilt
from dure.run.resolve import resolve
from dure.run.resume import cluster_of, resumed
from dure.run.saved_model import PIECE, SavedModel, WholeVectors, merged, write_tensors
from dure.run.setup import Setup
from dure.run.split_again import buffers_of, can_split_again, writer_of
from dure.run.tensor_file import TensorFile, TensorSize

Format = Literal["safetensors", "dcp"]

DEFAULT_NAMES: Mapping[Format, str] = {"safetensors": "model.safetensors", "dcp": "dcp"}
"""The names in the folder of a run that an export has where no other is given."""


@dataclass(frozen=True)
class Exported:
    """A model that was written to `path`: its `step`, and whether the optimizer's state is there too."""

    path: Path
    step: int
    optimizer: bool


@dataclass(frozen=True)
class Imported:
    """A model that was written to a checkpoint of `step`; `optimizer`: with the state of its optimizer."""

    folder: Path
    step: int
    optimizer: bool


class SavedRun:
    """The newest checkpoint of the run in `folder`, and the model in it.

    Raises `UsageError` for a run whose workers have no common model there, `CheckpointError` where no checkpoint is
    whole. Code that the run names is executed, so it is checked as for a resumed run, unless that is left to `trust`.
    """

    def __init__(self, folder: Path, *, trust: bool = False) -> None:
        config = replace(resumed(TrainConfig(resume=folder, trust=trust)), device=None)
        cluster = cluster_of(folder) if config.virtual else None
        setup, _ = resolve(config, Prebuilt(cluster=cluster))
        self.folder = folder
        self.found = checkpoint.load(folder / CHECKPOINTS)
        self._check(setup)
        with fitting("run"):
            self.setup = writer_of(self.found.parts, setup)
            self.model = SavedModel(self.parts, self.setup)
            self.worker = self.parts.plain["worker-0"]
        if "params" not in self.model.names:
            raise UsageError(f"{folder} is a run with timing_only, whose checkpoints have no values. Run it without.")

    @property
    def parts(self) -> PartFiles:
        """The parts of the checkpoint."""
        return self.found.parts

    @property
    def replica(self) -> Replica:
        """The replica of the whole model; its parameters have initial values."""
        return self.setup.replica

    def _check(self, setup: Setup) -> None:
        members = setup.strategy.text()
        if not can_split_again(members, members["partition"]):
            raise UsageError(
                f'{self.folder} is a run of "{setup.strategy}". Only the workers of bsp over collectives, without a '
                "codec and without a pipeline of several versions, have one model at a checkpoint: export a run of "
                '"bsp collective", with or without a partition.'
            )

    def load_buffers(self) -> None:
        """Set the buffers of the replica's module to those of the run."""
        with fitting("worker-0"):
            buffers = merged(self.model)
        if buffers is not None:
            self.replica.load_buffers(buffers)


def export(folder: Path, to: Format, out: Path | None = None, *, trust: bool = False) -> Exported:
    """Write the model of the newest checkpoint of the run in `folder`, and for DCP the state of its optimizer.

    Raises as `SavedRun`, and `UsageError` where `out` is there already, or cannot be written.
    """
    run, path = SavedRun(folder, trust=trust), out or folder / DEFAULT_NAMES[to]
    if path.exists():
        raise UsageError(f"{path} is there already: give another --out, or remove it.")
    check_output(path)
    write_model(run, to, path)
    return Exported(path, run.found.step, to == "dcp")


def write_model(run: SavedRun, to: Format, path: Path) -> None:
    """Write the model of a run to `path`. If that fails, nothing is left there."""
    run.load_buffers()
    draft = path.with_name(f"{path.name}.tmp")
    try:
        if to == "safetensors":
            _write_safetensors(draft, run)
        else:
            steps, clock = int(run.worker["optimizer"]["steps"]), int(run.worker["clock"])
            rates = run.setup.model.rates
            write_dcp(draft, run.replica, rates, run.model.names, run.model.read, clock=clock, steps=steps)
        os.replace(draft, path)
    finally:
        if draft.is_dir():
            shutil.rmtree(draft)
        draft.unlink(missing_ok=True)


def _write_safetensors(path: Path, run: SavedRun) -> None:
    named = run.replica.module.state_dict(keep_vars=True)
    other = next((name for name, each in named.items() if not isinstance(each, torch.Tensor)), None)
    if other is not None:
        raise UsageError(f"the model's state has {other!r}, which is no tensor, and safetensors hold tensors alone.")
    trained = names_of(run.replica)
    with TensorFile(path, {name: TensorSize(each.dtype, each.shape) for name, each in named.items()}) as file:
        for name, each in named.items():
            if name not in trained:
                file.put(name, 0, each)
                continue
            layer = trained[name]
            for start in range(layer.start, layer.stop, PIECE):
                file.put(name, start - layer.start, run.model.read("params", start, min(start + PIECE, layer.stop)))


# ---- back


def bring(source: Path, folder: Path, step: int | None = None, *, trust: bool = False) -> Imported:
    """Add a checkpoint to the run in `folder`, with the model and, if it has one, the optimizer's state of `source`.

    The checkpoint is of `step`: if left out, the steps of the optimizer, or those of the newest checkpoint. Raises as
    `SavedRun`, and `UsageError` for a `source` of another model or for an earlier step.
    """
    if source.is_dir() and not trust:
        raise UsageError(
            f"{source} is a folder of torch.distributed.checkpoint, which holds pickles: to read one can run code of "
            "its author. Give --trust if it is yours."
        )
    run = SavedRun(folder, trust=trust)
    newest = int(run.worker["clock"])
    run.load_buffers()
    vectors = run.model.names
    found = (
        TorchFolder(source, run.replica, run.setup.job.optimizer, vectors)
        if source.is_dir()
        else TensorsOfModel(source, run.replica, vectors)
    )
    found.load_buffers()
    step = step or found.steps or newest
    if step < newest:
        raise UsageError(
            f"{folder} has a checkpoint of step {newest}, and this one would be of step {step}: a run goes on from its "
            f"newest. Give --step {newest} or more, or import into a copy of the folder."
        )
    _write_checkpoint(run, found, step, found.steps or (step if found.has_optimizer else 0))
    return Imported(folder, step, found.has_optimizer)


class TensorsOfModel:
    """The vectors of a model in a file of safetensors: its parameters, and zeros for the optimizer's.

    Raises `UsageError` where a parameter is missing, or has another shape or type.
    """

    steps = None

    def __init__(self, path: Path, replica: Replica, vectors: Sequence[str]) -> None:
        self.names = vectors
        self.has_optimizer = len(vectors) == 1
        self._path, self._replica = path, replica
        try:
            check_regular(path)
            with safe_open(path, "pt") as file:
                self._there = set(file.keys())
        except (OSError, SafetensorError) as error:
            raise UsageError(
                f"{path} cannot be read as a file of safetensors ({error}). Name a file that dure export --to "
                "safetensors writes, or a folder of torch.distributed.checkpoint."
            ) from error
        for layer in replica.layers:
            if layer.name not in self._there:
                raise UsageError(f"{path} has no parameter {layer.name!r}: it is the state of another model.")
            found = self._read(layer.name)
            if tuple(found.shape) != layer.shape or found.dtype != replica.dtype:
                raise UsageError(
                    f"{path}: {layer.name} is {found.dtype} of shape {tuple(found.shape)}, and the parameter is "
                    f"{replica.dtype} of shape {layer.shape}: it is the state of another model."
                )

    def pieces(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """A vector, one parameter after another."""
        for layer in self._replica.layers:
            found = self._read(layer.name) if name == "params" else torch.zeros(layer.numel, dtype=self._replica.dtype)
            yield layer.start, found.reshape(-1)

    def load_buffers(self) -> None:
        """Copy the buffers that the file has to the module of the replica."""
        for name, buffer in self._replica.module.named_buffers():
            if name in self._there:
                load_buffer(self._path, name, buffer, self._read(name))

    def _read(self, name: str) -> torch.Tensor:
        with safe_open(self._path, "pt") as file:
            found: torch.Tensor = file.get_tensor(name)
        return found


def _write_checkpoint(run: SavedRun, vectors: WholeVectors, step: int, steps: int) -> None:
    """Write the checkpoint of `step` for the workers of a run; the optimizer has made so many `steps`."""
    setup, place = run.setup, run.folder / CHECKPOINTS
    draft = checkpoint.begin(place, step)
    try:
        buffers = run.replica.buffers_flat()
        copies = [buffers] * (setup.workers // setup.parts) if buffers.numel() else []
        write_tensors(draft, setup, vectors, buffers_of(setup, copies) if copies else {})
        with fitting("run"):
            for number in range(setup.workers):
                plain = dict(run.parts.plain[f"worker-{number}"])
                plain |= {"clock": step, "optimizer": {**plain["optimizer"], "steps": steps}}
                plain["source"] = _moved(setup, number, plain["source"], step)
                checkpoint.write_plain(draft, f"worker-{number}", plain)
            whole = run.parts["run"]
            checkpoint.write_part(draft, "run", State(whole.tensors, _run(setup, whole.plain, run.worker, step)))
        checkpoint.commit(place, step)
    except BaseException:
        checkpoint.discard(place, step)
        raise


def _moved(setup: Setup, number: int, source: Mapping[str, Any], step: int) -> dict[str, Any]:
    """The state of the source of a worker, at the mini-batch with the number of a step."""
    sampler = setup.data.sampler(number // setup.parts)
    sampler.number = step
    return {**source, "sampler": sampler.state()} if "sampler" in source else dict(sampler.state())


def _run(setup: Setup, plain: Mapping[str, Any], worker: Mapping[str, Any], step: int) -> dict[str, Any]:
    """The values of a run whose workers have made all steps up to `step`, as if they had been made here."""
    found, more = {**plain, "checkpoint": step}, step - int(worker["clock"])
    if "at" in plain:  # in virtual time
        found["at"] = [[number, step] for number in range(setup.workers)]
        found["done"] = plain["done"] + more * setup.workers
        counts = plain["totals"]["counts"]
        samples = counts["samples"] + more * sum(setup.batch_sizes)
        found["totals"] = {**plain["totals"], "counts": {**counts, "samples": samples}, "steps": step}
    if "progress" in plain:  # on processes; the last reports may be of earlier steps
        done, sent = step - int(worker["entered"]), {name: each["bytes"] for name, each in plain["progress"].items()}
        found["progress"] = {
            name: {"steps": step, "at": max(step - 1, 0), "done": done, "loss": None, "bytes": sent.get(name, 0)}
            for name in (f"worker {number}" for number in range(setup.workers))
        }
        found["last_steps"] = dict.fromkeys(found["progress"], step)
    return found
