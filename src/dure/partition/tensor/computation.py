"""A computation in a thread of its own, which pauses at each collective of its layers.

Forwards and backwards of split layers need other workers in the middle of them, and autograd cannot be suspended. So
the code runs in a thread. At a collective the thread hands the call to the loop and waits; `resume` lets it go on.
One of the two threads runs at a time, so the order of all operations is that of the loop.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from dure.partition.tensor.ways import CollectiveCall


class Ended(BaseException):
    """The run has ended: raised in a computation that waits for a collective."""


class PausingThread:
    """A thread that computes one function at a time. `carry_out` pauses it; it is called in the thread.

    The thread runs from the first function to `end`, or until this object is freed.
    `draws`: the functions use PyTorch's random generator, whose state is kept for each function while it pauses.
    """

    def __init__(self, *, draws: bool = False) -> None:
        self._draws = draws
        self._state: torch.Tensor | None = None
        self._paused = False
        self._channel = _Channel()
        self._finalizer: weakref.finalize[..., PausingThread] | None = None

    def _begin(self) -> None:
        self._channel = _Channel()
        thread = Thread(target=_serve, args=(self._channel,), name="split computation", daemon=True)
        thread.start()
        self._finalizer = weakref.finalize(self, _end, self._channel, thread)

    def start(self, function: Callable[[], None]) -> CollectiveCall | None:
        """Run a function to its first collective, or to its end (None). Raises its error.

        A function that was left at a collective is given up.
        """
        self._state = None
        if self._paused:
            self.end()
        if self._finalizer is None:
            self._begin()
        return self._go(function)

    def end(self) -> None:
        """End the thread; a function that was left at a collective is given up. `start` begins another."""
        if self._finalizer is not None:
            self._finalizer()
        self._finalizer, self._paused = None, False

    def resume(self, answer: Any) -> CollectiveCall | None:
        """Continue behind a collective, whose result is `answer`."""
        return self._go(answer)

    def carry_out(self, call: CollectiveCall) -> Any:
        """Pause the thread until the loop has the result of a collective."""
        return self._channel.pause(call)

    def _go(self, value: Any) -> CollectiveCall | None:
        self._paused = False
        call = self._drawing(value) if self._draws else self._channel.handed(value)
        self._paused = call is not None
        return call

    def _drawing(self, value: Any) -> CollectiveCall | None:
        before = torch.get_rng_state()
        if self._state is not None:
            torch.set_rng_state(self._state)
        try:
            return self._channel.handed(value)
        finally:
            self._state = torch.get_rng_state()
            torch.set_rng_state(before)


class _Channel:
    """The two ends between the loop and the thread; each waits while the other runs."""

    def __init__(self) -> None:
        self.to_thread: SimpleQueue[Any] = SimpleQueue()
        self.to_loop: SimpleQueue[tuple[CollectiveCall | None, BaseException | None]] = SimpleQueue()

    def handed(self, value: Any) -> CollectiveCall | None:
        self.to_thread.put(value)
        call, error = self.to_loop.get()
        if error is not None:
            raise error
        return call

    def pause(self, call: CollectiveCall) -> Any:
        self.to_loop.put((call, None))
        answer = self.to_thread.get()
        if isinstance(answer, Ended):
            raise answer
        return answer


def _serve(channel: _Channel) -> None:
    """Compute functions until the run ends."""
    torch.autograd.set_multithreading_enabled(False)  # a backward on a device calls operators in this thread too
    while True:
        function = channel.to_thread.get()
        if isinstance(function, Ended):
            return
        error: BaseException | None = None
        try:
            function()
        except Ended:
            return
        except BaseException as raised:  # noqa: BLE001  (the loop raises it)
            error = raised
        del function
        channel.to_loop.put((None, error))
        del error


def _end(channel: _Channel, thread: Thread) -> None:
    """Unwind the thread: the interpreter may not end while it is inside of autograd."""
    channel.to_thread.put(Ended())
    thread.join(5.0)
