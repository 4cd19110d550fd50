"""Buckets of a gradient that leave during backward, and the end of the step, by an engine of accelerators.

Backward completes tensors in an order, at shares of its time. A bucket leaves once all ranks have computed it and the
bucket before it has arrived. While it is under way, backward goes on 1 + contention times as slowly; the start of its
collective stops it. The optimizer follows the last bucket.

    library     buckets
    ddp         tensors in order until `first` bytes, then until `bucket` bytes; every tensor makes backward longer
    horovod     at a cycle with an idle network: all tensors that are ready, up to `bucket` bytes
    at-end      one, after backward
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from dure.core.step_shape import StepShape
from dure.runtime.virtual.accelerators import AcceleratorEngine


class Computed(NamedTuple):
    """The computation of a rank: its start, and its seconds if no collective disturbs it."""

    start: float
    seconds: float


class WorkClock:
    """The time, and the computation until then: `work` is the time at which it would be reached undisturbed."""

    def __init__(self, start: float) -> None:
        self.now = self.work = start

    def until(self, work: float) -> None:
        """Compute until `work`."""
        if work > self.work:
            self.now += work - self.work
            self.work = work

    def wait(self, seconds: float) -> None:
        """Compute for `seconds`."""
        self.now += seconds
        self.work += seconds

    def transfer(self, seconds: float, engine: AcceleratorEngine) -> None:
        """Compute while a collective of `seconds` is under way."""
        self.now += seconds
        self.work += max(0.0, seconds - engine.start) / (1.0 + engine.contention)


def end_of_step(
    shape: StepShape,
    computed: Sequence[Computed],
    ranks: int,
    engine: AcceleratorEngine,
    itemsize: int,
    seconds: Callable[[int], float],
) -> float:
    """Time at which `ranks` ranks, of which some are `computed`, have the mean gradient and have applied it.

    `seconds(nbytes)` are those of an all-reduce, its start among them.
    """
    library = engine.rules
    starts, spans = np.array(list(dict.fromkeys(computed))).T  # equal ranks are one

    def at(share: float, tensors: int) -> float:
        """The time of a share of the undisturbed step, at the last rank, with the costs of so many tensors."""
        return float(np.max(starts + spans * share)) + tensors * library.tensor

    before = 1.0 - shape.backward - shape.update
    over = at(1.0 - shape.update, len(shape.tensors))
    ready = [at(before + shape.backward * each.done, n + 1) for n, each in enumerate(shape.tensors)]
    if not engine.overlap:
        ready = [over] * len(ready)
    sizes = [each.numel * itemsize for each in shape.tensors]
    progress = WorkClock(float(starts.min()))
    if library.cycle:
        _send_in_cycles(progress, sizes, ready, ranks, engine, seconds)
    else:
        for nbytes, last in in_buckets(sizes, library.first, library.bucket):
            progress.until(ready[last] if math.isfinite(library.bucket) else over)
            progress.transfer(seconds(nbytes), engine)
    progress.until(over)
    return progress.now + float(spans.max()) * shape.update


def in_buckets(sizes: Sequence[int], first: float, others: float) -> Iterator[tuple[int, int]]:
    """The bytes and the last tensor of each bucket: it ends with the tensor that makes it as large as its limit.

    >>> list(in_buckets([3, 1, 1, 9, 1], first=2, others=4))
    [(3, 0), (11, 3), (1, 4)]
    """
    held, limit = 0, first
    for number, nbytes in enumerate(sizes):
        held += nbytes
        if held >= limit or number == len(sizes) - 1:
            yield held, number
            held, limit = 0, others


def _send_in_cycles(
    progress: WorkClock,
    sizes: Sequence[int],
    ready: Sequence[float],
    ranks: int,
    engine: AcceleratorEngine,
    seconds: Callable[[int], float],
) -> None:
    """At each cycle with an idle network, agree on what is ready, and send it."""
    library, origin, first = engine.rules, progress.now, 0
    while first < len(sizes):
        progress.until(ready[first])
        cycles = math.ceil((progress.now - origin) / library.cycle - 1e-9)  # a time that is a cycle but for rounding
        progress.wait(max(0.0, origin + cycles * library.cycle - progress.now))
        sums = accumulate(sizes[first:])
        last = first + sum(
            1
            for n, total in enumerate(sums)
            if n == 0 or (total <= library.bucket and ready[first + n] <= progress.work)
        )
        progress.wait(library.negotiation * ranks)
        progress.transfer(seconds(sum(sizes[first:last])), engine)
        first = last
