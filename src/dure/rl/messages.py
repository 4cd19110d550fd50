"""Transitions as the flat tensors of messages.

| message   | tensors                                                                                         |
|-----------|-------------------------------------------------------------------------------------------------|
| insertion | the columns; the priorities (none: the current maximum); the frames, if the layout has some     |
| sample    | the keys, the weights and the columns; observations are stacked                                 |

The columns of one dtype are one tensor, one column after another: both ends spend more time on a further tensor than on
the bytes of a small one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

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

KEYS, WEIGHTS = "keys", "weights"
"""Names of the parts of a sample beside its columns."""

T = TypeVar("T", NDArray[Any], torch.Tensor)


def with_version(layout: Layout) -> Layout:
    """The columns of an algorithm, and the version."""
    return Layout((*layout.columns, VERSION), layout.frames)


def inserted_columns(layout: Layout) -> list[Column]:
    """The columns of an insertion, where observations of stacked frames are references to frames."""
    if layout.frames is None:
        return list(layout.columns)
    stack = layout.frames.stack
    return [Column(each.name, "int32", (stack,)) if each.name in STACKED else each for each in layout.columns]


class InsertionTensors:
    """The tensors of insertions of transitions of `layout`, and the transitions in them."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._groups = _groups(inserted_columns(layout))

    def specs(self, most: int) -> list[TensorSpec]:
        """The tensors of an insertion of at most `most` transitions."""
        specs = [TensorSpec(group.dtype, most * group.width, at_most=True) for group in self._groups]
        specs.append(TensorSpec("float32", most, at_most=True))
        if self.layout.frames is not None:
            most_frames = most * len(STACKED) * self.layout.frames.stack
            specs.append(TensorSpec("uint8", most_frames * self.layout.frames.nbytes, at_most=True))
        return specs

    def tensors(self, values: Transitions, priorities: NDArray[Any] | None) -> list[torch.Tensor]:
        """The tensors of an insertion."""
        given = np.empty(0, np.float32) if priorities is None else priorities.astype(np.float32)
        tensors = [*(group.joined(values) for group in self._groups), _flat(given)]
        return tensors if self.layout.frames is None else [*tensors, _flat(values[FRAMES])]

    def read(self, tensors: Sequence[torch.Tensor]) -> tuple[Transitions, NDArray[Any] | None]:
        """The transitions and priorities of a message. Raises `Refused` where the tensors do not belong together."""
        arrays = [tensor.numpy() for tensor in tensors]
        priorities = arrays[len(self._groups)]
        count = len(arrays[0]) // self._groups[0].width
        values: Transitions = {}
        for group, array in zip(self._groups, arrays, strict=False):
            if len(array) != count * group.width:
                names = ", ".join(each.name for each in group.columns)
                raise Refused(f"an insertion has {count} transitions and {len(array)} values of {names}.")
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                names = ", ".join(name for name, part in group.split(array).items() if not np.isfinite(part).all())
                raise Refused(f"an insertion has NaN or infinity in {names}.")
            values |= group.split(array)
        if len(priorities) not in (0, count):
            raise Refused(f"an insertion has {count} transitions and {len(priorities)} priorities.")
        check_priorities(priorities)
        if self.layout.frames is not None:
            values[FRAMES] = _frames_of(self.layout, values, arrays[-1])
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


class SampleTensors:
    """The tensors of samples of transitions of `layout`, and the memory that receives them."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._groups = _groups([Column(KEYS, "int64"), Column(WEIGHTS, "float32"), *layout.columns])

    def nbytes(self, count: int) -> int:
        """Bytes of the transitions of a sample of `count`."""
        return count * sum(each.nbytes for each in self.layout.columns)

    def tensors(self, sample: Sample) -> list[torch.Tensor]:
        """The tensors of a sample."""
        values: Transitions = {KEYS: sample.keys, WEIGHTS: sample.weights, **sample.values}
        return [group.joined(values) for group in self._groups]

    def room(self, count: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Tensors that receive a sample of `count` transitions, and their parts by name."""
        tensors = [torch.empty(count * group.width, dtype=getattr(torch, group.dtype)) for group in self._groups]
        parts: dict[str, torch.Tensor] = {}
        for group, tensor in zip(self._groups, tensors, strict=True):
            parts |= group.split(tensor)
        return tensors, parts


class _Group:
    """The columns of one tensor, one after another."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = columns
        self.dtype = columns[0].dtype
        self.widths = [math.prod(each.shape) for each in columns]
        self.width = sum(self.widths)

    def joined(self, values: Transitions) -> torch.Tensor:
        if len(self.columns) == 1:
            return _flat(values[self.columns[0].name])
        return torch.from_numpy(np.concatenate([values[each.name].reshape(-1) for each in self.columns]))

    def split(self, whole: T) -> dict[str, T]:
        """The columns of `whole`, by name, in its memory."""
        count, parts, start = len(whole) // self.width, {}, 0
        for column, width in zip(self.columns, self.widths, strict=True):
            stop = start + count * width
            parts[column.name] = whole[start:stop].reshape(count, *column.shape)
            start = stop
        return parts


def _groups(columns: Sequence[Column]) -> list[_Group]:
    """Columns by dtype. Each column of bytes is a group, since to join images costs more than a further tensor."""
    groups: dict[str, list[Column]] = {}
    for each in columns:
        groups.setdefault(each.name if each.dtype == "uint8" else each.dtype, []).append(each)
    return [_Group(group) for group in groups.values()]


def _flat(values: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values).reshape(-1))
