"""Transitions as columns: one array of each name, with one row of each transition.

Observations of stacked video frames are sent and stored with every frame once (`FrameLayout`): two consecutive
observations of four frames share three of them, and the next observation of one transition is an observation of a
later one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dure.errors import UsageError

Transitions = dict[str, NDArray[Any]]
"""Arrays (count, *shape) by the name of the column, C-contiguous."""

STACKED = ("observation", "next_observation")
"""The columns that hold references to frames if the layout has frames."""

FRAMES = "frames"
"""The name of the array of frames in a message."""


@dataclass(frozen=True, slots=True)
class Column:
    """One value of a transition."""

    name: str
    dtype: str
    shape: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of one value."""
        return np.dtype(self.dtype).itemsize * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class FrameLayout:
    """One uint8 frame has `shape`; an observation is a stack of `stack` frames, oldest first."""

    shape: tuple[int, ...]
    stack: int

    @property
    def nbytes(self) -> int:
        """Bytes of one frame."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of transitions as a learner reads them.

    With `frames`, messages and the replay hold the columns `STACKED` as references (stack,) to frames. In a message the
    references are indices into its array "frames" (m, *shape).

    >>> pixels = [Column(name, "uint8", (4, 84, 84)) for name in STACKED]
    >>> Layout((Column("action", "int64"), *pixels), FrameLayout((84, 84), 4)).row.itemsize
    72
    """

    columns: tuple[Column, ...]
    frames: FrameLayout | None = None

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        if len(set(names)) < len(names) or FRAMES in names:
            raise UsageError(f"columns need different names, none of them {FRAMES!r}, got {names}.")
        if self.frames is None:
            return
        wanted = dict.fromkeys(STACKED, ("uint8", (self.frames.stack, *self.frames.shape)))
        given = {each.name: (each.dtype, each.shape) for each in self.columns if each.name in wanted}
        if given != wanted:
            raise UsageError(f"a layout with frames needs the columns {wanted} (name: dtype, shape), got {given}.")

    @property
    def row(self) -> np.dtype[np.void]:
        """The stored form of one transition: its columns side by side, or references where frames are stacked."""
        fields = [
            (each.name, "int64", (self.frames.stack,))
            if self.frames is not None and each.name in STACKED
            else (each.name, each.dtype, each.shape)
            for each in self.columns
        ]
        return np.dtype(fields, align=True)
