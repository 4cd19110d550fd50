"""What a codec takes on this machine: encoding, decoding and combining slices of several sizes, timed.

`codec.cost` says what the operations are, and what lines through these points are for. What a codec takes may
depend on the values, so a job's are its gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from dure.codec.coder import SliceLayout
from dure.job.gradient import GradientWork
from dure.job.gradients import GradientEngine
from dure.job.replica import Replica

if TYPE_CHECKING:
    from dure.codec.base import Codec, Vote
    from dure.codec.coder import Coder
    from dure.job.job import Job

Points = dict[str, list[tuple[int, float]]]
"""For "encode", "decode" and "combine": (values, seconds)."""

Slice = tuple[SliceLayout, Sequence[torch.Tensor]]
"""Where its columns are, and values to encode, one after another."""

MESSAGES = 5
"""Gradients of a job that are encoded; a vote that is timed has as many voters."""

LARGEST = 1 << 22
"""Values of the largest slice that is timed: beyond the caches, where a line goes on as it is."""

SPREAD = (1, 4, 16, 256, 4096)
"""How many times smaller than the largest the slices are that a line is drawn through: small ones show its start."""

COLUMN = 1000
"""Values of a column, where there is no job."""

FEWEST, MOST = 5, 25
SPENT = 0.1
"""Seconds after which an operation is not repeated any more, once it has been FEWEST times."""


def timed(codec: Codec, slices: Iterable[Slice]) -> Points:
    """Seconds of what `codec` does to slices of several sizes: the least of some, as all else on a machine only adds.

    All of their values are encoded before anything is timed: residuals are there then, and memory has been touched.
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
    """What is timed of each operation, one after another and over again; of messages the last, as later ones are."""
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
    """Of the job's first gradients, from the front."""
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
    """Normally distributed values in columns of COLUMN."""
    rng = torch.Generator().manual_seed(0)
    for size in sizes(numel):
        bounds = (*range(0, size, COLUMN), size)
        layout = SliceLayout(size, bounds, (True,) * (len(bounds) - 1))
        yield layout, [torch.randn(size, generator=rng) for _ in range(messages)]


def sizes(numel: int) -> list[int]:
    """How many values the slices of a model of `numel` have; each once, the largest last."""
    return sorted({max(1, min(numel, LARGEST) // part) for part in SPREAD})
