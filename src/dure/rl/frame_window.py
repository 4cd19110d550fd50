"""References to the frames of observations, so that each frame is sent and stored once."""

from __future__ import annotations

from collections import deque

import numpy as np

from dure.rl.transitions import FRAMES, STACKED, FrameLayout, Transitions


class FrameWindow:
    """Numbers the frames of `streams` environments, and keeps those that transitions may still refer to.

    An observation is a stack of frames, the newest last; its reference is the numbers of its frames. The frames of the
    last `steps` steps of each stream stay: at most those of two observations for each, where episodes are short.
    """

    def __init__(self, layout: FrameLayout, streams: int, steps: int) -> None:
        self.layout = layout
        self._frames: dict[int, np.ndarray] = {}
        self._order = [deque[int]() for _ in range(streams)]
        self._kept = 2 * layout.stack * steps
        self._next = 0

    def whole(self, stream: int, observation: np.ndarray) -> np.ndarray:
        """The reference of the first observation of an episode."""
        numbers: list[int] = []
        for place, frame in enumerate(observation):
            repeated = place > 0 and np.array_equal(frame, observation[place - 1])
            numbers.append(numbers[-1] if repeated else self._add(stream, frame))
        return np.array(numbers)

    def next(self, stream: int, before: np.ndarray, observation: np.ndarray) -> np.ndarray:
        """The reference of the observation after the one of reference `before`.

        An observation that is no stack of consecutive frames, such as a color image, is kept as a whole.
        """
        if not all(map(np.array_equal, observation[:-1], (self._frames[int(number)] for number in before[1:]))):
            return self.whole(stream, observation)
        return np.append(before[1:], self._add(stream, observation[-1]))

    def packed(self, values: Transitions) -> Transitions:
        """`values` with references to the frames of one message, and these frames."""
        numbers, places = np.unique(np.concatenate([values[name].ravel() for name in STACKED]), return_inverse=True)
        parts = np.split(places.astype(np.int32), len(STACKED))
        found = {name: part.reshape(values[name].shape) for name, part in zip(STACKED, parts, strict=True)}
        return {**values, **found, FRAMES: np.stack([self._frames[int(number)] for number in numbers])}

    def stacked(self, references: np.ndarray) -> np.ndarray:
        """The observations of references (count, stack)."""
        frames = np.stack([self._frames[int(number)] for number in references.ravel()])
        return frames.reshape(*references.shape, *self.layout.shape)

    def _add(self, stream: int, frame: np.ndarray) -> int:
        number, self._next = self._next, self._next + 1
        self._frames[number] = frame.copy()
        order = self._order[stream]
        order.append(number)
        if len(order) > self._kept:
            del self._frames[order.popleft()]
        return number
