"""Speeds of workers in the steady state of a run, from the times at which they finished steps.

The speed of a worker is its number of steps between two of its steps, over the seconds between them: after the pipeline
is full (`warm` steps), over whole periods of the method, and before the first worker has done its last step, since the
others would no longer meet it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dure.sync.worker_state import WorkerState


class StepTimes:
    """Times of the steps of each worker. `sent` has the bytes of all workers at the steps of the first that steps."""

    def __init__(self, warm: int, period: int) -> None:
        self._warm = warm
        self._period = period
        self._times: dict[int, list[float]] = {}
        self._sent: list[int] = []

    def __call__(self, worker: WorkerState, now: float, sent: Callable[[], int]) -> None:
        """Note that a worker has finished a step."""
        self._times.setdefault(worker.number, []).append(now)
        if worker.number == next(iter(self._times)):
            self._sent.append(sent())

    @property
    def count(self) -> int:
        """The steps of all workers."""
        return sum(map(len, self._times.values()))

    @property
    def sendings(self) -> int:
        """The steps that count, of the first worker, in which a worker has sent something."""
        first, count = self._window(next(iter(self._until_the_end().values())))
        sent = self._sent[first : first + count + 1]
        return sum(after > before for before, after in pairwise(sent))

    def steps_per_second(self) -> dict[int, float]:
        """The speed of each worker."""
        return {worker: _speed(times, *self._window(times)) for worker, times in self._until_the_end().items()}

    def bytes_per_second(self) -> float:
        """The bytes that all workers send in a second."""
        times = next(iter(self._until_the_end().values()))
        first, count = self._window(times)
        if count < 1:
            return self._sent[-1] / self._times[next(iter(self._times))][-1]
        return (self._sent[first + count] - self._sent[first]) / (times[first + count] - times[first])

    def _until_the_end(self) -> dict[int, Sequence[float]]:
        end = min(times[-1] for times in self._times.values())
        return {worker: [each for each in times if each <= end] for worker, times in self._times.items()}

    def _window(self, times: Sequence[float]) -> tuple[int, int]:
        """The first step that counts, and how many after it: whole periods; all of a slow worker with few steps."""
        first = min(self._warm, max(0, len(times) - 1 - self._period))
        return first, (len(times) - 1 - first) // self._period * self._period or len(times) - 1 - first


def _speed(times: Sequence[float], first: int, count: int) -> float:
    if count < 1:
        return 1 / times[-1] if times else 0.0
    return count / (times[first + count] - times[first])
