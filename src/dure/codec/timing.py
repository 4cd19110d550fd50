"""Measurement of a codec on this machine: seconds of encoding, decoding and combining slices of several sizes.

`codec.cost` defines the operations; a line through the points is the codec's cost. The time may depend on the values,
so the values of a job are its gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from dure.codec.coder import SliceLayout
from dure.job.gradient import GradientWork
from dure.job.gradient_engine import GradientEngine
from dure.job.replica import Replica

if TYPE_CHECKING:
    from dure.codec.base import Codec, Vote
    from dure.codec.coder import Coder
    from dure.job.job import Job

Points = dict[str, list[tuple[int, float]]]
"""Points (values, seconds) for each of "encode", "decode" and "combine"."""

Slice = tuple[SliceLayout, Sequence[torch.Tensor]]
"""The layout of a slice, and values to encode, one after another."""

MESSAGES = 5
"""Gradients of a job that are encoded, and voters of a vote that is timed."""

LARGEST = 1 << 22
"""Values of the largest slice that is timed. It exceeds the caches, and from there on the time is proportional."""

SPREAD = (1, 4, 16, 256, 4096)
"""Factors by which the timed slices are smaller than the largest. The small ones determine the start of the line."""

COLUMN = 1000
"""Values of a column in random slices."""

FEWEST, MOST = 5, 25
SPENT = 0.1
"""Seconds after which an operation is not repeated, once it has run FEWEST times."""


def timed(codec: Codec, slices: Iterable[Slice]) -> Points:
    """Measure the operations of `codec` on slices of several sizes.

    A point has the least seconds of several runs, since other work on the machine only adds time. All values are
    encoded once before timing starts, so that residuals exist and memory has been touched.
    """
    points: Points = {"encode": [], "decode": [], "combine": []}
    for layout, values in slices:
        coder, vote = codec.coder(layout), codec.vote()
        messages = {i: coder.encode(each) for i, each in enumerate(values)}
        together = 1 if vote is None else len(messages)
        for operation, works in _works(coder, vote, values, messages):
            count = together if operation == "combine" else 1
            points[operation].append((count * layout.numel, _least_seconds(works)))
    return points


def _works(
    coder: Coder, vote: Vote | None, values: Sequence[torch.Tensor], messages: dict[int, torch.Tensor]
) -> Iterator[tuple[str, Sequence[Callable[[], object]]]]:
    """The calls to time for each operation, to be repeated in turn. They use the last message: it has a residual."""
    out, message = torch.zeros(coder.numel), messages[len(messages) - 1]
    yield "encode", [partial(coder.encode, each) for each in values]
    yield "decode", [partial(coder.decode, message, out)]
    if vote is None:
        yield "combine", [partial(coder.accumulate, message, out, 0.5)]
    else:
        yield "combine", [partial(vote.decide, messages, coder)]


def _least_seconds(works: Sequence[Callable[[], object]]) -> float:
    times: list[float] = []
    while len(times) < FEWEST or (len(times) < MOST and sum(times) < SPENT):
        work = works[len(times) % len(works)]
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def slices_of(job: Job) -> Iterator[Slice]:
    """Slices of several sizes of the job's first gradients, from the front of the flat vector."""
    layers, gradient_engine = Replica(job.build(0)).layers, GradientEngine(job, exact=True)
    (sampler,) = job.samplers((job.batch_size,), seed=0)
    initial = gradient_engine.initial_values(0)
    gradients = []
    for step in range(MESSAGES):
        inputs, targets = job.train.batch(sampler.next())
        work = GradientWork(0, step, initial, inputs, targets, seed=0, flops=0.0)
        gradients.append(gradient_engine.one(work).values.clone())
    for size in sizes(initial.numel()):
        yield SliceLayout.of(layers, [(0, size)]), [each[:size] for each in gradients]


def random_slices(numel: int = LARGEST, messages: int = MESSAGES) -> Iterator[Slice]:
    """Slices of several sizes of normally distributed values, in columns of COLUMN."""
    rng = torch.Generator().manual_seed(0)
    for size in sizes(numel):
        bounds = (*range(0, size, COLUMN), size)
        layout = SliceLayout(size, bounds, (True,) * (len(bounds) - 1))
        yield layout, [torch.randn(size, generator=rng) for _ in range(messages)]


def sizes(numel: int) -> list[int]:
    """The sizes in values of the slices of a model of `numel` values, ascending, without repetition."""
    return sorted({max(1, min(numel, LARGEST) // part) for part in SPREAD})
