"""Turns of tasks that must not overlap."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dure.core.node import Node, Operation


class Turns:
    """A queue, first come first served, of the tasks of one process that use `what` one at a time.

    A coroutine takes its turn in the caller's own text, since a free turn must cost no further coroutine:

        if turns.busy:
            await turns.wait(node)
        turns.busy = True
        try:
            ...
        finally:
            turns.end()
    """

    __slots__ = ("_label", "_queue", "busy")

    def __init__(self, what: str) -> None:
        self.busy = False
        self._label = f"its turn at {what}"
        self._queue: deque[Operation[None]] = deque()

    async def wait(self, node: Node) -> None:
        """Wait until the turns before this one have ended."""
        turn: Operation[None] = node.promise(self._label)
        self._queue.append(turn)
        taken = False
        try:
            await turn
            taken = True
        finally:
            if not taken:
                self._give_up(turn)

    def _give_up(self, turn: Operation[None]) -> None:
        # The turn may have come before its task was cancelled: then it is passed on, or the queue would stand still.
        if turn.done:
            self.end()
        else:
            self._queue.remove(turn)

    def end(self) -> None:
        """End the present turn; the first task in the queue gets the next one."""
        if self._queue:
            self._queue.popleft().resolve()  # `busy` stays set: no other task may come in between
        else:
            self.busy = False
