"""Data of language models: a long text as one vector of tokens. A sample is a window of the text.

The window that starts at s has tokens s, ..., s + block - 1 as inputs, and tokens s + 1, ..., s + block as targets.
A batch has shape (batch size, block). With N tokens, K workers, batch size B_k of worker k, and C = sum of B_k:

    | windows      | sample i starts at | step t of worker k                                       | as in      |
    |--------------|--------------------|----------------------------------------------------------|------------|
    | `random`     | i                  | B_k starts, drawn uniformly from 0, ..., N - block - 1   | nanoGPT    |
    | `contiguous` | i block            | B_k samples of an order without repetition (`split.py`)  |            |
    | `batchified` | i                  | for each of its columns c: c L + (t mod W) block         | word LM    |

`batchified` cuts the text into C columns of L = floor(N / C) tokens. Each column has W = floor((L - 1) / block) windows
in the order of the text; a shorter last window is left out. Worker 0 has the first B_0 columns, worker 1 the next B_1.
nanoGPT is Karpathy's program; word LM is PyTorch's example word_language_model.

    | split       | `random`                                  | `batchified`                                   |
    |-------------|-------------------------------------------|------------------------------------------------|
    | `iid`       | every worker draws from the whole text    | C columns, assigned in the order of ranks      |
    | `whole`     | as `iid`                                  | every worker has the whole text in B_k columns |
    | `striped`   | each step's C draws are assigned by rank  | as `iid`                                       |
    | `dirichlet` | rejected                                  | rejected                                       |

Under `striped`, K workers read at each step the windows that one worker with batch C reads. `contiguous` takes any
split except `dirichlet`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dure.errors import UsageError
from dure.job.data.dataset import no_labels
from dure.job.data.split import COMMON_STREAM, IID, BatchSampler, Replicated, Split, Striped, check_state


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """Windows of `block` tokens out of one vector `tokens` of integers.

    `tokens` is a tensor or a NumPy array on the CPU. For a `numpy.memmap`, only the windows are read from the file.

    >>> text = Stream(torch.arange(10), block=4, windows="contiguous")
    >>> inputs, targets = text.batch(torch.tensor([1]))
    >>> len(text), inputs.tolist(), targets.tolist()
    (2, [[4, 5, 6, 7]], [[5, 6, 7, 8]])
    """

    tokens: Any
    block: int
    windows: Literal["random", "contiguous", "batchified"] = "random"

    def __post_init__(self) -> None:
        tokens = self.tokens.numpy() if isinstance(self.tokens, Tensor) else self.tokens
        if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            kind = (
                f"{tokens.dtype} of shape {tokens.shape}" if isinstance(tokens, np.ndarray) else type(tokens).__name__
            )
            raise UsageError(f"Stream.tokens must be one vector of whole numbers, got {kind}. Write torch.tensor(ids).")
        if self.windows not in ("random", "contiguous", "batchified"):
            raise UsageError(f"Stream.windows must be random, contiguous or batchified, got {self.windows!r}.")
        if not isinstance(self.block, int) or self.block < 1:
            raise UsageError(f"Stream.block counts the tokens of a window and must be at least 1, got {self.block!r}.")
        if len(tokens) <= self.block:
            raise UsageError(
                f"a window of {self.block} tokens and the one after it need {self.block + 1}, and Stream has "
                f"{len(tokens)}. Use a smaller block."
            )
        object.__setattr__(self, "tokens", tokens)

    def __len__(self) -> int:
        return self.blocks if self.windows == "contiguous" else len(self.tokens) - self.block

    @property
    def blocks(self) -> int:
        """Number of windows that do not overlap."""
        return (len(self.tokens) - 1) // self.block

    def batch(self, indices: Tensor, draw: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both int64 of shape (len(indices), block)."""
        starts = indices.numpy() * (self.block if self.windows == "contiguous" else 1)
        rows = np.asarray(self.tokens[starts[:, None] + np.arange(self.block + 1)], dtype=np.int64)
        inputs, targets = np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def samplers(self, split: Split, batch_sizes: Sequence[int], *, seed: int) -> Sequence[BatchSampler]:
        """Make one sampler per worker according to `split`; worker k has batches of `batch_sizes[k]`.

        Raises `UsageError` for the split `dirichlet`, as tokens have no labels.
        """
        if self.windows == "contiguous":
            return split.samplers(no_labels(len(self)), batch_sizes, seed=seed)
        if not isinstance(split, IID | Replicated | Striped):
            raise UsageError(f'windows="{self.windows}" take the splits iid, whole and striped, got {split}.')
        if not batch_sizes or min(batch_sizes) < 1:
            raise UsageError(f"a batch holds at least 1 window, got batch sizes {list(batch_sizes)}.")
        offsets = np.cumsum([0, *batch_sizes[:-1]]).tolist()
        dealt = list(zip(batch_sizes, offsets, [sum(batch_sizes)] * len(batch_sizes), strict=True))
        if self.windows == "batchified":
            own = [(size, 0, size) for size in batch_sizes] if isinstance(split, Replicated) else dealt
            return [Columns(self, size, first, columns, seed=seed) for size, first, columns in own]
        if isinstance(split, Striped):
            return [Draws(self, *place, seed=seed, stream=COMMON_STREAM) for place in dealt]
        return [Draws(self, size, 0, size, seed=seed, stream=1 + rank) for rank, size in enumerate(batch_sizes)]

    def steps(self, epochs: float, batch: int) -> int:
        """Number of steps of `batch` samples in `epochs` passes.

        A pass has as many windows as fit in the text without overlap, also for random windows.
        """
        passes = self.blocks / batch
        if self.windows == "batchified":
            passes = float(_windows_of_column(self, batch))
        return math.ceil(epochs * passes)

    def to(self, dtype: torch.dtype) -> Stream:
        """Returns the stream itself, because tokens are integers."""
        return self


class Draws:
    """Starts of random windows: each step draws `total` starts and takes those from `offset` to `offset + size`."""

    def __init__(self, text: Stream, size: int, offset: int, total: int, *, seed: int, stream: int) -> None:
        self._text = text
        self._places = slice(offset, offset + size)
        self._total = total
        self._seed = seed
        self._stream = stream
        self.number = 0

    def next(self) -> Tensor:
        """As `BatchSampler`."""
        rng = np.random.default_rng((self._seed, self._stream, self.number))
        self.number += 1
        return torch.from_numpy(rng.integers(0, len(self._text), size=self._total)[self._places].copy())

    @property
    def epoch(self) -> float:
        """As `BatchSampler`."""
        return self.number * self._total / self._text.blocks

    def state(self) -> dict[str, int]:
        """As `BatchSampler`."""
        return {"step": self.number, "seed": self._seed, "stream": self._stream, "samples": len(self._text)}

    def restore(self, state: Mapping[str, int]) -> None:
        """As `BatchSampler`."""
        check_state(self.state(), state, "step")
        self.number = state["step"]


class Columns:
    """Starts of windows in the order of the text, for the columns `first` to `first + size` out of `columns`."""

    def __init__(self, text: Stream, size: int, first: int, columns: int, *, seed: int) -> None:
        self._block = text.block
        self._windows = _windows_of_column(text, columns)
        self._starts = np.arange(first, first + size) * (len(text.tokens) // columns)
        self._identity = {"seed": seed, "samples": len(text), "columns": columns, "first": first}
        self.number = 0

    def next(self) -> Tensor:
        """As `BatchSampler`."""
        starts = self._starts + self.number % self._windows * self._block
        self.number += 1
        return torch.from_numpy(starts)

    @property
    def epoch(self) -> float:
        """As `BatchSampler`."""
        return self.number / self._windows

    def state(self) -> dict[str, int]:
        """As `BatchSampler`."""
        return {"step": self.number, **self._identity}

    def restore(self, state: Mapping[str, int]) -> None:
        """As `BatchSampler`."""
        check_state(self.state(), state, "step")
        self.number = state["step"]


def _windows_of_column(text: Stream, columns: int) -> int:
    """W in the equations above. Raises `UsageError` if a column is shorter than a window."""
    length = len(text.tokens) // columns
    if length <= text.block:
        raise UsageError(
            f"{len(text.tokens)} tokens in {columns} columns, one per row of all batches, are {length} tokens per "
            f"column: none has a window of {text.block}. Use smaller batches, a smaller block or fewer workers."
        )
    return (length - 1) // text.block
