"""The cost of a codec: stated, measured on this machine, or by size alone in timing-only runs.

    encode     start + value * values of the slice
    decode     start + value * values of the slice
    combine    start + value * values of the slice, for each message that is added to a mean; for a vote,
               start + value * values of all messages, once

A codec states its cost as `Codec.cost`, a wrapper as `costs`, by the name of the codec that it joins. These costs were
measured by `python bench/codecs.py --costs`, on a machine of two cores, with one thread. `dure probe` measures the
costs of another machine for the key `codecs` of its cluster file.

`codec.cost` defines the operations; a line through the points is the codec's cost. The time may depend on the values,
so the values of a job are its gradients.

length of a message                      size here
the same for all values of a slice       exact
depends on the values (strom, top-k,     the slice's share in a message that was measured on the job's first
ternary with an entropy code)            gradients (`bytes_per_value`)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from dure.codec import WRAPPERS
from dure.codec.base import Codec, Vote
from dure.codec.coder import Coder, DenseCoder, FeedbackCoder, MomentumCoder, SliceLayout
from dure.core.catalogue import load
from dure.core.cost import CodecCost
from dure.core.node import Ghost
from dure.job.gradient import GradientWork
from dure.job.gradient_engine import GradientEngine
from dure.job.replica import Replica

if TYPE_CHECKING:
    from dure.job.job import Job


def cost_of(name: str, given: Mapping[str, CodecCost], own: CodecCost) -> CodecCost:
    """The cost of a codec with its wrappers, such as "sign+momentum", whose class states the cost `own`.

    The order of precedence: `given` for the whole name, the statement of the wrapper, `given` for the codec alone,
    `own`.
    """
    codec, _, wrapper = name.partition("+")
    joined = load(WRAPPERS[wrapper]).costs if wrapper in WRAPPERS else {}  # type: ignore[attr-defined]
    if name in given or codec not in joined:
        return given.get(name) or given.get(codec) or own
    cost: CodecCost = joined[codec]
    return cost


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


class SizeOnly(Codec):
    """Stands for `codec` in a timing-only run. `rate`: bytes per value of messages whose length depends on them."""

    __slots__ = ("codec", "exchange", "rate")

    def __init__(self, codec: Codec, rate: float) -> None:
        self.codec = codec
        self.exchange = codec.exchange  # type: ignore[misc]
        self.rate = rate

    def coder(self, layout: SliceLayout, seed: int = 0) -> Coder:
        return SizeOnlyCoder(self.codec.coder(layout, seed), self.rate)

    def vote(self) -> Vote | None:
        return None if self.codec.vote() is None else SizeOnlyVote()


class SizeOnlyCoder(Coder):
    """Makes messages of the sizes of the coder `like`."""

    def __init__(self, like: Coder, rate: float) -> None:
        super().__init__(like.numel)
        self._most = like.most_bytes
        self._nbytes = like.most_bytes if is_fixed(like) else min(like.most_bytes, round(rate * like.numel))

    @property
    def most_bytes(self) -> int:
        return self._most

    def encode(self, values: torch.Tensor) -> Any:
        return Ghost(self._nbytes, 1)

    encode_finite = encode

    def zeros(self, like: torch.Tensor) -> Any:
        return Ghost(self.numel)

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        """Write nothing."""

    def accumulate(self, message: torch.Tensor, out: torch.Tensor, weight: float = 1.0) -> None:
        """Add nothing."""


class SizeOnlyVote:
    """A vote without values: its result has the size of a message."""

    def decide(self, messages: Mapping[int, torch.Tensor], coder: Coder) -> torch.Tensor:
        return coder.encode(next(iter(messages.values())))

    settle = decide

    def state(self) -> dict[str, torch.Tensor]:
        return {}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Do nothing: there is no state."""


def is_fixed(coder: Coder) -> bool:
    """Whether all messages of a coder are equally long."""
    while isinstance(coder, FeedbackCoder | MomentumCoder):
        coder = coder.inner
    return isinstance(coder, DenseCoder) and coder.least_bytes == coder.most_bytes


def bytes_per_value(codec: Codec, slices: Iterable[Slice], scale: float = 1.0) -> float:
    """The mean length of `codec`'s messages over the values of the largest of `slices`; 0 where lengths are fixed.

    Values are multiplied by `scale`. The first message is left out, as residuals are empty before it.
    """
    if is_fixed(codec.coder(SliceLayout.plain(1))):
        return 0.0
    layout, values = max(slices, key=lambda each: each[0].numel)
    coder = codec.coder(layout)
    lengths = [coder.encode(each * scale).numel() for each in values]
    return sum(lengths[1:]) / len(lengths[1:]) / layout.numel
