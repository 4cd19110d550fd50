"""The vectors of a whole model in a checkpoint of its workers, read piece by piece, and written for other workers.

A vector is the parameters, or one that the optimizer keeps, flat in the order of the model. It is never read whole,
except where stages hold parts of the model: then one vector after another.

    old workers      zero: each own ranges of a vector        pipeline: each a part of the model
                              |  read(name, start, stop)                 |  one vector, joined
    new workers      TensorFile.put_ranges(name, own ranges, ...)        cut into parts, then put
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from dure.core.shards import Shards
from dure.core.vectors import Range, size
from dure.run.checkpoint import PartFiles, explaining_errors
from dure.run.gathering import merged_buffers
from dure.run.tensor_file import TensorFile, TensorSize
from dure.run.workers import BUFFERS, PARAMS, SHARD

if TYPE_CHECKING:
    from dure.run.setup import Setup

OPTIMIZER = "optimizer."
"""Beginning of the names of the optimizer's vectors."""

PIECE = 1 << 20
"""Elements of a vector that are read at once."""


class WholeVectors(Protocol):
    """The vectors of a whole model, by name: `params`, and those of the optimizer as `optimizer.mean`."""

    @property
    def names(self) -> Sequence[str]: ...

    def pieces(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """The elements of a vector in pieces, each after its place in the vector. They may come in any order."""
        ...


class _Segment(NamedTuple):
    """The range of a vector that a worker holds from element `at` of its own on."""

    start: int
    stop: int
    number: int
    at: int


class SavedModel:
    """The model in the `parts` of a checkpoint, which workers under `setup` have written.

    All copies of the model are equal, so the workers of the first are read.
    """

    def __init__(self, parts: PartFiles, setup: Setup) -> None:
        self.setup = setup
        self._parts = parts
        self._joined: tuple[str, torch.Tensor] | None = None

    @cached_property
    def names(self) -> list[str]:
        """The names of the vectors."""
        return sorted(n for n in self._parts.tensors("worker-0") if n == PARAMS or n.startswith(OPTIMIZER))

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` of a vector."""
        if is_one_part(self.setup):
            return self._read(0, name, start, stop)
        return self._whole(name)[start:stop]

    def pieces(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """A vector, from its first element to its last."""
        numel = self.setup.replica.numel
        for start in range(0, numel, PIECE):
            yield start, self.read(name, start, min(start + PIECE, numel))

    def buffers(self) -> dict[int, torch.Tensor]:
        """The buffers of each worker of the run, by number; empty where training changes none."""
        names = [f"worker-{number}" for number in range(self.setup.workers)]
        if BUFFERS not in self._parts.tensors(names[0]):
            return {}
        return {number: self._parts.read(name, BUFFERS) for number, name in enumerate(names)}

    def _whole(self, name: str) -> torch.Tensor:
        """A vector of a model that is split, put together; the last one is kept."""
        if self._joined is None or self._joined[0] != name:
            self._joined = None
            assert self.setup.stages is not None
            layout = self.setup.stages.layout
            parts = [self._read(part, name, 0, self._segments[part][-1].stop) for part in layout.parts]
            self._joined = name, layout.joined(parts)
        return self._joined[1]

    def _read(self, part: int, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements of the vector of one part of the model."""
        found = []
        for each in self._segments[part]:
            low, high = max(start, each.start), min(stop, each.stop)
            if low < high:
                at = each.at - each.start
                found.append(self._parts.read(f"worker-{each.number}", name, at + low, at + high))
        return found[0] if len(found) == 1 else torch.cat(found)

    @cached_property
    def _segments(self) -> list[list[_Segment]]:
        """For each part of the model, the ranges of its vectors, in order, with the workers that hold them."""
        return [self._segments_of(part) for part in range(self.setup.parts)]

    def _segments_of(self, part: int) -> list[_Segment]:
        own, shard = self.setup.of_worker(part), self._parts.plain[f"worker-{part}"].get(SHARD)
        if shard is None or own.shards is None:
            return [_Segment(0, own.replica.numel, part, 0)]
        shards = Shards(own.shards.units, int(shard["ranks"]))  # its hosts, for within=host, are not known here
        found = []
        for place in range(shards.ranks):
            ranges = shards.of(place)
            starts = accumulate((stop - start for start, stop in ranges), initial=0)
            number = place * self.setup.parts + part
            found += [_Segment(*each, number, at) for each, at in zip(ranges, starts, strict=False)]
        return sorted(found)


def is_one_part(setup: Setup) -> bool:
    """Whether the vectors of a part are those of the whole model."""
    return setup.parts == 1 and setup.of_worker(0).replica.numel == setup.replica.numel


def merged(model: SavedModel) -> torch.Tensor | None:
    """The buffers of all workers of a checkpoint as those of one model; None where training changes none."""
    return merged_buffers(model.setup, model.buffers())


def write_tensors(draft: Path, setup: Setup, vectors: WholeVectors, buffers: Mapping[int, torch.Tensor]) -> None:
    """Write the tensors of all workers of `setup` to the draft of a checkpoint; `buffers` are those of each, by number.

    Raises `CheckpointError` where the files cannot be written.
    """
    explaining_errors(draft, lambda: _write_tensors(draft, setup, vectors, buffers))


def _write_tensors(draft: Path, setup: Setup, vectors: WholeVectors, buffers: Mapping[int, torch.Tensor]) -> None:
    held = {number: _held_by(setup, number) for number in range(setup.workers)}
    dtype = setup.replica.dtype
    with ExitStack() as stack:
        files: dict[int, TensorFile] = {}
        for number, ranges in held.items():
            names = vectors.names if ranges is not None else ()
            sizes = {name: TensorSize(dtype, [size(ranges or [])]) for name in names}
            if number in buffers:
                sizes[BUFFERS] = TensorSize(buffers[number].dtype, buffers[number].shape)
            files[number] = stack.enter_context(TensorFile(draft / f"worker-{number}.safetensors", sizes))
            if number in buffers:
                files[number].put(BUFFERS, 0, buffers[number])
        for name in vectors.names:
            for part, start, values in _of_parts(setup, vectors, name):
                for number in range(part, setup.workers, setup.parts):
                    ranges = held[number]
                    if ranges is not None:
                        files[number].put_ranges(name, ranges, start, values)


def _of_parts(setup: Setup, vectors: WholeVectors, name: str) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Pieces of the vectors of all parts of the model: each after its part and its place in the vector of that."""
    if setup.stages is None or is_one_part(setup):
        for start, values in vectors.pieces(name):
            yield 0, start, values
        return
    whole = torch.empty(setup.replica.numel, dtype=setup.replica.dtype)
    for start, values in vectors.pieces(name):
        whole[start : start + values.numel()] = values
    for part in range(setup.parts):
        yield part, 0, setup.stages.layout.part(part, whole)


def _held_by(setup: Setup, number: int) -> list[Range] | None:
    """The ranges of the vectors of its part that are in the checkpoint of a worker; None where another's has them."""
    own, place = setup.of_worker(number), number // setup.parts
    if own.shards is None:
        return [(0, own.replica.numel)]
    return own.shards.of(place) if place < own.shards.ranks else None


def shard_of(setup: Setup, number: int) -> dict[str, dict[str, int]]:
    """The plain values of the shard of a worker in its part of a checkpoint; empty for a worker without one."""
    shards = setup.of_worker(number).shards
    if shards is None:
        return {}
    return {SHARD: {"place": number // setup.parts % shards.ranks, "ranks": shards.ranks}}
