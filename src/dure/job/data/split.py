"""Distribution of samples to workers, and the order in which each worker reads its samples.

    | text                  | samples of a worker                                                           |
    |-----------------------|-------------------------------------------------------------------------------|
    | `iid`                 | disjoint parts of a random order; sizes differ by at most one                 |
    | `dirichlet:alpha=0.1` | disjoint parts; each label's share per worker is drawn from Dirichlet(alpha)  |
    | `whole`               | the whole set, each worker in an order of its own                             |
    | `striped`             | one order for all: step t takes the next sum(B_k) samples, worker k B_k of them |

Under `striped`, K workers with batch B read at each step the samples that one worker with batch K x B reads.

A worker's samples form a *stream* of epochs, each a new random order of the same indices. A batch is always full: the
last batch of an epoch continues into the next epoch, so each index occurs exactly once per epoch. An order depends only
on (seed, stream, epoch).

Dirichlet: Hsu, Qi & Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", 2019, section 3.1, applied to each label separately.

A batch of a batch method, such as L-BFGS, belongs to no worker: `Batches` cuts it into portions, and the samples of a
portion depend only on its number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dure.core.spec_text import names, nearest, parameters, parse_members, typed, value_text
from dure.errors import CheckpointError, UsageError

Indices = npt.NDArray[np.int64]
COMMON_STREAM = 0
SPLIT_STREAM = 2**32 - 1
"""Stream of the draws for the split itself. Streams of workers are numbered from 1."""


class Sampler:
    """The endless sequence of batches of one worker.

    `indices` are its samples, `stream` selects its random orders. Step t takes `batch_size` samples of the stream,
    starting at position `offset + t * stride`. `stride` is the batch size unless workers share a stream.

    >>> sampler = Sampler(np.arange(10), 4, seed=0, stream=1)
    >>> epoch = torch.cat([sampler.next() for _ in range(5)])
    >>> sorted(epoch[:10].tolist()) == sorted(epoch[10:].tolist()) == list(range(10))
    True
    """

    def __init__(
        self, indices: Indices, batch_size: int, *, seed: int, stream: int, offset: int = 0, stride: int | None = None
    ) -> None:
        self.indices = indices
        self.batch_size = batch_size
        self.seed = seed
        self.stream = stream
        self.offset = offset
        self.stride = batch_size if stride is None else stride
        self.position = 0
        self._epoch = -1
        self._order: Indices = indices

    def next(self) -> Tensor:
        """Indices of the next batch: int64, (batch_size,)."""
        start = self.position + self.offset
        self.position += self.stride
        parts = []
        stop = start + self.batch_size
        while start < stop:
            epoch, first = divmod(start, len(self.indices))
            part = self._ordered(epoch)[first : first + stop - start]
            parts.append(part)
            start += len(part)
        return torch.from_numpy(parts[0].copy() if len(parts) == 1 else np.concatenate(parts))

    @property
    def epoch(self) -> float:
        """Passes over `indices` so far, by all workers that share the stream."""
        return self.position / len(self.indices)

    @property
    def number(self) -> int:
        """As `BatchSampler`."""
        return self.position // self.stride

    @number.setter
    def number(self, number: int) -> None:
        self.position = number * self.stride

    def state(self) -> dict[str, int]:
        """The state that `restore` takes, as plain JSON."""
        return {"position": self.position, "seed": self.seed, "stream": self.stream, "samples": len(self.indices)}

    def restore(self, state: Mapping[str, int]) -> None:
        """Continue from `state`. Raises `CheckpointError` if it belongs to another sampler."""
        check_state(self.state(), state, "position")
        self.position = state["position"]

    def _ordered(self, epoch: int) -> Indices:
        if epoch != self._epoch:
            rng = np.random.default_rng((self.seed, self.stream, epoch))
            self._order = self.indices[rng.permutation(len(self.indices))]
            self._epoch = epoch
        return self._order


def check_state(mine: Mapping[str, int], saved: Mapping[str, int], moves: str) -> None:
    """Raise `CheckpointError` unless two states of a sampler agree in every entry except `moves`."""
    for key, value in mine.items():
        if key != moves and saved.get(key) != value:
            raise CheckpointError(
                f"this sampler has {key}={value}, the saved one {key}={saved.get(key)}: the data or their "
                "split differ. Resume with the job, split, seed and number of workers of the saved run."
            )


class BatchSampler(Protocol):
    """The endless sequence of batches of one worker, as indices of a data set; implemented by `Sampler`.

    `number` is that of the next batch, from 0 on. Setting it moves the sampler to another batch.
    """

    number: int

    def next(self) -> Tensor:
        """Indices of the next batch: int64, (batch size,)."""
        ...

    @property
    def epoch(self) -> float:
        """Passes over the samples so far."""
        ...

    def state(self) -> dict[str, int]:
        """The state that `restore` takes, as plain JSON."""
        ...

    def restore(self, state: Mapping[str, int]) -> None:
        """Continue from `state`. Raises `CheckpointError` if it belongs to another sampler."""
        ...


class Split(Protocol):
    """A distribution of samples to workers."""

    def samplers(self, targets: Tensor, batch_sizes: Sequence[int], *, seed: int) -> list[Sampler]:
        """Make one sampler per worker; worker k has batches of `batch_sizes[k]`. `targets` has a row per sample.

        The same arguments always give the same samplers. Raises `UsageError` if the samples cannot be split.
        """
        ...


@dataclass(frozen=True, slots=True)
class IID:
    """Disjoint parts of a random order."""

    def samplers(self, targets: Tensor, batch_sizes: Sequence[int], *, seed: int) -> list[Sampler]:
        _check(len(targets), batch_sizes, seed, disjoint=True)
        order = _rng(seed).permutation(len(targets))
        return _own_streams(np.array_split(order, len(batch_sizes)), batch_sizes, seed)

    def __str__(self) -> str:
        return "iid"


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every worker reads all samples, in an order of its own. The text form is "whole"."""

    def samplers(self, targets: Tensor, batch_sizes: Sequence[int], *, seed: int) -> list[Sampler]:
        _check(len(targets), batch_sizes, seed, disjoint=False)
        return _own_streams([np.arange(len(targets))] * len(batch_sizes), batch_sizes, seed)

    def __str__(self) -> str:
        return "whole"


@dataclass(frozen=True, slots=True)
class Striped:
    """One order for all workers; each step's samples are assigned in the order of ranks."""

    def samplers(self, targets: Tensor, batch_sizes: Sequence[int], *, seed: int) -> list[Sampler]:
        _check(len(targets), batch_sizes, seed, disjoint=False)
        everything = np.arange(len(targets))
        stride = sum(batch_sizes)
        offsets = np.cumsum([0, *batch_sizes[:-1]]).tolist()
        return [
            Sampler(everything, size, seed=seed, stream=COMMON_STREAM, offset=offset, stride=stride)
            for size, offset in zip(batch_sizes, offsets, strict=True)
        ]

    def __str__(self) -> str:
        return "striped"


@dataclass(frozen=True, slots=True)
class Dirichlet:
    """Disjoint parts with uneven labels: the smaller `alpha`, the fewer labels a worker has.

    A worker whose part would be empty gets one sample from the worker that has most.
    """

    alpha: float

    def __post_init__(self) -> None:
        if not (0 < self.alpha < math.inf):
            raise UsageError(
                f"alpha must be above 0 and finite, got {self.alpha}. Use 0.1 for uneven labels, 100 for even."
            )

    def samplers(self, targets: Tensor, batch_sizes: Sequence[int], *, seed: int) -> list[Sampler]:
        _check(len(targets), batch_sizes, seed, disjoint=True)
        if targets.dim() != 1 or targets.is_floating_point():
            found = f"the targets are {targets.dtype} of shape {tuple(targets.shape)}"
            if targets.shape[1:] == (0,):
                found = "these data have no tensor of labels"
            raise UsageError(
                f"dirichlet splits by label, one whole number per sample, but {found}. Use iid, whole or striped."
            )
        return _own_streams(self._parts(targets.cpu().numpy(), len(batch_sizes), _rng(seed)), batch_sizes, seed)

    def _parts(self, labels: Indices, workers: int, rng: np.random.Generator) -> list[Indices]:
        dealt: list[list[Indices]] = [[] for _ in range(workers)]
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            shares = rng.dirichlet(np.full(workers, self.alpha))
            borders = np.rint(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
            for worker, part in zip(dealt, np.split(members, borders), strict=True):
                worker.append(part)
        return _none_empty([np.concatenate(parts) for parts in dealt])

    def __str__(self) -> str:
        return f"dirichlet:alpha={value_text(self.alpha)}"


SPLITS: Mapping[str, type[IID] | type[Replicated] | type[Striped] | type[Dirichlet]] = {
    "iid": IID,
    "whole": Replicated,
    "striped": Striped,
    "dirichlet": Dirichlet,
}


def parse_split(text: str) -> Split:
    """Parse the text form of a split.

    >>> parse_split("dirichlet:alpha=0.1")
    Dirichlet(alpha=0.1)

    Raises `UsageError` that suggests the nearest valid text.
    """
    call, *wrappers = parse_members(text.strip())
    if call.name not in SPLITS or wrappers:
        raise UsageError(f'no split is called "{text}": there are {names(SPLITS)}.{nearest(call.name, SPLITS)}')
    kind = SPLITS[call.name]
    given = typed(call, kind)
    missing = [each.name for each in parameters(kind) if each.field not in given]
    if missing:
        raise UsageError(f"{call.name} needs {names(missing)}: write {call.name}:{missing[0]}=0.1.")
    return kind(**given)


def _rng(seed: int) -> np.random.Generator:
    return np.random.default_rng((seed, SPLIT_STREAM))


def _own_streams(parts: Sequence[Indices], batch_sizes: Sequence[int], seed: int) -> list[Sampler]:
    return [
        Sampler(part, size, seed=seed, stream=1 + rank)
        for rank, (part, size) in enumerate(zip(parts, batch_sizes, strict=True))
    ]


def _none_empty(parts: list[Indices]) -> list[Indices]:
    for rank, part in enumerate(parts):
        if len(part) == 0:
            richest = max(range(len(parts)), key=lambda other: len(parts[other]))
            parts[rank], parts[richest] = parts[richest][-1:], parts[richest][:-1]
    return parts


def _check(samples: int, batch_sizes: Sequence[int], seed: int, *, disjoint: bool) -> None:
    if not batch_sizes:
        raise UsageError("data cannot go to 0 workers. Give at least one batch size.")
    if min(batch_sizes) < 1:
        raise UsageError(f"a batch holds at least 1 sample, got batch sizes {list(batch_sizes)}.")
    if seed < 0:
        raise UsageError(f"a seed is a whole number of at least 0, got {seed}.")
    if disjoint and samples < len(batch_sizes):
        raise UsageError(f"{samples} samples cannot go to {len(batch_sizes)} workers without overlap. Use 'whole'.")


class Batches:
    """Batches of `size` out of `samples` samples, each in portions of at most `portion`.

    With `size=0` each batch has all samples, in order. Smaller batches are slices of a shuffled order, which is drawn
    from `seed` anew for each pass over the data. The samples left over at the end of a pass are not used in that pass.

    >>> batches = Batches(10, portion=4, seed=0)
    >>> batches.count, [batches.indices(0, portion).tolist() for portion in range(batches.count)]
    (3, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]])
    """

    def __init__(self, samples: int, *, portion: int, size: int = 0, seed: int = 0) -> None:
        if min(samples, portion) < 1 or size < 0:
            raise UsageError(f"a batch needs samples and portions, got {samples=}, {portion=}, {size=}.")
        self.samples = samples
        self.portion = portion
        self.size = min(size, samples) or samples
        self.seed = seed
        self._pass = -1
        self._order = torch.arange(samples)

    @property
    def change(self) -> bool:
        """Whether one batch differs from the next."""
        return self.size < self.samples

    @property
    def count(self) -> int:
        """Number of portions of a batch."""
        return -(-self.size // self.portion)

    def indices(self, batch: int, portion: int) -> torch.Tensor:
        """Indices of the samples of one portion of one batch."""
        if self.change:
            turn, place = divmod(batch, self.samples // self.size)
            self._shuffle(turn)
        else:
            place = 0
        low = place * self.size + portion * self.portion
        return self._order[low : min(low + self.portion, (place + 1) * self.size)]

    def _shuffle(self, turn: int) -> None:
        if self._pass != turn:
            self._pass = turn
            self._order = torch.from_numpy(np.random.default_rng([self.seed, turn, 11]).permutation(self.samples))
