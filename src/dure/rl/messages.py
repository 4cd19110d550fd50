"""Transitions as the flat tensors of messages.

| message   | tensors                                                                                              |
|-----------|------------------------------------------------------------------------------------------------------|
| insertion | each column; the priorities (none of them: the current maximum); the frames, if the layout has some  |
| sample    | the keys, the weights, each column; observations are stacked                                         |
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from dure.core.node import TensorSpec
from dure.errors import Refused
from dure.rl.transitions import FRAMES, STACKED, Column, Layout, Transitions

if TYPE_CHECKING:
    from dure.rl.replay import Sample

FOREVER = 86_400.0
"""Time limit of calls that wait for other nodes, in seconds."""

VERSION = Column("version", "int64")
"""The version of the model that an actor used."""


def with_version(layout: Layout) -> Layout:
    """The columns of an algorithm, and the version."""
    return Layout((*layout.columns, VERSION), layout.frames)


def inserted_columns(layout: Layout) -> list[Column]:
    """The columns of an insertion, where observations of stacked frames are references to frames."""
    if layout.frames is None:
        return list(layout.columns)
    stack = layout.frames.stack
    return [Column(each.name, "int32", (stack,)) if each.name in STACKED else each for each in layout.columns]


def inserted_specs(layout: Layout, most: int) -> list[TensorSpec]:
    """The tensors of an insertion of at most `most` transitions."""
    specs = [TensorSpec(each.dtype, most * math.prod(each.shape), at_most=True) for each in inserted_columns(layout)]
    specs.append(TensorSpec("float32", most, at_most=True))
    if layout.frames is not None:
        most_frames = most * len(STACKED) * layout.frames.stack
        specs.append(TensorSpec("uint8", most_frames * layout.frames.nbytes, at_most=True))
    return specs


def inserted_tensors(layout: Layout, values: Transitions, priorities: NDArray[Any] | None) -> list[torch.Tensor]:
    """The tensors of an insertion."""
    given = np.empty(0, np.float32) if priorities is None else priorities.astype(np.float32)
    tensors = [*(_flat(values[each.name]) for each in inserted_columns(layout)), _flat(given)]
    return tensors if layout.frames is None else [*tensors, _flat(values[FRAMES])]


def insertion_of(layout: Layout, tensors: Sequence[torch.Tensor]) -> tuple[Transitions, NDArray[Any] | None]:
    """The transitions and priorities of a message. Raises `Refused` where the tensors do not belong together."""
    columns = inserted_columns(layout)
    arrays = [tensor.numpy() for tensor in tensors]
    priorities = arrays[len(columns)]
    count = len(arrays[0]) // math.prod(columns[0].shape)
    values: Transitions = {}
    for column, array in zip(columns, arrays, strict=False):
        if len(array) != count * math.prod(column.shape):
            raise Refused(f"an insertion has {count} transitions and {len(array)} values of {column.name}.")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise Refused(f"an insertion has NaN or infinity in {column.name}.")
        values[column.name] = array.reshape(count, *column.shape)
    if len(priorities) not in (0, count):
        raise Refused(f"an insertion has {count} transitions and {len(priorities)} priorities.")
    check_priorities(priorities)
    if layout.frames is not None:
        values[FRAMES] = _frames_of(layout, values, arrays[-1])
    return values, priorities if len(priorities) else None


def check_priorities(priorities: NDArray[Any]) -> None:
    """Raise `Refused` unless all `priorities` are finite and at least 0."""
    if not (np.isfinite(priorities).all() and (priorities >= 0).all()):
        raise Refused("priorities must be finite and at least 0, and some are not.")


def _frames_of(layout: Layout, values: Transitions, flat_frames: NDArray[Any]) -> NDArray[Any]:
    """The frames of a message, to which all references lead."""
    assert layout.frames is not None
    count, rest = divmod(len(flat_frames), layout.frames.nbytes)
    for name in STACKED:
        references = values[name]
        if rest or (references.size and not 0 <= references.min() <= references.max() < count):
            raise Refused(f"an insertion has {count} frames, and {name} refers to others.")
    return flat_frames.reshape(count, *layout.frames.shape)


def sampled_specs(layout: Layout, count: int) -> list[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype and shape of each tensor of a sample of `count` transitions."""
    columns = [(each.name, each.dtype, (count, *each.shape)) for each in layout.columns]
    return [("keys", "int64", (count,)), ("weights", "float32", (count,)), *columns]


def sampled_nbytes(layout: Layout, count: int) -> int:
    """Bytes of a sample of `count` transitions."""
    return count * sum(each.nbytes for each in layout.columns)


def sampled_tensors(layout: Layout, sample: Sample) -> list[torch.Tensor]:
    """The tensors of a sample, in the order of `sampled_specs`."""
    columns = [_flat(sample.values[each.name]) for each in layout.columns]
    return [_flat(sample.keys), _flat(sample.weights), *columns]


def room_for(layout: Layout, count: int) -> dict[str, torch.Tensor]:
    """Tensors that receive a sample of `count` transitions, by name, in the order of `sampled_specs`."""
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in sampled_specs(layout, count)
    }


def flat(tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The flat views of tensors."""
    return [tensor.view(-1) for tensor in tensors.values()]


def _flat(values: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values).reshape(-1))
