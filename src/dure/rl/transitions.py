"""Transitions as columns, one array of each name with one row of each transition, and their returns of n steps.

Observations of stacked video frames are sent and stored with every frame once (`FrameLayout`): two consecutive
observations of four frames share three of them, and the next observation of one transition is an observation of a
later one.

    R = sum over j < m of gamma^j r_(t+j)        m = n, or the steps that are left of the episode
    D = gamma^m, or 0 if the episode terminated within the window
    target of (s_t, a_t):  R + D * bootstrap value of s_(t+m)

    rewards    r0    r1    r2    r3    r4 | end           n = 3
    items      s0 ----------> s3
                     s1 ----------> s4
                           s2 ----------> s5
                                 s3 ----> s5              the flush at an end: m = 2,
                                       s4 > s5            m = 1

A time limit (`truncated`) is no end of the task: these items bootstrap from the final observation, with D = gamma^m.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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


def check_returns(gamma: float, n_step: int) -> None:
    """Raises `UsageError` for a discount or a number of steps out of its range."""
    if not 0 <= gamma <= 1:
        raise UsageError(f"gamma must be between 0 and 1, got {gamma}.")
    if n_step < 1:
        raise UsageError(f"a return has at least one step, got n_step = {n_step}. Use 1 for ordinary transitions.")


class Item(NamedTuple):
    """A transition over up to n steps. `reward` is R and `discount` is D."""

    observation: Any
    action: Any
    reward: float
    discount: float
    next_observation: Any


class _Open:
    """A transition whose window is not full: its return so far, and the discount of the next reward."""

    __slots__ = ("action", "discount", "observation", "reward")

    def __init__(self, observation: Any, action: Any) -> None:
        self.observation = observation
        self.action = action
        self.reward = 0.0
        self.discount = 1.0


class NStep:
    """The windows of several streams of steps. Observations and actions may be any objects.

    Raises:
        UsageError: `n` is below 1, or `gamma` is not between 0 and 1.
    """

    def __init__(self, n: int, gamma: float) -> None:
        check_returns(gamma, n)
        self.n = n
        self.gamma = gamma
        self._windows: dict[int, deque[_Open]] = {}

    def add(
        self,
        stream: int,
        observation: Any,
        action: Any,
        reward: float,
        next_observation: Any,
        *,
        terminated: bool,
        truncated: bool,
    ) -> list[Item]:
        """Add a step of `stream`, and return the items that it completes, oldest first.

        `next_observation` is the observation that the step led to, also at an end, never the next episode's first.
        """
        window = self._windows.setdefault(stream, deque())
        window.append(_Open(observation, action))
        for each in window:
            each.reward += each.discount * reward
            each.discount *= self.gamma
        if terminated or truncated:
            complete = list(window)
            window.clear()
        else:
            complete = [window.popleft()] if len(window) == self.n else []
        return [
            Item(each.observation, each.action, each.reward, 0.0 if terminated else each.discount, next_observation)
            for each in complete
        ]


def columns(items: Sequence[Item], layout: Layout) -> Transitions:
    """The `items` as arrays of the types of `layout`. With frames, observations are references to them (int32)."""
    found = {}
    for column in layout.columns:
        dtype = "int32" if layout.frames is not None and column.name in STACKED else column.dtype
        found[column.name] = np.array([getattr(item, column.name) for item in items], dtype=dtype)
    return found
