"""Spaces of observations and actions: accepts the kinds that the algorithms support, and rejects all others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dure.errors import UsageError
from dure.rl.transitions import Column, FrameLayout, Layout

if TYPE_CHECKING:
    from gymnasium import Space
    from gymnasium.spaces import Box

SHOWN = 200
"""Most characters of a space in an error."""


def arrays(space: Space[Any]) -> Box:
    """The space of observations that are arrays. Raises `UsageError` for all others."""
    from gymnasium.spaces import Box

    if not isinstance(space, Box) or not space.shape:
        raise UsageError(
            f"observations must be arrays, a gymnasium.spaces.Box, and are {_shown(space)}. Wrap the environment in "
            "gymnasium.wrappers.FlattenObservation, in a function that FILE.py:FUNCTION names."
        )
    return space


def is_image(space: Box) -> bool:
    """Whether observations are images of bytes, channels first."""
    return space.dtype == np.uint8 and len(space.shape) == 3


def layout(space: Space[Any], action: Column) -> Layout:
    """The columns of transitions with observations of `space`. Images are stacks of frames, which are stored once."""
    box = arrays(space)
    dtype = "uint8" if box.dtype in (np.uint8, np.bool_) else "float32"
    frames = FrameLayout(box.shape[1:], box.shape[0]) if is_image(box) else None
    columns = (
        Column("observation", dtype, box.shape),
        action,
        Column("reward", "float32"),
        Column("discount", "float32"),
        Column("next_observation", dtype, box.shape),
    )
    return Layout(columns, frames)


def choices(space: Space[Any]) -> int:
    """The number of actions of a discrete space. Raises `UsageError` for all others."""
    from gymnasium.spaces import Box, Discrete

    if isinstance(space, Box):
        raise UsageError(
            f"DQN chooses among discrete actions, and those of this environment are continuous: {_shown(space)}. "
            "Use DPG, which learns continuous actions."
        )
    if not isinstance(space, Discrete):
        raise UsageError(
            f"DQN needs actions that are numbered, gymnasium.spaces.Discrete, and they are {_shown(space)}. Map them "
            "to one number in a gymnasium.ActionWrapper, in a function that FILE.py:FUNCTION names."
        )
    if space.start:
        raise UsageError(
            f"actions must be numbered from 0, and those of {_shown(space)} begin with {space.start}. Subtract it in a "
            "gymnasium.wrappers.TransformAction, in a function that FILE.py:FUNCTION names."
        )
    return int(space.n)


def bounded(space: Space[Any]) -> Box:
    """The space of continuous actions, vectors with bounds. Raises `UsageError` for all others."""
    from gymnasium.spaces import Box, Discrete

    if isinstance(space, Discrete):
        raise UsageError(
            f"DPG learns continuous actions, and those of this environment are discrete: {_shown(space)}. "
            "Use DQN, which chooses among discrete actions."
        )
    if not isinstance(space, Box) or len(space.shape) != 1 or space.dtype.kind != "f":
        raise UsageError(
            f"DPG needs actions that are vectors of numbers, a gymnasium.spaces.Box of one axis, and they are "
            f"{_shown(space)}. Convert them in a gymnasium.ActionWrapper, in a function that FILE.py:FUNCTION names."
        )
    if not space.is_bounded():
        raise UsageError(
            f"DPG needs actions with finite bounds, and they are {_shown(space)}. Wrap the environment in "
            "gymnasium.wrappers.RescaleAction, or give its Box the bounds, as in Box(-1, 1, (2,))."
        )
    return space


def _shown(space: Space[Any]) -> str:
    text = str(space)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."
