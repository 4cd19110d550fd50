"""The order in which the kernel of virtual time runs callbacks, against a plain heap of (time, number, callback)."""

from __future__ import annotations

import random
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

import pytest

from dure.core.node import Loop
from dure.runtime.virtual.group import shared
from dure.runtime.virtual.kernel import Kernel


class Plain(Loop):
    """The same order, in the simplest way: one heap for callbacks, and one for external events."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.events = self._number = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._external: list[tuple[float, int, Callable[[], None]]] = []
        self._void: set[int] = set()

    def at(self, time: float, callback: Callable[[], None]) -> None:
        self.timer(time, callback)

    def timer(self, time: float, callback: Callable[[], None]) -> int:
        self._number += 1
        heappush(self._heap, (time, self._number, callback))
        return self._number

    def void(self, timer: int) -> None:
        self._void.add(timer)

    def external_event(self, time: float, callback: Callable[[], None]) -> None:
        self._number += 1
        heappush(self._external, (time, self._number, callback))

    def run(self) -> None:
        while True:
            self.run_ready()
            while self._heap and self._heap[0][1] in self._void:
                heappop(self._heap)
            if not self._heap:
                return
            external = self._external and self._external[0][0] <= self._heap[0][0]
            self.now, _, callback = heappop(self._external if external else self._heap)
            self.events += 1
            callback()


def played(kernel: Any, seed: int) -> list[tuple[float, int]]:
    """What a random program runs, and when: callbacks that ask for others, mostly at times that others have too."""
    draw = random.Random(seed)
    trace: list[tuple[float, int]] = []
    timers: list[Any] = []
    pending: set[int] = set()

    def ask(number: int) -> None:
        time = kernel.now + draw.choice([0.0, 0.0, 1.0, 1.0, 2.0, draw.random()])
        kind = draw.choice(["at", "at", "timer", "external_event"])
        if kind == "timer":
            pending.add(number)
            timers.append((number, kernel.timer(time, lambda: happen(number))))
        else:
            getattr(kernel, kind)(time, lambda: happen(number))

    def happen(number: int) -> None:
        pending.discard(number)
        trace.append((kernel.now, number))
        for _ in range(draw.choice([0, 0, 1, 2])):
            if len(trace) < 200:
                ask(1000 * number + len(trace))
        if timers and draw.random() < 0.3:
            voided, timer = draw.choice(timers)
            if voided in pending:
                pending.discard(voided)
                kernel.void(timer)
        if draw.random() < 0.3:
            kernel.soon(lambda: trace.append((kernel.now, -number)))

    for number in range(1, 20):
        ask(number)
    kernel.run()
    return [*trace, (kernel.now, kernel.events)]


@pytest.mark.sampled(40)
@pytest.mark.parametrize("seed", range(200))
def test_callbacks_run_as_from_a_plain_heap(seed):
    assert played(Kernel(), seed) == played(Plain(), seed)


def test_a_timer_that_was_called_off_neither_runs_nor_passes_time():
    kernel, ran = Kernel(), []
    for place in range(3):
        timer = kernel.timer(5.0, lambda place=place: ran.append(place))
        if place != 1:
            kernel.void(timer)
    kernel.void(kernel.timer(9.0, lambda: ran.append(9)))
    kernel.run()
    assert (ran, kernel.now, kernel.events) == ([1], 5.0, 1)


def test_calling_off_a_timer_that_has_come_stops_no_other_of_that_time():
    kernel, ran = Kernel(), []
    first = kernel.timer(1.0, lambda: ran.append("first"))
    kernel.run()
    kernel.at(1.0, lambda: ran.append("second"))
    kernel.void(first)
    kernel.run()
    assert ran == ["first", "second"]


@pytest.mark.parametrize("ranks", [range(2, 5), (2, 3, 4), [2, 3, 4]])
def test_consecutive_ranks_are_one_key(ranks):
    assert shared(ranks) == range(2, 5)


def test_other_ranks_are_a_key_too():
    assert shared([3, 1]) == (3, 1)
    assert shared([]) == range(0)
