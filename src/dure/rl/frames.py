"""Frames of stacked observations: each is sent once, by references, and stored once, in a ring."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray

from dure.core.state import State
from dure.errors import UsageError
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


GROWTH = 1.5

MOVED = 1024  # frames copied at a time when the ring grows


class FrameRing:
    """Frames under ascending numbers; the frames of a message are freed with its last transition.

    `room`: frames for which memory is reserved at first. A frame takes memory once it is written.
    """

    def __init__(self, layout: FrameLayout, room: int) -> None:
        self.layout = layout
        self._ring = np.empty((room, *layout.shape), np.uint8)
        self._oldest = self._next = 0
        # Of each message: the key after its last transition, and the number after its frames.
        self._messages: deque[tuple[int, int]] = deque()

    def __len__(self) -> int:
        return self._next - self._oldest

    def check(self, message: Transitions) -> None:
        """Raise `UsageError` if the frames of a message do not fit the layout or its references are not to them."""
        frames = message[FRAMES]
        if frames.shape[1:] != self.layout.shape or frames.dtype != np.uint8:
            raise UsageError(
                f"frames must be uint8 of shape {self.layout.shape}, got {frames.dtype} {frames.shape[1:]}."
            )
        for name in STACKED:
            indices = message[name]
            if indices.size and not (indices.min() >= 0 and indices.max() < len(frames)):
                raise UsageError(f"{name} refers to frames that are not among the {len(frames)} of its message.")

    def add(self, message: Transitions, end: int) -> Transitions:
        """Store a message's frames until the transitions before key `end` are evicted.

        Returns the message with the numbers of frames in place of its indices.
        """
        frames, first = message[FRAMES], self._next
        if len(self) + len(frames) > len(self._ring):
            self._grow(len(self) + len(frames))
        self._write(first, frames)
        self._next += len(frames)
        self._messages.append((end, self._next))
        return message | {name: message[name] + np.int64(first) for name in STACKED}

    def free(self, oldest: int) -> None:
        """Free the frames of messages that have no transition from key `oldest` on."""
        while self._messages and self._messages[0][0] <= oldest:
            _, self._oldest = self._messages.popleft()

    def stacks(self, numbers: NDArray[np.int64]) -> NDArray[np.uint8]:
        """The frames of `numbers` (count, stack), as (count, stack, *shape)."""
        return self._ring.take(numbers % len(self._ring), axis=0)

    def _write(self, first: int, frames: NDArray[np.uint8]) -> None:
        at = first % len(self._ring)
        fit = len(self._ring) - at
        self._ring[at : at + len(frames)] = frames[:fit]
        self._ring[: max(len(frames) - fit, 0)] = frames[fit:]

    def _grow(self, needed: int) -> None:
        old, oldest = self._ring, self._oldest
        self._ring = np.empty((max(needed, int(len(old) * GROWTH)), *self.layout.shape), np.uint8)
        for first in range(oldest, self._next, MOVED):
            numbers = np.arange(first, min(first + MOVED, self._next))
            self._write(first, old[numbers % len(old)])

    # ---- state

    def state(self) -> State:
        messages = torch.tensor(list(self._messages), dtype=torch.int64).reshape(-1, 2)
        frames = self.stacks(np.arange(self._oldest, self._next))
        return State({"frames": torch.from_numpy(frames), "messages": messages}, {"oldest": self._oldest})

    def restore(self, state: State) -> None:
        frames = state.tensors["frames"].cpu().numpy()
        self._oldest = state.plain["oldest"]
        self._next = self._oldest + len(frames)
        if len(frames) > len(self._ring):
            self._ring = np.empty((len(frames), *self.layout.shape), np.uint8)
        self._write(self._oldest, frames)
        self._messages = deque((int(end), int(number)) for end, number in state.tensors["messages"].tolist())
